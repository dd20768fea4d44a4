"""What autograd keeps for the backward, tensor by tensor, as our forwards make it (model/kernels/fused_forwards.py).

Every row is bytes a token. Derived, not fitted: the tests count what really is kept on a CPU and compare. Of compiled
blocks the compiler keeps whatever a multiplication of the backward reads, and makes pointwise results again; so the
list is the same but for what is marked.

D width, Q all queries' heads, K all keys' heads, F feed-forward; e bytes of a number, r of the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sojourn.estimate.workload import Workload


@dataclass(frozen=True)
class Kept:
    name: str
    bytes: float  # a token
    formula: str


def block_keeps(work: Workload) -> list[Kept]:
    """One block, nothing recomputed."""
    return [row for row in (*_attention(work), *_feed_forward(work)) if row.bytes]


def kept_between(work: Workload) -> list[Kept]:
    """What a block keeps from its forward until its backward comes, by how much is recomputed."""
    if work.activation_checkpointing == "off":
        return block_keeps(work)
    shape, e, r = work.model, work.compute_bytes, work.residual_bytes
    rows = [Kept("block input", shape.hidden * r, "D·r")]
    if work.activation_checkpointing == "selective":
        q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        names = {"q_proj": q, "k_proj": k, "v_proj": k, "o_proj": shape.hidden, "gate_proj": inner(work),
                 "up_proj": inner(work), "down_proj": shape.hidden}  # fmt: skip
        if work.compiled:  # nothing of the backward reads it
            del names["down_proj"]
        made = sum(size * (2 if work.has_adapter(name) else 1) for name, size in names.items())
        rows.append(Kept("multiplications' results", made * e, "(Q + 2K + 2F + 2D)·e, twice where adapted"))
        rows.append(Kept("adapters' inner results", _adapter_inner(work, *names), "rank·e each"))
        rows += [row for row in _attended(work) if row.name in ("attention out", "log-sum-exp", "scores")]
    return [row for row in rows if row.bytes]


def inner(work: Workload) -> int:
    """Feed-forward width that a token meets."""
    shape = work.model
    if shape.experts is None:
        return shape.ffn
    return (shape.active_experts or 1) * (shape.expert_ffn or shape.ffn) + (shape.shared_ffn or 0)


def outside_blocks(work: Workload) -> list[Kept]:
    """Of the ends: embedding, final norm, positions, tables of rotation."""
    shape, e = work.model, work.compute_bytes
    return [
        Kept("token ids, positions, documents", 8 + 8 + 4, "8 + 8 + 4"),
        Kept("rotation tables", 2 * shape.head_dim * work.residual_bytes, "2·head·r"),
        *_norm(work, "final norm", shape.hidden, trained=not work.uses_lora),
        Kept("places of targets", 16, "8 + 8"),
        *([Kept("embedding, widened", shape.hidden * 4, "4·D")] if e == 2 and not work.uses_lora else []),
    ]


def kept_casts(work: Workload) -> int:
    """Bytes of narrow copies of a block's weights, kept where weights are held in 32 bits but multiplied in 16 or in 8.

    With FSDP they travel in 16 bits already.
    """
    if work.fp8 != "off" and not work.uses_lora:
        return block_parameters(work)
    if work.compute_bytes == 4 or (work.engine in ("fsdp", "deepspeed") and not work.uses_lora):
        return 0
    return 2 * (adapter_parameters(work) // work.model.layers if work.uses_lora else block_parameters(work))


def block_parameters(work: Workload) -> int:
    return work.model.layer_parameters()


def adapter_parameters(work: Workload) -> int:
    """LoRA's, of all blocks. Experts have none: transformers keeps them as one tensor, not as linear layers."""
    shape = work.model
    q, k, d = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    sizes = {"q_proj": d + q, "k_proj": d + k, "v_proj": d + k, "o_proj": q + d}
    sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), d + shape.ffn)
    return shape.layers * work.lora_rank * sum(size for name, size in sizes.items() if work.has_adapter(name))


def _norm(work: Workload, name: str, size: int, trained: bool, groups: int = 1) -> Iterator[Kept]:
    """Its input and the inverse of its length. A CPU has no kernel for it and widens: input and, where the norm's
    weight is trained, the normed input too, both in 32 bits."""
    if work.device_type == "cpu" or not (work.fused_forwards or work.compiled):
        yield Kept(f"{name}: input in 32 bits", 4 * size, "4·size")
        if trained:
            yield Kept(f"{name}: normed in 32 bits", 4 * size, "4·size")
    else:
        yield Kept(f"{name}: input", work.residual_bytes * size, "r·size")
    yield Kept(f"{name}: inverse length", 4 * groups, "4")


def _linear_input(work: Workload, name: str, size: int, *layers: str) -> Iterator[Kept]:
    """The input of layers that share it, where one of them is trained or has an adapter.

    With dropout each adapter has a version of its own, and a mask of it; autocast casts for each layer by itself.
    """
    e, needed = work.compute_bytes, [layer for layer in layers if work.saves_input(layer)]
    if not needed:
        return
    if work.uses_lora and work.lora_dropout:
        yield Kept(f"{name}, dropped out", len(needed) * size * (e + 1), "size·(e + mask) an adapter")
    elif work.fp8 != "off" and not work.uses_lora:
        yield Kept(f"{name}, in 8 bits", size, "size")
    elif work.residual_bytes > e and not work.compiled:
        yield Kept(f"{name}, cast for each", len(needed) * size * e, "size·e a layer")
    else:
        yield Kept(name, size * e, "size·e")


def _adapter_inner(work: Workload, *layers: str) -> float:
    return sum(work.has_adapter(layer) for layer in layers) * work.lora_rank * work.compute_bytes


def _attention(work: Workload) -> Iterator[Kept]:
    shape = work.model
    trained = not work.uses_lora
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield from _norm(work, "first norm", shape.hidden, trained)
    yield from _linear_input(work, "attention's input", shape.hidden, "q_proj", "k_proj", "v_proj")
    if shape.qk_norm:
        yield from _norm(work, "query norm", q, trained, shape.heads)
        yield from _norm(work, "key norm", k, trained, shape.kv_heads)
    yield from _attended(work)
    if work.lora_dropout if work.uses_lora else work.fp8 != "off":  # else what attention itself keeps serves
        yield from _linear_input(work, "attention out", q, "o_proj")
    yield Kept("adapters' inner results", _adapter_inner(work, "q_proj", "k_proj", "v_proj", "o_proj"), "rank·e each")


def _attended(work: Workload) -> Iterator[Kept]:
    """What attention's own backward reads. Its output is also the input of `o_proj`, and is kept once."""
    shape, e = work.model, work.compute_bytes
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    seen = k if work.attention_backend.native_gqa else q
    if work.attention == "math":
        yield Kept("queries, keys, values in 32 bits", 3 * q * 4, "3·Q·4")
        yield Kept("scores", shape.heads * work.sequence_length * (4 + 1), "heads·T·(4 + mask)")
    else:
        yield Kept("queries", q * e, "Q·e")
        yield Kept("keys and values", 2 * seen * e, "2·K·e, as many heads as queries where repeated")
        yield Kept("log-sum-exp", 4 * shape.heads, "4·heads")
        if work.attention == "sdpa" and work.is_packed and work.device_type == "cuda":
            yield Kept("mask as numbers", work.sequence_length * e, "T·e")
    yield Kept("attention out", q * e, "Q·e")


def _feed_forward(work: Workload) -> Iterator[Kept]:
    shape, e, wide = work.model, work.compute_bytes, inner(work)
    yield from _norm(work, "second norm", shape.hidden, not work.uses_lora)
    yield from _linear_input(work, "feed-forward's input", shape.hidden, "gate_proj", "up_proj")
    if shape.experts is not None:
        times = (shape.active_experts or 1) + (1 if shape.shared_ffn else 0)
        yield Kept("tokens sorted by expert", 2 * times * shape.hidden * e, "2·active·D·e")
        yield Kept("router", 3 * 4 * shape.experts, "3·4·experts")
    yield Kept("gate and up", 2 * wide * e, "2·F·e")
    if work.device_type == "cpu" or not (work.fused_forwards or work.compiled):  # no kernel that does both at once
        yield Kept("gate, activated", wide * e, "F·e")
    yield from _linear_input(work, "gated product", wide, "down_proj")
    names = ("gate_proj", "up_proj", "down_proj")
    yield Kept("adapters' inner results", _adapter_inner(work, *names), "rank·e each")
    for number in range(shape.norms - 2):
        yield from _norm(work, f"norm {number + 3}", shape.hidden, not work.uses_lora)
