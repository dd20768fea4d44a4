"""What a step costs the CPU that launches it, and what the GPU waits for it.

Milliseconds of a block by how it runs, and of a tensor that is updated, are in fit.toml. A GPU with much to do hides
them; one with little does not. They are of a usual CPU: those of rented machines are up to a third faster or slower,
and so is the same one from minute to minute. So where a CPU might be the slower one, passes are recorded, and a GPU
repeats them without it.
"""

from __future__ import annotations

import math

from sojourn.estimate.constants import constants
from sojourn.estimate.workload import LINEAR, Workload

_NARROWED_AGAIN = 1.3  # of 8-bit multiplications, whose operands are made again where not everything is kept
_OF_MATRICES, _OF_OTHERS = 36, 9  # operations of Muon, as train/optim/muon.py has them
TOGETHER = 2**25  # numbers: Muon updates tensors of one shape together up to so many, since launching costs time too
SLOW_CPU = 1.5  # times as long as usual: what CPUs of rented machines were seen to take


def step_seconds(work: Workload, forward: float, passes: float, update: float) -> float:
    """Seconds of a whole step whose first forward, passes and update keep the GPU busy for so long."""
    launched = work.cpu_slowness * (_replayed(work) if work.cuda_graphs else launch_seconds(work))
    updating = work.cpu_slowness * (_update(work) + _between(work))
    own = launched / work.gradient_accumulation / 2
    if asks(work) and not work.lora_dropout:
        return max(passes + update, launched + updating)
    behind = max(forward, own) - forward  # it starts as the CPU does, since the last step's loss was just read
    if asks(work):
        return max(behind + passes + update, launched + updating)
    return max(behind + passes, launched) + (update + updating if synced(work) else max(update, updating))


def shortens(work: Workload) -> bool:
    """Whether gradients are shortened by the update's own kernel, as train/optim/optimizers.py has it."""
    return work.device_type == "cuda" and work.optimizer == "adamw" and work.offload == "off"


def asks(work: Workload) -> bool:
    """Whether a step begins before the last one's loss is read, as train/distributed/engine.py decides it."""
    return work.async_step and shortens(work) and work.world_size == 1 and work.precision != "fp16"


def synced(work: Workload) -> bool:
    """Whether the CPU waits for each tensor's update, as bitsandbytes does."""
    return "8bit" in work.optimizer or "paged" in work.optimizer


def launch_seconds(work: Workload) -> float:
    launch, shape = constants()["launch"], work.model
    adapters, quantised = sum(map(work.has_adapter, LINEAR)), work.method == "qlora"
    if work.compiled:
        base = "compiled_frozen_ms" if work.uses_lora else "compiled_ms" if work.fused_forwards else "compiled_plain_ms"
        each = launch[base] + adapters * launch["compiled_adapter_ms"]
        each += launch["compiled_quantised_ms"] * quantised + launch["fp8_ms"] * _narrowed(work)
    else:
        each = launch["eager_ms"] + adapters * launch["adapter_ms"] + launch["norm_ms"] * shape.qk_norm
        each = each * (1.0 if work.fused_forwards else launch["plain"]) + launch["quantised_ms"] * quantised
        each += launch["bias_ms"] * (shape.qkv_bias and not work.uses_lora)
    again = (
        1.0
        if work.activation_checkpointing == "off"
        else launch[f"{work.activation_checkpointing}_{'compiled' if work.compiled else 'eager'}"]
    )
    blocks = each * again * shape.layers
    return float(1e-3 * work.gradient_accumulation * (blocks + launch["pass_ms"]))


def _replayed(work: Workload) -> float:
    return float(1e-3 * work.gradient_accumulation * constants()["launch"]["replay_ms"])


def _narrowed(work: Workload) -> float:
    """8-bit multiplications of a block. Where all is trained, gate and up are one, and so are queries, keys and values,
    unless two of these are normed."""
    if work.fp8 == "off":
        return 0.0
    count = 7 if work.uses_lora else 6 if work.model.qk_norm else 4
    return count * (_NARROWED_AGAIN if work.activation_checkpointing != "off" else 1.0)


def _update(work: Workload) -> float:
    costs, shape = constants()["update"], work.model
    matrices = shape.layers * (2 * sum(map(work.has_adapter, LINEAR)) if work.uses_lora else len(LINEAR))
    others = 0 if work.uses_lora else 2 + shape.layers * (shape.norms + 2 * shape.qk_norm + 3 * shape.qkv_bias)
    if work.optimizer == "muon":
        each = costs["operation_us"] * _operations(work)
    else:
        each = costs["synced_us" if synced(work) else "tensor_us"] * (matrices + others)
    return float(1e-3 * costs["step_ms"] + 1e-6 * each)


def together(work: Workload) -> list[tuple[int, int]]:
    """Lists of matrices that Muon updates together, those of one shape: numbers of a list, and how many lists."""
    shape, layers = work.model, work.model.layers
    d, q, k = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    alike = [(d * q, 2), (d * k, 2), (d * shape.ffn, 2), (d * shape.ffn, 1)]
    if work.uses_lora:
        alike = [(work.lora_rank * d, 2)] * sum(map(work.has_adapter, LINEAR))
    at_once = [(size, count * layers, min(count * layers, max(1, TOGETHER // size))) for size, count in alike]
    return [(size * most, math.ceil(count / most)) for size, count, most in at_once]


def _operations(work: Workload) -> int:
    shape = work.model
    others = 0 if work.uses_lora else 2 + (not shape.tied) + shape.qk_norm + 2 * shape.qkv_bias
    return _OF_MATRICES * sum(lists for _, lists in together(work)) + _OF_OTHERS * others


def _between(work: Workload) -> float:
    """What a run does beside its steps."""
    return float(1e-3 * constants()["update"]["loop_ms"] * work.in_training_loop)
