"""What a process holds through a whole step: weights, adapters, gradients, moments, by how they are spread.

P all parameters, N trained ones, w processes. All of this follows from how we keep things; nothing is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from sojourn.estimate.activations import adapter_parameters
from sojourn.estimate.workload import Workload

_NF4_BLOCK, _NF4_GROUP = 64, 256  # weights that share a scale, and scales that share one (double quantisation)
_BNB_BLOCK = 256  # numbers of an 8-bit moment that share a scale


@dataclass(frozen=True)
class Term:
    """Bytes of one thing, of a kind that a bar can show, and how they come about."""

    kind: str
    name: str
    bytes: float
    formula: str


def trained_parameters(work: Workload) -> int:
    shape = work.model
    if not work.uses_lora:
        return shape.parameters
    whole = sum(
        shape.embedding_parameters
        for name in ("embed_tokens", "lm_head")
        if name in work.modules_to_save
        and not (name == "lm_head" and shape.tied and "embed_tokens" in work.modules_to_save)
    )
    return adapter_parameters(work) + whole


def ends_parameters(work: Workload) -> int:
    """Of embedding and head; tied ones are one."""
    return work.model.embedding_parameters + work.model.head_parameters


def head_is_trained(work: Workload) -> bool:
    return not work.uses_lora or "lm_head" in work.modules_to_save


def quantised_bytes(work: Workload) -> float:
    """Bytes of one weight of a block, scales included."""
    if work.quant_bits == 8:
        return 1.0 + 4 / work.model.hidden
    scale = (1 + 4 / _NF4_GROUP) if work.double_quant else 4
    return 0.5 + scale / _NF4_BLOCK


def weights(work: Workload) -> list[Term]:
    shape, count, e = work.model, work.model.parameters, work.compute_bytes
    w = work.world_size if _cut_weights(work) else 1
    on_host = work.offload == "all"
    terms: list[Term] = []
    if not work.uses_lora:
        each, says = (2, "2·P") if work.engine == "deepspeed" and e == 2 else (4, "4·P")
        terms.append(Term("weights", "weights", 0 if on_host else each * count / w, f"{says} / {w} = {count:,}·{each}"))
        if work.engine == "deepspeed" and e == 2:
            share = work.world_size if work.zero_stage >= 1 else 1
            held = 0 if work.offload != "off" else 4 * count / share
            terms.append(Term("weights", "32-bit masters", held, f"4·P / {share}"))
        return terms
    if work.method == "lora":
        terms.append(Term("weights", "base", 0 if on_host else e * count / w, f"e·P / {w} = {e}·{count:,}"))
    else:
        inside = shape.layers * (shape.layer_parameters() - shape.norms * shape.hidden)
        if shape.experts is not None:  # bitsandbytes leaves experts as they are
            inside = shape.layers * shape.attention_parameters
        size = quantised_bytes(work)
        terms.append(
            Term("weights", f"base in {work.quant_bits} bits", size * inside / w, f"{size:.4f}·{inside:,} / {w}")
        )
        rest = count - inside
        terms.append(
            Term(
                "weights",
                "embedding, head, norms" if shape.experts is None else "embedding, head, experts",
                e * rest / w,
                f"e·{rest:,} / {w}",
            )
        )
    own = trained_parameters(work)
    terms.append(Term("adapters", "adapters", 4 * own / w, f"4·N / {w} = 4·{own:,}"))
    return terms


def optimizer(work: Workload) -> list[Term]:
    count = trained_parameters(work)
    w = work.world_size if _cut_moments(work) else 1
    if work.offload != "off":
        return [Term("optimizer", "moments, in the host's memory", 0, "0")]
    if work.optimizer in ("paged_adamw", "paged_adamw_8bit"):
        return [Term("optimizer", "moments, paged out", 0, "0; in memory that moves to the host when it is needed")]
    if work.optimizer == "adamw_8bit":
        each = 2 + 2 * 4 / _BNB_BLOCK
        return [Term("optimizer", "8-bit moments", each * count / w, f"(2 + 8/{_BNB_BLOCK})·N / {w}")]
    if work.optimizer == "muon":
        plain = ends_parameters(work) if not work.uses_lora else 0
        terms = 4 * (count - plain) + 8 * plain
        return [Term("optimizer", "momentum of matrices, moments of the rest", terms / w, "4·matrices + 8·rest")]
    return [Term("optimizer", "two moments", 8 * count / w, f"8·N / {w} = 8·{count:,}")]


def on_host(work: Workload) -> float:
    """Bytes of a machine's own memory that hold what its GPUs do not: moments, with DeepSpeed masters and gradients
    too; where all is offloaded, weights and gradients."""
    if work.offload == "off":
        return 0.0
    count, masters = trained_parameters(work), work.engine == "deepspeed"
    each = (8 + (8 if masters else 0)) * count
    if work.offload == "all":
        base = 0 if not work.uses_lora else work.compute_bytes * work.model.parameters
        each += base + (0 if masters else 8 * count)
    cut = work.world_size if _cut_moments(work) else 1
    return work.world_size / work.nodes * each / cut


def gradients(work: Workload) -> Term:
    """All of them, as they are after a backward."""
    count = trained_parameters(work)
    w = work.world_size if _cut_gradients(work) else 1
    each = 2 if work.engine == "deepspeed" and work.compute_bytes == 2 and not work.uses_lora else 4
    if work.offload == "all":
        return Term("gradients", "gradients, in the host's memory", 0, "0")
    return Term("gradients", "gradients", each * count / w, f"{each}·N / {w} = {each}·{count:,}")


def gathered(work: Workload, backward: bool) -> list[Term]:
    """What is whole at a time although it is cut: two blocks (one computes, the next arrives) and the ends; in a
    backward their gradients too."""
    if not _cut_weights(work) and work.offload != "all":
        return []
    shape, e = work.model, work.compute_bytes
    block = shape.layer_parameters()
    each = e if work.method != "qlora" else quantised_bytes(work)
    blocks = shape.layers if not work.reshard_after_forward else min(2, shape.layers)
    ends = (4 if not work.uses_lora else e) * ends_parameters(work)
    terms = [
        Term("temporary", "gathered blocks", blocks * each * block, f"{blocks}·{each:g}·block"),
        Term("temporary", "a block on its way", each * block, f"{each:g}·block"),
        Term("temporary", "gathered embedding and head", ends, "as held·ends"),
    ]
    if backward and not work.uses_lora:
        terms.append(Term("temporary", "a block's gradient, being shared out", (e + 4) * block, "(e + 4)·block"))
        terms.append(Term("temporary", "gradient of embedding and head", 4 * ends_parameters(work), "4·ends"))
    return terms


def tensors(work: Workload) -> list[tuple[float, int]]:
    """Sizes in bytes of the tensors that stay, and how many there are of each: for the allocator's rounding."""
    shape, layers = work.model, work.model.layers
    d, q, k = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = [(d * q, layers), (d * k, 2 * layers), (q * d, layers), (d * shape.ffn, 3 * layers)]
    ends = [(shape.embedding_parameters, 1 if shape.tied else 2)]
    cut = work.world_size if _cut_weights(work) else 1
    if work.uses_lora:
        each = quantised_bytes(work) if work.method == "qlora" else work.compute_bytes
        own = [(work.lora_rank * size, 7 * layers) for size in (d, d)]
        base = [(each * size / cut, count) for size, count in matrices] + [
            (work.compute_bytes * size, n) for size, n in ends
        ]
        return base + [(4 * size, (2 + len(optimizer(work))) * count) for size, count in own]
    copies = 4 if work.optimizer == "adamw" and work.offload == "off" else 2  # weight, gradient, two moments
    return [(4 * size / cut, copies * count) for size, count in (*matrices, *ends)]


def always_gradients(work: Workload) -> bool:
    """Whether gradients have their place before a backward: DDP's buckets do, and passes after the first find them."""
    return work.engine == "ddp" or work.gradient_accumulation > 1


def largest_parameter(work: Workload) -> int:
    shape = work.model
    if work.uses_lora:
        return work.lora_rank * max(shape.ffn, shape.hidden, shape.heads * shape.head_dim)
    return max(shape.embedding_parameters, shape.hidden * shape.ffn)


def _cut_weights(work: Workload) -> bool:
    return work.world_size > 1 and (work.engine == "fsdp" or (work.engine == "deepspeed" and work.zero_stage >= 3))


def _cut_gradients(work: Workload) -> bool:
    return work.world_size > 1 and (work.engine == "fsdp" or (work.engine == "deepspeed" and work.zero_stage >= 2))


def _cut_moments(work: Workload) -> bool:
    return work.world_size > 1 and (work.engine == "fsdp" or (work.engine == "deepspeed" and work.zero_stage >= 1))
