"""Kernel launch overhead: the CPU time of a step, and how long the GPU waits for it.

fit.toml has the milliseconds per layer and per updated tensor. A GPU with enough work hides them. They are of a usual
CPU: those of rented machines are up to a third faster or slower, and vary from minute to minute. So where the CPU might
be the slower one, forward+backward is captured as a CUDA graph, which needs one launch.
"""

from __future__ import annotations

import math

from sojourn.estimate.activations import mlp_tile_tokens
from sojourn.estimate.constants import constants
from sojourn.estimate.workload import LINEAR, Workload

_FP8_RECAST = 1.3  # times the FP8 casts, with activation checkpointing
_OPS_PER_GROUP, _OPS_PER_OTHER = 36, 9  # operations of train/optim/muon.py
MUON_GROUP_ELEMENTS = 2**25  # Muon updates matrices of one shape together, up to so many elements, to save launches
SLOW_CPU = 1.5  # times as long as usual: measured on rented machines


def step_seconds(workload: Workload, forward: float, passes: float, update: float) -> float:
    """Seconds of a step, whose first forward, forward+backward passes and optimizer step take the GPU so long."""
    launched = workload.cpu_slowness * (_replayed(workload) if workload.cuda_graphs else launch_seconds(workload))
    updating = workload.cpu_slowness * (_update(workload) + _loop_seconds(workload))
    own = launched / workload.gradient_accumulation / 2
    if supports_async_step(workload) and not workload.lora_dropout:
        return max(passes + update, launched + updating)
    behind = max(forward, own) - forward  # the GPU is idle when it starts, since the last loss was just read
    if supports_async_step(workload):
        return max(behind + passes + update, launched + updating)
    return max(behind + passes, launched) + (update + updating if waits_per_tensor(workload) else max(update, updating))


def fuses_clipping(workload: Workload) -> bool:
    """Whether the optimizer's kernel clips gradients, which saves a pass over them (train/optim/optimizers.py)."""
    fused = workload.device_type == "cuda" and workload.optimizer == "adamw" and workload.offload == "off"
    return fused and not workload.low_memory_optimizer


def supports_async_step(workload: Workload) -> bool:
    """Whether a step is launched before the last one's loss is read (train/distributed/engine.py)."""
    return (
        workload.async_step and fuses_clipping(workload) and workload.world_size == 1 and workload.precision != "fp16"
    )


def waits_per_tensor(workload: Workload) -> bool:
    """Whether the CPU waits for each tensor's update, as bitsandbytes does."""
    of_bitsandbytes = "8bit" in workload.optimizer or "paged" in workload.optimizer
    return of_bitsandbytes and not workload.low_memory_optimizer


def launch_seconds(workload: Workload) -> float:
    launch, model = constants()["launch"], workload.model
    if workload.offloads_inputs and workload.uses_lora:
        layers = model.layers * _offloaded_layer_ms(workload)
        return float(1e-3 * workload.gradient_accumulation * (layers + launch["pass_ms"]))
    adapters, quantised = sum(map(workload.has_adapter, LINEAR)), workload.method == "qlora"
    if workload.compiled:
        trained = "compiled_ms" if workload.fused_forwards else "compiled_plain_ms"
        base = "compiled_frozen_ms" if workload.uses_lora else trained
        each = launch[base] + adapters * launch["compiled_adapter_ms"]
        each += launch["compiled_quantised_ms"] * quantised + launch["fp8_ms"] * _fp8_matmuls(workload)
    else:
        each = launch["eager_ms"] + adapters * launch["adapter_ms"] + launch["norm_ms"] * model.qk_norm
        each = each * (1.0 if workload.fused_forwards else launch["plain"]) + launch["quantised_ms"] * quantised
        each += launch["bias_ms"] * (model.qkv_bias and not workload.uses_lora)
    checkpointing, mode = workload.activation_checkpointing, "compiled" if workload.compiled else "eager"
    recomputing = "full" if workload.recomputes_layers else checkpointing
    again = 1.0 if checkpointing == "off" else launch[f"{recomputing}_{mode}"]
    layers = each * again * model.layers
    return float(1e-3 * workload.gradient_accumulation * (layers + launch["pass_ms"]))


def _offloaded_layer_ms(workload: Workload) -> float:
    launch, tiles = constants()["launch"], math.ceil(workload.tokens / mlp_tile_tokens(workload.model.ffn))
    quantised = launch["offload_quantised_ms"] * (workload.method == "qlora")
    return float(launch["offload_adapters_ms"] + quantised + launch["offload_tile_ms"] * tiles)


def _replayed(workload: Workload) -> float:
    return float(1e-3 * workload.gradient_accumulation * constants()["launch"]["replay_ms"])


def _fp8_matmuls(workload: Workload) -> float:
    """FP8 matmuls of a layer. Where all weights are trained, gate and up are one matmul, and so are queries, keys and
    values, unless queries and keys are normalised."""
    if workload.fp8 == "off":
        return 0.0
    count = 7 if workload.uses_lora else 6 if workload.model.qk_norm else 4
    return count * (_FP8_RECAST if workload.activation_checkpointing != "off" else 1.0)


def _update(workload: Workload) -> float:
    costs, model = constants()["update"], workload.model
    matrices = model.layers * (2 * sum(map(workload.has_adapter, LINEAR)) if workload.uses_lora else len(LINEAR))
    others = 0 if workload.uses_lora else 2 + model.layers * (model.norms + 2 * model.qk_norm + 3 * model.qkv_bias)
    if workload.optimizer == "muon":
        each = costs["operation_us"] * _muon_operations(workload)
    else:
        each = costs["synced_us" if waits_per_tensor(workload) else "tensor_us"] * (matrices + others)
    return float(1e-3 * costs["step_ms"] + 1e-6 * each)


def muon_groups(workload: Workload) -> list[tuple[int, int]]:
    """Groups of matrices of one shape that Muon updates together: elements of a group, and how many groups."""
    model, layers = workload.model, workload.model.layers
    d, q, k = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = [(d * q, 2), (d * k, 2), (d * model.ffn, 2), (d * model.ffn, 1)]
    if workload.uses_lora:
        shapes = [(workload.lora_rank * d, 2)] * sum(map(workload.has_adapter, LINEAR))
    at_once = [
        (size, count * layers, min(count * layers, max(1, MUON_GROUP_ELEMENTS // size))) for size, count in shapes
    ]
    return [(size * most, math.ceil(count / most)) for size, count, most in at_once]


def _muon_operations(workload: Workload) -> int:
    model = workload.model
    others = 0 if workload.uses_lora else 2 + (not model.tied) + model.qk_norm + 2 * model.qkv_bias
    return _OPS_PER_GROUP * sum(count for _, count in muon_groups(workload)) + _OPS_PER_OTHER * others


def _loop_seconds(workload: Workload) -> float:
    """CPU time of the training loop between steps."""
    return float(1e-3 * constants()["update"]["loop_ms"] * workload.in_training_loop)
