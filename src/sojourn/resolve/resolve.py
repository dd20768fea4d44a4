"""Decides every `auto` of a run from its configuration, its model and its device. Plans and runs call it alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sojourn.catalog.fused_families import FUSED_FAMILIES, FUSED_MIXTURES
from sojourn.catalog.models import ModelSpec
from sojourn.config.schema import RunConfig
from sojourn.estimate.ceilings import has_rate
from sojourn.estimate.memory import MemoryEstimate, memory
from sojourn.estimate.step_time import step_time
from sojourn.estimate.workload import Workload
from sojourn.resolve.activation_offload import resolve_offload
from sojourn.resolve.compile import choose_compile
from sojourn.resolve.cuda_graphs import choose_cuda_graphs, with_cuda_graphs
from sojourn.resolve.device_spec import DeviceSpec
from sojourn.resolve.experts import resolve_experts
from sojourn.resolve.kernels import (
    resolve_attention,
    resolve_cpu_kernels,
    resolve_forwards,
    resolve_hopper,
    resolve_precision,
)
from sojourn.resolve.micro_batch import resolve_memory
from sojourn.resolve.oom_fallback import saves_more_memory
from sojourn.resolve.resolved import Resolved, with_value
from sojourn.resolve.training import resolve_method, resolve_new_model, resolve_tensorboard
from sojourn.resolve.workload import workload_of

WORTH = 1.05  # times as fast: less is not worth a note


@dataclass(frozen=True)
class Resolution:
    """A configuration without `auto`, the reason of each choice, and the workload that it makes; `fits`: by estimate,
    into the device's memory."""

    config: RunConfig
    reasons: dict[str, str]
    workload: Workload
    fits: bool

    @property
    def memory(self) -> MemoryEstimate:
        return memory(self.workload)


def resolve(
    config: RunConfig, model: ModelSpec, device: DeviceSpec, started: RunConfig | None = None,
    oom_fallback: dict[str, Any] | None = None,
) -> Resolution:  # fmt: skip
    """`started`: the configuration that a resumed run started with; `oom_fallback`: settings that this run
    needed after it ran out of memory."""
    resolved = Resolved(config)
    if config.model.base is None:
        resolve_new_model(resolved, model)
    resolve_method(resolved, model)
    resolve_experts(resolved, model)
    resolve_tensorboard(resolved, device)
    resolve_precision(resolved, device, started)
    resolve_attention(resolved, model, device)
    resolve_forwards(resolved, model, device)
    if config.train.compile == "auto":
        resolved.choose("train", "compile", *choose_compile(resolved.config, model, device))
    fits = resolve_memory(resolved, model, device)
    for key, value in (oom_fallback or {}).items():
        section, name = key.split(".")
        if saves_more_memory(key, value, getattr(getattr(resolved.config, section), name)):
            resolved.choose(section, name, value, "memory ran out with more (ladder.json)")
    resolve_offload(resolved)
    resolve_hopper(resolved, model, device)
    resolve_cpu_kernels(resolved, device)
    workload = workload_of(resolved.config, model, device)
    captured = with_cuda_graphs(resolved.config, workload, device)
    if resolved.config.train.cuda_graphs == "auto":
        chosen, reason = choose_cuda_graphs(resolved.config, workload, device)
        resolved.choose("train", "cuda_graphs", "on" if chosen else "off", reason)
    return Resolution(resolved.config, resolved.reasons, captured, fits)


def describe_faster_settings(config: RunConfig, found: Resolution, model: ModelSpec, device: DeviceSpec) -> str | None:
    """What to set for the same result sooner, where `config`, resolved as `found`, leaves memory unused."""
    gpu = device.gpu
    if not found.fits or gpu is None or device.device_type != "cuda" or not has_rate(gpu):
        return None
    config = with_value(config, "parallel", "engine", found.config.parallel.engine)
    config = with_value(config, "train", "micro_batch", "auto")
    free = resolve(with_value(config, "train", "activation_checkpointing", "auto"), model, device)
    gain = step_time(free.workload, gpu).tokens_per_second / step_time(found.workload, gpu).tokens_per_second
    if not free.fits or gain < WORTH:
        return None
    train = free.config.train
    settings = f"train.micro_batch={train.micro_batch} train.activation_checkpointing={train.activation_checkpointing}"
    return f"the same result {gain - 1:.0%} sooner, by its plan, in the memory here: {settings}"


def describe_plain_forwards(found: Resolution, model: ModelSpec, device: DeviceSpec) -> str | None:
    """What it costs that a family has no fused forwards."""
    gpu = device.gpu
    has_fused = model.family in FUSED_FAMILIES | FUSED_MIXTURES
    if has_fused or gpu is None or device.device_type != "cuda" or not has_rate(gpu):
        return None
    fused = replace(found.workload, fused_forwards=True)
    slower = step_time(fused, gpu).tokens_per_second / step_time(found.workload, gpu).tokens_per_second - 1
    return f"{model.family} has no fused forwards: {max(0.0, slower):.0%} slower than with them, by its plan"
