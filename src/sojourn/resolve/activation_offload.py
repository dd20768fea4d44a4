"""Where layer inputs can wait in host memory: `train.activation_checkpointing=offload` (model/offloaded_layers.py)."""

from __future__ import annotations

from sojourn.config.schema import RunConfig
from sojourn.resolve.device_spec import DeviceSpec
from sojourn.resolve.resolved import Resolved, Unsupported

_KEY = "train.activation_checkpointing"


def offload_unsupported_reason(config: RunConfig) -> str | None:
    """Why these settings rule it out, or None."""
    if config.parallel.engine == "deepspeed":
        return "needs whole layers, but parallel.engine is deepspeed"
    if config.train.fp8 != "off":
        return f"computes in tiles without FP8, but train.fp8 is {config.train.fp8}"
    return None


def least_memory_checkpointing(config: RunConfig) -> str:
    """What needs the least memory of a GPU with these settings."""
    return "full" if config.train.compile == "on" or offload_unsupported_reason(config) else "offload"


def may_offload(resolved: Resolved, device: DeviceSpec) -> bool:
    """Whether `auto` may choose it. Without a GPU inputs would stay where they are."""
    reason = offload_unsupported_reason(resolved.config) or _set_against_it(resolved)
    return device.device_type == "cuda" and reason is None


def resolve_offload(resolved: Resolved) -> None:
    """What else follows where it is set, chosen, or taken after memory ran out."""
    if resolved.config.train.activation_checkpointing != "offload":
        return
    reason = offload_unsupported_reason(resolved.config)
    if reason is None and _KEY not in resolved.reasons:
        reason = _set_against_it(resolved)
    if reason is not None:
        raise Unsupported(f"{_KEY}: offload {reason}; use full, or change that")
    if resolved.config.train.compile != "off":
        resolved.choose("train", "compile", "off", "not for layers whose inputs are offloaded")


def _set_against_it(resolved: Resolved) -> str | None:
    if resolved.config.train.compile == "on" and "train.compile" not in resolved.reasons:
        return "runs layers uncompiled, but train.compile is on"
    return None
