"""A whole run's time: starting, downloading, compiling, steps, evaluations, saves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sojourn.catalog.gpus import Gpu
from sojourn.config.schema import RunConfig
from sojourn.estimate.constants import constants
from sojourn.estimate.model_states import optimizer, trained_parameters
from sojourn.estimate.step_time import Speed
from sojourn.estimate.workload import Work

_PREPARED_PER_SECOND = 1.26e6  # tokens, on two cores: sojourn bench prepare, 2026-11-15


@dataclass(frozen=True)
class Whole:
    """Seconds, by what takes them; `again` is what every further session pays before its first step: where sessions
    end, what was downloaded is gone with them."""

    parts: dict[str, float]
    again: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def whole_run(config: RunConfig, work: Work, gpu: Gpu, fast: Speed, steps: int) -> Whole:
    fixed, train = constants()["seconds"], config.train
    base = config.model.base is not None
    size = 2 * work.shape.parameters if base else 0
    loading = size / (1e6 * fixed["disk_mbs"])
    start = float(fixed["start"]) + loading
    downloading = size / (1e6 * fixed["download_mbs"])
    compiling = float(fixed["compile"]) if work.compiled else 0.0
    stepping = steps * fast.step_seconds
    parts = {
        "starting": start,
        "downloading": downloading,
        "compiling": compiling,
        "steps": stepping,
        "evaluations": _evaluations(config, fast, steps),
        "saves": _saves(config, work, gpu, stepping),
    }
    if train.rehearse == "on":
        parts["rehearsing"] = 3 * fast.step_seconds + checkpoint_bytes(work) / (1e6 * fixed["disk_mbs"])
    return Whole(parts, start + downloading + compiling)


def checkpoint_bytes(work: Work) -> int:
    """What is trained, in 32 bits, and its moments, wherever they are while it trains."""
    together = replace(work, offload="off", engine="single", optimizer=work.optimizer.removeprefix("paged_"))
    return int(4 * trained_parameters(work) + sum(term.bytes for term in optimizer(together)))


def preparing_seconds(tokens: int) -> float:
    return 5 + tokens / _PREPARED_PER_SECOND


def _evaluations(config: RunConfig, fast: Speed, steps: int) -> float:
    """A forward alone is about a third of a pass."""
    train = config.train
    times = 1 + (steps // train.eval_every if train.eval_every else 0)
    rows = train.eval_rows * config.data.max_length
    return times * rows / 3 / fast.tokens_per_second


def _saves(config: RunConfig, work: Work, gpu: Gpu, stepping: float) -> float:
    """Training waits while the weights are copied to the host; writing happens beside it."""
    times = 1 + stepping / max(60.0, float(config.save.every))
    copying = checkpoint_bytes(work) / (0.5e9 * (gpu.pcie_gbs or 8.0))
    writing = checkpoint_bytes(work) / (1e6 * float(constants()["seconds"]["disk_mbs"]))
    return times * copying + writing
