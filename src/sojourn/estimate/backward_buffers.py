"""Buffers of a layer's backward at their largest."""

from __future__ import annotations

from sojourn.estimate.activations import (
    attended_key_size,
    attention_activations,
    layer_activations,
    layer_parameters,
    mlp_activations,
    mlp_tile_tokens,
    saved_activations,
    saved_weight_casts,
)
from sojourn.estimate.model_states import TEMPORARY, Term
from sojourn.estimate.workload import Workload


def _offload_buffers(workload: Workload) -> list[Term]:
    """Of a layer's backward with `offload`, at the larger of two moments: its MLP, tile by tile, or its attention."""
    model, e, t = workload.model, workload.compute_bytes, workload.tokens
    wide, tile = model.active_ffn, min(t, mlp_tile_tokens(model.ffn))
    stream = t * model.hidden * workload.residual_bytes
    attention = sum(row.bytes for row in attention_activations(workload))
    held = [
        Term("activations", "attention of one layer", t * attention, f"T·{attention:g}"),
        Term("activations", "layer input, states between attention and MLP", 2 * stream, "2·T·D·r"),
        Term(TEMPORARY, "gradient of the residual stream", stream, "T·D·r"),
    ]
    if workload.method == "qlora" and workload.has_plain_lora(*workload.lora_targets):
        dense = e * layer_parameters(workload)
        held.append(Term(TEMPORARY, "dequantized weights of one layer", dense, f"{e}·layer"))
    saved = sum(row.bytes for row in mlp_activations(workload)) + wide * e * (1 if workload.uses_lora else 3)
    mlp = Term(TEMPORARY, "MLP of one tile, and its gradients", tile * saved, f"{tile:,}·{saved:g}")
    heads = e * (4 * model.heads * model.head_dim + 2 * attended_key_size(workload))  # queries' gradients in fp32, too
    grads = Term(TEMPORARY, "gradients of attention", t * heads + 2 * stream, f"T·{heads:g} + 2·T·D·r")
    return [*held, max(mlp, grads, key=lambda term: term.bytes)]


def backward_buffers(workload: Workload) -> list[Term]:
    """Buffers of a layer's backward at their largest, in the feed-forward."""
    if workload.offloads_inputs and workload.model.experts is None:
        return _offload_buffers(workload)
    model, e, t, wide = workload.model, workload.compute_bytes, workload.tokens, workload.model.active_ffn
    # The eager SwiGLU kernel writes gradients over gate and up, and frees what it has read.
    separate = workload.compiled or not (
        workload.fused_forwards and workload.has_triton and workload.device_type == "cuda"
    )
    wides = (2 if separate else 0) + (2 if workload.has_adapter("down_proj") else 1)
    streams, stream = (2 if separate else 1), t * model.hidden * workload.residual_bytes
    terms = [
        Term(TEMPORARY, "gradients of the feed-forward", t * wide * e * wides, f"T·F·e·{wides}"),
        Term(TEMPORARY, "gradients of the residual stream", stream * streams, f"{streams}·T·D·r"),
    ]
    if workload.activation_checkpointing != "off":
        saved, whole = saved_activations(workload), layer_activations(workload)
        made = max(0.0, sum(row.bytes for row in whole) - sum(row.bytes for row in saved))
        terms.append(Term("activations", "one recomputed layer", t * made, f"T·{made:g}"))
        terms.append(Term("activations", "its weights in the compute dtype", saved_weight_casts(workload), "e·layer"))
        if workload.compiled and workload.uses_lora:
            sides = _lora_outputs(workload) * e
            terms.append(Term(TEMPORARY, "LoRA outputs, before they are added", t * sides, f"T·{sides:g}"))
    terms += _expert_buffers(workload)
    if not workload.uses_lora and not workload.is_sharded:
        times = 4 if workload.compiled else 4 / 3  # compiled layers return all gradients of their weights at once
        own = times * workload.trained_bytes / 4 * layer_parameters(workload)
        terms.append(
            Term(TEMPORARY, "gradients of a layer's weights", own, "4·layer; of its largest weight if not compiled")
        )
    return terms


def _expert_buffers(workload: Workload) -> list[Term]:
    """Of frozen experts, in the backward: rows sorted by expert, and one weight as it is dequantized."""
    model, e = workload.model, workload.compute_bytes
    if model.experts is None or not workload.uses_lora:
        return []
    rows = workload.tokens * e * (model.active_experts or 1) * model.hidden
    dequantized = e * workload.expert_weight if workload.quantizes_experts else 0
    return [
        Term(TEMPORARY, "gradients of rows sorted by expert", rows, "T·active·D·e"),
        Term(TEMPORARY, "experts of a layer, dequantized", dequantized, "e·experts·2·F·D"),
    ]


def _lora_outputs(workload: Workload) -> int:
    model = workload.model
    q, k, wide = model.heads * model.head_dim, model.kv_heads * model.head_dim, workload.model.active_ffn
    sizes = {"q_proj": q, "k_proj": k, "v_proj": k, "o_proj": model.hidden, "gate_proj": wide, "up_proj": wide,
             "down_proj": model.hidden}  # fmt: skip
    return sum(size for name, size in sizes.items() if workload.has_adapter(name))
