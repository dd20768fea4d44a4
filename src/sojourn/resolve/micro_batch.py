"""Engine, micro batch and activation checkpointing: the fastest by its estimate of what fits into memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice

from sojourn.catalog.models import ModelSpec
from sojourn.config.schema import RunConfig
from sojourn.estimate.ceilings import has_rate
from sojourn.estimate.memory import SAFE_SHARE, MemoryEstimate, memory
from sojourn.estimate.step_time import step_time
from sojourn.estimate.workload import Workload
from sojourn.resolve.activation_offload import may_offload
from sojourn.resolve.cuda_graphs import with_cuda_graphs
from sojourn.resolve.device_spec import DeviceSpec
from sojourn.resolve.resolved import Resolved, Unsupported
from sojourn.resolve.workload import accumulation_steps, workload_of

_FAIR_TOKENS = 4096  # of a micro batch: fewer leave a GPU idle, and more gain nothing on a CPU
_MAX_TOKENS = 65536  # of a micro batch: more gain nothing on a GPU
CHECKPOINTING = ("off", "selective", "full", "offload")  # from the fastest to the one that saves most memory


@dataclass(frozen=True)
class Fit:
    """A workload, and the memory that it is estimated to need."""

    workload: Workload
    memory: MemoryEstimate


def divisors(batch: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(batch) + 1) if batch % n == 0]
    return sorted({*small, *(batch // n for n in small)})


def sized(
    config: RunConfig, workload: Workload, device: DeviceSpec, micro_batch: int, activation_checkpointing: str
) -> Workload:
    """The workload with another micro batch and activation checkpointing, and the CUDA graph that these allow."""
    steps = accumulation_steps(config.train.global_batch, micro_batch, device.ranks)
    changed = replace(
        workload, micro_batch=micro_batch, gradient_accumulation=steps,
        activation_checkpointing=activation_checkpointing, cuda_graphs=False, graph_memory=False,
        compiled=workload.compiled and activation_checkpointing != "offload",
    )  # fmt: skip
    return with_cuda_graphs(config, changed, device)


def resolve_memory(resolved: Resolved, model: ModelSpec, device: DeviceSpec) -> bool:
    """Chooses engine, micro batch and activation checkpointing; whether they fit. Where nothing fits, what needs the
    least memory is chosen."""
    train, ways = resolved.config.train, _ways(resolved, device)
    fit: Fit | None = None
    config = resolved.config
    for engine, reason in _engines(config, device):
        if config.parallel.engine == "auto":
            resolved.choose("parallel", "engine", engine, reason)
        fit = _fastest(resolved.config, workload_of(resolved.config, model, device), device, ways)
        if fit is not None:
            break
    rows = fit.workload.micro_batch if fit else _smallest(resolved.config)
    way = fit.workload.activation_checkpointing if fit else ways[-1]
    into = _describe_budget(device)
    if train.activation_checkpointing == "auto":
        why = f"{into} with a micro batch of {rows}" if into else "activations are kept; set full to save memory"
        resolved.choose("train", "activation_checkpointing", way, why)
    if train.micro_batch == "auto":
        why = into or f"about {_FAIR_TOKENS} tokens at a time suit a {device.device_type.upper()}"
        resolved.choose("train", "micro_batch", rows, why)
    return fit is not None


def _describe_budget(device: DeviceSpec) -> str:
    if device.free_bytes is None:
        return ""
    return f"planned into {SAFE_SHARE:.0%} of the {device.free_bytes / 2**30:.0f} GiB free"


def _smallest(config: RunConfig) -> int:
    return _only_micro_batch(config) or 1


def _only_micro_batch(config: RunConfig) -> int | None:
    """The micro batch that is set, or that updates in the backward leave."""
    train = config.train
    if train.optimizer_in_backward == "on":
        return train.global_batch
    return train.micro_batch if isinstance(train.micro_batch, int) else None


def _ways(resolved: Resolved, device: DeviceSpec) -> tuple[str, ...]:
    given = resolved.config.train.activation_checkpointing
    if given != "auto":
        return (given,)
    return CHECKPOINTING if may_offload(resolved, device) else CHECKPOINTING[:-1]


def _engines(config: RunConfig, device: DeviceSpec) -> list[tuple[str, str]]:
    """The engines to try, the fastest first, each with the reason why it would be chosen."""
    train, method, engine, ranks = config.train, config.method, config.parallel.engine, device.ranks
    if engine == "single" and ranks > 1:
        raise Unsupported(f"parallel.engine: single is for one rank, but {ranks} were started; use auto")
    if train.offload == "all" and engine not in ("auto", "fsdp", "deepspeed"):
        raise Unsupported(f"train.offload: all needs parallel.engine=fsdp or deepspeed, not {engine}; use optimizer")
    if train.optimizer_in_backward == "on" and ranks > 1:
        raise Unsupported(f"train.optimizer_in_backward: on is for one GPU, but {ranks} were started; set it off")
    if engine != "auto":
        return [(engine, "")]
    if config.parallel.deepspeed is not None:
        return [("deepspeed", f"{config.parallel.deepspeed} is given")]
    if train.offload == "all":
        return [("fsdp", "train.offload=all keeps weights in host memory")]
    if ranks == 1:
        return [("single", "one rank")]
    cannot_shard = (
        train.optimizer != "adamw" or train.master_weights != "fp32" or (method.kind == "qlora" and method.bits == 8)
    )
    if device.free_bytes is None or cannot_shard:
        return [("ddp", f"{ranks} ranks")]
    free = f"the {device.free_bytes / 2**30:.0f} GiB free on a GPU"
    return [("ddp", f"all weights fit into {free}"), ("fsdp", f"all weights are too large for {free}")]


def _fastest(config: RunConfig, workload: Workload, device: DeviceSpec, ways: tuple[str, ...]) -> Fit | None:
    """The fastest micro batch and activation checkpointing that fit, by the estimate for the GPU. Where its speed is
    not known, activations are kept if a fair micro batch then fits. None where not even one row fits."""
    length, total = workload.sequence_length, config.train.global_batch
    sizes_of_share = [n for n in divisors(-(-total // device.ranks)) if total % n == 0]  # as the config demands
    given = _only_micro_batch(config)
    budget = math.inf if device.memory_budget is None else device.memory_budget
    on_gpu = device.device_type == "cuda"
    most = _MAX_TOKENS if on_gpu else _FAIR_TOKENS
    rows = [given] if given else [n for n in sizes_of_share if n * length <= most] or [1]
    gpu = device.gpu if on_gpu and device.gpu is not None and has_rate(device.gpu) else None
    fair = rows[-1] if gpu else given or max([n for n in rows if n * length <= _FAIR_TOKENS], default=1)
    found = list[Fit]()
    for way in ways:
        sizes = (sized(config, workload, device, n, way) for n in reversed(rows))
        fits = (Fit(size, memory(size)) for size in sizes)
        found += islice((fit for fit in fits if fit.memory.device <= budget), 1)
        if found and found[-1].workload.micro_batch >= fair:
            break
    if gpu is None:
        return found[-1] if found else None
    return max(found, key=lambda fit: step_time(fit.workload, gpu).tokens_per_second, default=None)
