"""What a step costs the CPU that launches it, and what the GPU waits for it.

Milliseconds of a block by how it runs, and of a tensor that is updated, are in fit.toml. A GPU with much to do hides
them; one with little does not. They are of a usual CPU: those of rented machines are up to a third faster or slower,
and so is the same one from minute to minute. So where a CPU might be the slower one, passes are recorded, and a GPU
repeats them without it.
"""

from __future__ import annotations

import math

from sojourn.catalog.fused_families import FUSED_FAMILIES
from sojourn.estimate.constants import constants
from sojourn.estimate.workload import LINEAR, Work

_NARROWED_AGAIN = 1.3  # of 8-bit multiplications, whose operands are made again where not everything is kept
_OF_MATRICES, _OF_OTHERS = 36, 9  # operations of Muon, as train/optim/muon.py has them
TOGETHER = 2**25  # numbers: Muon updates tensors of one shape together up to so many, since launching costs time too
_SLOW = 1.5  # how much longer than usual CPUs were seen to take


def step_seconds(work: Work, forward: float, passes: float, update: float) -> float:
    """Seconds of a whole step whose first forward, passes and update keep the GPU busy for so long."""
    launched = work.cpu * (_replayed(work) if recorded(work, passes) else _passes(work))
    updating = work.cpu * (_update(work) + _between(work))
    own = launched / work.passes / 2
    if asks(work) and not work.dropout:
        return max(passes + update, launched + updating)
    behind = max(forward, own) - forward  # it starts as the CPU does, since the last step's loss was just read
    if asks(work):
        return max(behind + passes + update, launched + updating)
    return max(behind + passes, launched) + (update + updating if synced(work) else max(update, updating))


def recorded(work: Work, passes: float) -> bool:
    """Whether passes that keep the GPU busy for so long are recorded: where they can be, and a slow CPU could not keep
    up with the GPU."""
    return recordable(work) and (work.graphs == "on" or _SLOW * _passes(work) > passes)


def recordable(work: Work) -> bool:
    """As train/step.py has it, of models that it was tried with."""
    if work.graphs == "off":
        return False
    window = work.shape.sliding_window
    alone = work.device == "cuda" and work.world == 1 and work.engine == "single" and work.precision != "fp16"
    known = work.shape.family in FUSED_FAMILIES and work.shape.experts is None and window is None
    chance = work.dropout > 0 and work.recompute != "off"
    return alone and known and not chance and work.attention in ("varlen", "flash_attention_2")


def shortens(work: Work) -> bool:
    """Whether gradients are shortened by the update's own kernel, as train/optim/optimizers.py has it."""
    return work.device == "cuda" and work.optimizer == "adamw" and work.offload == "off"


def asks(work: Work) -> bool:
    """Whether a step begins before the last one's loss is read, as train/distributed/engine.py decides it."""
    return shortens(work) and work.world == 1 and work.precision != "fp16"


def synced(work: Work) -> bool:
    """Whether the CPU waits for each tensor's update, as bitsandbytes does."""
    return "8bit" in work.optimizer or "paged" in work.optimizer


def _passes(work: Work) -> float:
    launch, shape = constants()["launch"], work.shape
    adapters, quantised = sum(map(work.targeted, LINEAR)), work.method == "qlora"
    if work.compiled:
        base = "compiled_frozen_ms" if work.adapters else "compiled_ms" if work.fused else "compiled_plain_ms"
        each = launch[base] + adapters * launch["compiled_adapter_ms"]
        each += launch["compiled_quantised_ms"] * quantised + launch["fp8_ms"] * _narrowed(work)
    else:
        each = launch["eager_ms"] + adapters * launch["adapter_ms"] + launch["norm_ms"] * shape.qk_norm
        each = each * (1.0 if work.fused else launch["plain"]) + launch["quantised_ms"] * quantised
        each += launch["bias_ms"] * (shape.qkv_bias and not work.adapters)
    again = 1.0 if work.recompute == "off" else launch[f"{work.recompute}_{'compiled' if work.compiled else 'eager'}"]
    blocks = each * again * shape.layers
    return float(1e-3 * work.passes * (blocks + launch["pass_ms"]))


def _replayed(work: Work) -> float:
    return float(1e-3 * work.passes * constants()["launch"]["replay_ms"])


def _narrowed(work: Work) -> float:
    """8-bit multiplications of a block. Where all is trained, gate and up are one, and so are queries, keys and values,
    unless two of these are normed."""
    if work.fp8 == "off":
        return 0.0
    count = 7 if work.adapters else 6 if work.shape.qk_norm else 4
    return count * (_NARROWED_AGAIN if work.recompute != "off" else 1.0)


def _update(work: Work) -> float:
    costs, shape = constants()["update"], work.shape
    matrices = shape.layers * (2 * sum(map(work.targeted, LINEAR)) if work.adapters else len(LINEAR))
    others = 0 if work.adapters else 2 + shape.layers * (shape.norms + 2 * shape.qk_norm + 3 * shape.qkv_bias)
    if work.optimizer == "muon":
        each = costs["operation_us"] * _operations(work)
    else:
        each = costs["synced_us" if synced(work) else "tensor_us"] * (matrices + others)
    return float(1e-3 * costs["step_ms"] + 1e-6 * each)


def together(work: Work) -> list[tuple[int, int]]:
    """Lists of matrices that Muon updates together, those of one shape: numbers of a list, and how many lists."""
    shape, layers = work.shape, work.shape.layers
    d, q, k = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    alike = [(d * q, 2), (d * k, 2), (d * shape.ffn, 2), (d * shape.ffn, 1)]
    if work.adapters:
        alike = [(work.rank * d, 2)] * sum(map(work.targeted, LINEAR))
    at_once = [(size, count * layers, min(count * layers, max(1, TOGETHER // size))) for size, count in alike]
    return [(size * most, math.ceil(count / most)) for size, count, most in at_once]


def _operations(work: Work) -> int:
    shape = work.shape
    others = 0 if work.adapters else 2 + (not shape.tied) + shape.qk_norm + 2 * shape.qkv_bias
    return _OF_MATRICES * sum(lists for _, lists in together(work)) + _OF_OTHERS * others


def _between(work: Work) -> float:
    """What a run does beside its steps."""
    return float(1e-3 * constants()["update"]["loop_ms"] * work.looped)
