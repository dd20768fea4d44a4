"""Model states of one rank: weights, adapters, gradients and optimizer states, and how engines shard them.

P all parameters, N trainable parameters, e bytes of an element in matmuls. Derived from the code; nothing is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from sojourn.estimate.workload import Workload

_OPTIMIZER, TEMPORARY = "optimizer states", "temporary buffers"  # kinds of terms
_BNB_BLOCK = 256  # elements of an 8-bit optimizer state per scale
MIN_HOST_ELEMENTS = 2**16  # of a parameter: states of smaller ones stay on the device (train/optim/low_memory_adamw.py)
_HOST_CHUNK = 2**24  # elements whose states travel at once between host and device (train/optim/host_states.py)
_HOST_BUFFER_BYTES, _MIN_HOST_BUFFERS = 2**29, 3


@dataclass(frozen=True)
class Term:
    """Bytes of one thing, the kind that the screen's bar sums it under, and its formula."""

    kind: str
    name: str
    bytes: float
    formula: str


def embedding_and_head_parameters(workload: Workload) -> int:
    """Tied embedding and LM head count once."""
    return workload.model.embedding_parameters + workload.model.head_parameters


def lm_head_is_trained(workload: Workload) -> bool:
    return not workload.uses_lora or "lm_head" in workload.modules_to_save


def weights(workload: Workload) -> list[Term]:
    model, count, e = workload.model, workload.model.parameters, workload.compute_bytes
    w = workload.world_size if _shards_weights(workload) else 1
    offloaded = workload.offload == "all"
    terms: list[Term] = []
    if not workload.uses_lora:
        each = 2 if workload.engine == "deepspeed" and e == 2 else workload.trained_bytes
        terms.append(
            Term("weights", "weights", 0 if offloaded else each * count / w, f"{each}·P / {w} = {count:,}·{each}")
        )
        if workload.engine == "deepspeed" and e == 2:
            share = workload.world_size if workload.zero_stage >= 1 else 1
            held = 0 if workload.offload != "off" else 4 * count / share
            terms.append(Term("weights", "fp32 master weights", held, f"4·P / {share}"))
        return terms
    if workload.method == "lora":
        terms.append(Term("weights", "base", 0 if offloaded else e * count / w, f"e·P / {w} = {e}·{count:,}"))
    else:
        inside = model.layers * (model.layer_parameters() - model.norms * model.hidden)
        if workload.quantizes_experts:
            inside -= model.router_parameters
        elif model.experts is not None:  # bitsandbytes leaves experts as they are
            inside = model.layers * model.attention_parameters
        size = workload.quantized_bytes
        terms.append(
            Term(
                "weights",
                "base in NF4" if workload.quant_bits == 4 else "base in int8",
                size * inside / w,
                f"{size:.4f}·{inside:,} / {w}",
            )
        )
        rest, keeps_experts = count - inside, model.experts is not None and not workload.quantizes_experts
        terms.append(
            Term(
                "weights",
                "embedding, LM head, experts" if keeps_experts else "embedding, LM head, norms",
                e * rest / w,
                f"e·{rest:,} / {w}",
            )
        )
    own = workload.trainable_parameters
    terms.append(Term("adapters", "LoRA adapters", 4 * own / w, f"4·N / {w} = 4·{own:,}"))
    return terms


def optimizer_states(workload: Workload) -> list[Term]:
    count = workload.trainable_parameters
    w = workload.world_size if _shards_optimizer(workload) else 1
    if workload.low_memory_optimizer:
        buffers = [_host_state_buffers(workload)] if streams_states(workload) else []
        return [_low_memory_states(workload), *buffers]
    if workload.offload != "off":
        return [Term(_OPTIMIZER, "optimizer states, in host memory", 0, "0")]
    if workload.optimizer in ("paged_adamw", "paged_adamw_8bit"):
        return [
            Term(_OPTIMIZER, "optimizer states, paged", 0, "0; in unified memory that moves to the host when needed")
        ]
    if workload.optimizer == "adamw_8bit":
        each = 2 + 2 * 4 / _BNB_BLOCK
        return [Term(_OPTIMIZER, "8-bit AdamW states", each * count / w, f"(2 + 8/{_BNB_BLOCK})·N / {w}")]
    if workload.optimizer == "muon":
        plain = embedding_and_head_parameters(workload) if not workload.uses_lora else 0
        terms = 4 * (count - plain) + 8 * plain
        return [Term(_OPTIMIZER, "momentum of matrices, AdamW states of the rest", terms / w, "4·matrices + 8·rest")]
    return [Term(_OPTIMIZER, "AdamW states", 8 * count / w, f"8·N / {w} = 8·{count:,}")]


def _low_memory_states(workload: Workload) -> Term:
    if streams_states(workload):
        return Term(_OPTIMIZER, "optimizer states, in host memory", 0, "0")
    each = low_memory_state_bytes(workload)
    name = "8-bit AdamW states" if "8bit" in workload.optimizer else "AdamW states"
    name += ", Kahan compensation" if workload.master_weights == "bf16_kahan" else ""
    return Term(_OPTIMIZER, name, each * workload.trainable_parameters, f"{each:g}·N")


def streams_states(workload: Workload) -> bool:
    """Whether states in host memory pass through buffers on the device (train/optim/host_states.py)."""
    on_host = workload.offload == "optimizer" or workload.optimizer.startswith("paged_")
    return workload.low_memory_optimizer and on_host


def low_memory_state_bytes(workload: Workload) -> float:
    """Of one parameter, by train/optim/low_memory_adamw.py."""
    return state_bytes("8bit" in workload.optimizer, workload.master_weights == "bf16_kahan")


def _host_state_buffers(workload: Workload) -> Term:
    """On the device, for states in host memory."""
    each = low_memory_state_bytes(workload)
    chunk, count = host_buffers(workload.largest_parameter, workload.trainable_parameters, each)
    return Term(
        TEMPORARY, "buffers for optimizer states in host memory", chunk * count * each, f"{count}·{chunk:,}·{each:g}"
    )


def state_bytes(eight_bit: bool, kahan: bool) -> float:
    """Bytes of AdamW's states, for one parameter."""
    return (2 + 2 * 4 / _BNB_BLOCK if eight_bit else 8) + (2 if kahan else 0)


def host_buffers(largest: int, total: int, each: float) -> tuple[int, int]:
    """For states in host memory of so many elements, `each` bytes an element, and of the largest parameter: elements of
    a chunk, and how many chunks there is room for on the device."""
    chunk = min(_HOST_CHUNK, -(-largest // _BNB_BLOCK) * _BNB_BLOCK)
    return chunk, max(_MIN_HOST_BUFFERS, min(int(_HOST_BUFFER_BYTES // (chunk * each)), -(-total // chunk)))


def host_bytes(workload: Workload) -> float:
    """Host memory of one machine for what is offloaded: layer inputs; optimizer states, with DeepSpeed master weights
    and gradients too; with `offload=all` weights and gradients."""
    ranks, model = workload.world_size / workload.nodes, workload.model
    inputs = workload.tokens * model.hidden * workload.residual_bytes * (model.layers - 1)
    return _offloaded_states(workload) + (ranks * inputs if workload.offloads_inputs else 0.0)


def _offloaded_states(workload: Workload) -> float:
    if streams_states(workload):
        return workload.world_size / workload.nodes * low_memory_state_bytes(workload) * workload.trainable_parameters
    if workload.offload == "off":
        return 0.0
    count, masters = workload.trainable_parameters, workload.engine == "deepspeed"
    each = (8 + (8 if masters else 0)) * count
    if workload.offload == "all":
        base = 0 if not workload.uses_lora else workload.compute_bytes * workload.model.parameters
        each += base + (0 if masters else 8 * count)
    shards = workload.world_size if _shards_optimizer(workload) else 1
    return workload.world_size / workload.nodes * each / shards


def gradients(workload: Workload) -> Term:
    """All gradients after a backward."""
    count = workload.trainable_parameters
    w = workload.world_size if _shards_gradients(workload) else 1
    half = workload.engine == "deepspeed" and workload.compute_bytes == 2 and not workload.uses_lora
    each = 2 if half else workload.trained_bytes
    if workload.optimizer_in_backward:
        largest = each * workload.largest_parameter
        return Term("gradients", "gradient of one parameter, until it is updated", largest, f"{each}·largest")
    if workload.offload == "all":
        return Term("gradients", "gradients, in host memory", 0, "0")
    return Term("gradients", "gradients", each * count / w, f"{each}·N / {w} = {each}·{count:,}")


def gathered_parameters(workload: Workload, backward: bool) -> list[Term]:
    """Unsharded parameters at a time: two layers (one computes, the next is prefetched), embedding and LM head; in the
    backward their gradients too."""
    if not _shards_weights(workload) and workload.offload != "all":
        return []
    model, e = workload.model, workload.compute_bytes
    layer = model.layer_parameters()
    each = e if workload.method != "qlora" else workload.quantized_bytes
    layers = model.layers if not workload.reshard_after_forward else min(2, model.layers)
    ends = (4 if not workload.uses_lora else e) * embedding_and_head_parameters(workload)
    terms = [
        Term(TEMPORARY, "gathered layers", layers * each * layer, f"{layers}·{each:g}·layer"),
        Term(TEMPORARY, "prefetched layer", each * layer, f"{each:g}·layer"),
        Term(TEMPORARY, "gathered embedding and LM head", ends, "e·2·V·D, 4 bytes where trained"),
    ]
    if backward and not workload.uses_lora:
        terms.append(Term(TEMPORARY, "gradient of a layer, in reduce-scatter", (e + 4) * layer, "(e + 4)·layer"))
        terms.append(
            Term(TEMPORARY, "gradient of embedding and LM head", 4 * embedding_and_head_parameters(workload), "4·2·V·D")
        )
    return terms


def persistent_tensors(workload: Workload) -> list[tuple[float, int]]:
    """Bytes of one tensor and how many there are, of all that live through a step: for the allocator's rounding."""
    model, layers = workload.model, workload.model.layers
    d, q, k = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    matrices = [(d * q, layers), (d * k, 2 * layers), (q * d, layers), (d * model.ffn, 3 * layers)]
    ends = [(model.embedding_parameters, 1 if model.tied else 2)]
    shards = workload.world_size if _shards_weights(workload) else 1
    if workload.uses_lora:
        each = workload.quantized_bytes if workload.method == "qlora" else workload.compute_bytes
        own = [(workload.lora_rank * size, 7 * layers) for size in (d, d)]
        base = [(each * size / shards, count) for size, count in matrices] + [
            (workload.compute_bytes * size, n) for size, n in ends
        ]
        return base + [(4 * size, (2 + len(optimizer_states(workload))) * count) for size, count in own]
    # weight, gradient, two optimizer states
    copies = 4 if workload.optimizer == "adamw" and workload.offload == "off" else 2
    copies -= 1 if workload.optimizer_in_backward else 0
    return [(workload.trained_bytes * size / shards, copies * count) for size, count in (*matrices, *ends)]


def keeps_gradients(workload: Workload) -> bool:
    """Whether gradients are allocated before a backward: DDP's buckets are, and accumulated gradients."""
    return workload.engine == "ddp" or workload.gradient_accumulation > 1


def _shards_weights(workload: Workload) -> bool:
    return workload.world_size > 1 and (
        workload.engine == "fsdp" or (workload.engine == "deepspeed" and workload.zero_stage >= 3)
    )


def _shards_gradients(workload: Workload) -> bool:
    return workload.world_size > 1 and (
        workload.engine == "fsdp" or (workload.engine == "deepspeed" and workload.zero_stage >= 2)
    )


def _shards_optimizer(workload: Workload) -> bool:
    return workload.world_size > 1 and (
        workload.engine == "fsdp" or (workload.engine == "deepspeed" and workload.zero_stage >= 1)
    )
