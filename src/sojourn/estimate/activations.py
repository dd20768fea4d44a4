"""The tensors that autograd saves for the backward of the forwards in model/kernels/fused_forwards.py.

All sizes are bytes per token. They are derived, not fitted: a test counts the tensors that autograd saves on a CPU.
torch.compile saves whatever a matmul of the backward reads and recomputes elementwise results, so the list is the same
for compiled layers, except where it says so.

D hidden size, Q size of all query heads, K size of all key heads, F feed-forward size, e bytes of an element in
matmuls, r bytes of an element of the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sojourn.config.attention_backends import LONG_ROW
from sojourn.estimate.workload import Workload

_MLP_TILE_SIZE, _MLP_TILE_STEP = 2048 * 18_944, 1024


def mlp_tile_tokens(ffn: int) -> int:
    """Tokens that an MLP computes at a time with activation_checkpointing=offload (model/offloaded_layers.py): 2,048 of
    a 7B, more of a small one, whose few kernels would wait for their launches."""
    return max(2, _MLP_TILE_SIZE // ffn // _MLP_TILE_STEP) * _MLP_TILE_STEP


@dataclass(frozen=True)
class SavedTensor:
    name: str
    bytes: float  # per token
    formula: str


def layer_activations(workload: Workload) -> list[SavedTensor]:
    """Saved by one layer without activation checkpointing."""
    return [*attention_activations(workload), *mlp_activations(workload)]


def attention_activations(workload: Workload) -> list[SavedTensor]:
    """Saved by the first half of a layer."""
    return [row for row in _attention(workload) if row.bytes]


def mlp_activations(workload: Workload) -> list[SavedTensor]:
    """Saved by the second half of a layer."""
    return [row for row in _feed_forward(workload) if row.bytes]


def saved_activations(workload: Workload) -> list[SavedTensor]:
    """Saved by one layer from its forward to its backward, with the workload's activation checkpointing."""
    if workload.activation_checkpointing == "off":
        return layer_activations(workload)
    if workload.offloads_inputs:
        return []
    model, e, r = workload.model, workload.compute_bytes, workload.residual_bytes
    rows = [SavedTensor("layer input", model.hidden * r, "D·r")]
    if workload.activation_checkpointing == "selective":
        q, k = model.heads * model.head_dim, model.kv_heads * model.head_dim
        names = {"q_proj": q, "k_proj": k, "v_proj": k, "o_proj": model.hidden, "gate_proj": workload.model.active_ffn,
                 "up_proj": workload.model.active_ffn, "down_proj": model.hidden}  # fmt: skip
        if workload.compiled:  # the backward does not read it
            del names["down_proj"]
        made = sum(size * (2 if workload.has_adapter(name) else 1) for name, size in names.items())
        rows.append(SavedTensor("matmul outputs", made * e, "(Q + 2K + 2F + 2D)·e, twice with an adapter"))
        rows.append(SavedTensor("LoRA intermediates", _lora_intermediate(workload, *names), "rank·e each"))
        rows += [row for row in _attention_saved(workload) if row.name in ("attention output", "log-sum-exp", "scores")]
    return [row for row in rows if row.bytes]


def activations_outside_layers(workload: Workload) -> list[SavedTensor]:
    """Saved by embedding, final norm, positions and RoPE."""
    model, e = workload.model, workload.compute_bytes
    return [
        SavedTensor("token ids, positions, documents", 8 + 8 + 4, "8 + 8 + 4"),
        SavedTensor("RoPE cos and sin", 2 * model.head_dim * workload.residual_bytes, "2·head·r"),
        *_norm(workload, "final norm", model.hidden, trained=not workload.uses_lora),
        SavedTensor("target indices", 16, "8 + 8"),
        *([SavedTensor("embedding in fp32", model.hidden * 4, "4·D")] if e == 2 and not workload.uses_lora else []),
    ]


def saved_weight_casts(workload: Workload) -> int:
    """Bytes of the copies of one layer's weights that are saved for the backward: in the compute dtype, or in FP8.

    FSDP gathers weights in the compute dtype already. Of bf16 weights, those that share a matmul are concatenated.
    """
    if workload.fp8 != "off" and not workload.uses_lora:
        return layer_parameters(workload)
    if workload.compute_bytes == 4 or (workload.engine in ("fsdp", "deepspeed") and not workload.uses_lora):
        return 0
    if workload.master_weights != "fp32":
        return 2 * _concatenated_parameters(workload)
    return 2 * (workload.lora_parameters // workload.model.layers if workload.uses_lora else layer_parameters(workload))


def _concatenated_parameters(workload: Workload) -> int:
    """Of one layer's weights that model/kernels/fused_forwards.py concatenates."""
    model = workload.model
    if not (workload.fused_forwards and workload.has_triton and workload.device_type == "cuda"):
        return 0
    qkv = 0 if model.qk_norm else (model.heads + 2 * model.kv_heads) * model.head_dim
    return model.hidden * (qkv + 2 * model.active_ffn)


def layer_parameters(workload: Workload) -> int:
    return workload.model.layer_parameters()


def _norm(workload: Workload, name: str, size: int, trained: bool, groups: int = 1) -> Iterator[SavedTensor]:
    """RMSNorm saves its input and the inverse root mean square. A CPU has no kernel for it: it saves the input in fp32
    and, where the norm's weight is trained, the normalised input in fp32 too."""
    if workload.device_type == "cpu" or not (workload.fused_forwards or workload.compiled):
        yield SavedTensor(f"{name}: input in fp32", 4 * size, "4·size")
        if trained:
            yield SavedTensor(f"{name}: normalised in fp32", 4 * size, "4·size")
    else:
        yield SavedTensor(f"{name}: input", workload.residual_bytes * size, "r·size")
    yield SavedTensor(f"{name}: inverse RMS", 4 * groups, "4")


def _linear_input(workload: Workload, name: str, size: int, *layers: str) -> Iterator[SavedTensor]:
    """The input that linear layers share, where one of them is trained or has an adapter.

    With dropout each adapter saves its own input and mask; autocast saves a cast for each linear layer.
    """
    e, needed = workload.compute_bytes, [layer for layer in layers if workload.saves_input(layer)]
    if not needed:
        return
    if workload.uses_lora and workload.lora_dropout:
        yield SavedTensor(f"{name}, after dropout", len(needed) * size * (e + 1), "size·(e + mask) per adapter")
    elif workload.fp8 != "off" and not workload.uses_lora:
        yield SavedTensor(f"{name}, in FP8", size, "size")
    elif workload.residual_bytes > e and not workload.compiled:
        yield SavedTensor(f"{name}, cast per linear layer", len(needed) * size * e, "size·e per linear layer")
    else:
        yield SavedTensor(name, size * e, "size·e")


def _lora_intermediate(workload: Workload, *layers: str) -> float:
    return sum(workload.has_adapter(layer) for layer in layers) * workload.lora_rank * workload.compute_bytes


def _attention(workload: Workload) -> Iterator[SavedTensor]:
    model = workload.model
    trained = not workload.uses_lora
    q, k = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield from _norm(workload, "first norm", model.hidden, trained)
    yield from _linear_input(workload, "attention input", model.hidden, "q_proj", "k_proj", "v_proj")
    if model.qk_norm:
        yield from _norm(workload, "query norm", q, trained, model.heads)
        yield from _norm(workload, "key norm", k, trained, model.kv_heads)
    yield from _attention_saved(workload)
    own_input = workload.lora_dropout > 0 if workload.uses_lora else workload.fp8 != "off"
    if own_input:  # else attention's saved output is used
        yield from _linear_input(workload, "attention output", q, "o_proj")
    yield SavedTensor(
        "LoRA intermediates", _lora_intermediate(workload, "q_proj", "k_proj", "v_proj", "o_proj"), "rank·e each"
    )


def _attention_saved(workload: Workload) -> Iterator[SavedTensor]:
    """What attention's backward reads. Its output is also the input of `o_proj`, and is saved once."""
    model, e = workload.model, workload.compute_bytes
    q, seen = model.heads * model.head_dim, attended_key_size(workload)
    if workload.attention_backend.saves_scores:
        yield SavedTensor("queries, keys, values in fp32", 3 * q * 4, "3·Q·4")
        yield SavedTensor("scores", model.heads * workload.sequence_length * (4 + 1), "heads·T·(4 + mask)")
    else:
        yield SavedTensor("queries", q * e, "Q·e")
        yield SavedTensor("keys and values", 2 * seen * e, "2·K·e; K = Q where heads are repeated")
        yield SavedTensor("log-sum-exp", 4 * model.heads, "4·heads")
        if workload.attention_backend.mask == "dense" and workload.is_packed and workload.device_type == "cuda":
            yield SavedTensor("mask in the compute dtype", workload.sequence_length * e, "T·e")
    yield SavedTensor("attention output", q * e, "Q·e")


def has_swiglu_kernel(workload: Workload) -> bool:
    """Whether SwiGLU saves gate and up only. On a CPU one with adapters does (model/kernels/lora_linear.py)."""
    if workload.device_type == "cpu":
        return workload.has_plain_lora("gate_proj", "up_proj", "down_proj")
    return workload.fused_forwards or workload.compiled


def attended_key_size(workload: Workload) -> int:
    """Of all key heads as attention sees them: repeated for the queries that share them, where a backend needs that."""
    model, backend = workload.model, workload.attention_backend
    is_long = workload.sequence_length >= LONG_ROW and workload.device_type == "cuda" and not workload.is_packed
    as_they_are = backend.native_gqa or (backend.long_row_gqa and is_long)
    return (model.kv_heads if as_they_are else model.heads) * model.head_dim


def _feed_forward(workload: Workload) -> Iterator[SavedTensor]:
    model, e, wide = workload.model, workload.compute_bytes, workload.model.active_ffn
    yield from _norm(workload, "second norm", model.hidden, not workload.uses_lora)
    yield from _linear_input(workload, "feed-forward input", model.hidden, "gate_proj", "up_proj")
    if model.experts is not None and workload.uses_lora:
        yield from _routed_by_frozen_experts(workload)
    elif model.experts is not None:
        times = (model.active_experts or 1) + (1 if model.shared_ffn else 0)
        yield SavedTensor("tokens sorted by expert", 2 * times * model.hidden * e, "2·active·D·e")
        yield SavedTensor("router", 3 * 4 * model.experts, "3·4·experts")
    yield SavedTensor("gate and up", 2 * wide * e, "2·F·e")
    if not has_swiglu_kernel(workload):
        yield SavedTensor("SiLU of gate", wide * e, "F·e")
    yield from _linear_input(workload, "SwiGLU output", wide, "down_proj")
    names = ("gate_proj", "up_proj", "down_proj")
    yield SavedTensor("LoRA intermediates", _lora_intermediate(workload, *names), "rank·e each")
    for number in range(model.norms - 2):
        yield from _norm(workload, f"norm {number + 3}", model.hidden, not workload.uses_lora)


def _routed_by_frozen_experts(workload: Workload) -> Iterator[SavedTensor]:
    """What model/experts.py saves besides gate and up; for adapters on experts, the inputs of both projections."""
    model, e, wide = workload.model, workload.compute_bytes, workload.model.routed_width
    active, share = model.active_experts or 1, model.sparse_layers / model.layers
    yield SavedTensor("router", share * (4 * (model.experts or 0) + 6 * 8 * active), "4·experts + 6·8·active")
    if workload.device_type == "cpu" or not workload.has_triton:
        yield SavedTensor("SwiGLU before routing weights", share * wide * e, "active·F·e")
    if workload.adapts_experts:
        rows = active * model.hidden + wide + 2 * active * workload.lora_rank
        yield SavedTensor("rows of experts, for adapters", share * rows * e, "active·(D + F + 2·rank)·e")
