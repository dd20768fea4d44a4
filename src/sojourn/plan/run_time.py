"""The time of a whole run: starting, downloading, compiling, steps, evaluations, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sojourn.catalog.gpus import Gpu
from sojourn.config.schema import RunConfig
from sojourn.estimate.constants import constants
from sojourn.estimate.model_states import optimizer_states
from sojourn.estimate.step_time import StepTime
from sojourn.estimate.workload import Workload

_COMPUTING = ("steps", "evaluations")
_PREPARED_PER_SECOND = 1.26e6  # tokens, on two cores: sojourn bench prepare, 2026-11-15


@dataclass(frozen=True)
class RunTime:
    """Seconds, by what takes them; `again`: what each further session takes before its first step, since downloads are
    lost with the session; `spread`: by what share steps may be shorter or longer."""

    parts: dict[str, float]
    again: float
    spread: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def between(self) -> tuple[float, float]:
        """The seconds that it may take."""
        computing = sum(self.parts[name] for name in _COMPUTING)
        off = self.spread * computing + float(constants()["spread"]["other"]) * (self.seconds - computing)
        return self.seconds - off, self.seconds + off


def run_time(config: RunConfig, workload: Workload, gpu: Gpu, step: StepTime, steps: int) -> RunTime:
    fixed, disk = constants()["seconds"], _disk(gpu)
    base_bytes = 2 * workload.model.parameters if config.model.base is not None else 0
    starting = float(fixed["start"]) + base_bytes / disk
    downloading = base_bytes / (1e6 * fixed["download_mbs"])
    compiling = float(fixed["compile"]) if workload.compiled else 0.0
    stepping = steps * step.step_seconds
    parts = {
        "starting": starting,
        "downloading": downloading,
        "compiling": compiling,
        "steps": stepping,
        "evaluations": _evaluations(config, step, steps),
        "saves": _saves(config, workload, gpu, stepping),
    }
    if config.train.rehearse == "on":
        parts["rehearsing"] = 3 * step.step_seconds + checkpoint_bytes(workload) / disk
    return RunTime(parts, starting + downloading + compiling, step.spread)


def checkpoint_bytes(workload: Workload) -> int:
    """Trained weights and their optimizer states, wherever these are while training."""
    whole = replace(workload, offload="off", engine="single", optimizer=workload.optimizer.removeprefix("paged_"))
    return int(
        workload.trained_bytes * workload.trainable_parameters + sum(term.bytes for term in optimizer_states(whole))
    )


def preparing_seconds(tokens: int) -> float:
    return 5 + tokens / _PREPARED_PER_SECOND


def _evaluations(config: RunConfig, step: StepTime, steps: int) -> float:
    """A forward takes about a third of a forward and backward."""
    train = config.train
    times = 1 + (steps // train.eval_every if train.eval_every else 0)
    tokens = train.eval_rows * config.data.max_length
    return times * tokens / 3 / step.tokens_per_second


def _saves(config: RunConfig, workload: Workload, gpu: Gpu, stepping: float) -> float:
    """Training waits while weights are copied to the host; a thread writes them to disk."""
    times = 1 + stepping / max(60.0, float(config.save.every))
    copying = checkpoint_bytes(workload) / (0.5e9 * (gpu.pcie_gbs or 8.0))
    writing = checkpoint_bytes(workload) / _disk(gpu)
    return times * copying + writing


def _disk(gpu: Gpu) -> float:
    """Bytes per second."""
    return 1e6 * (gpu.disk_mbs or float(constants()["seconds"]["disk_mbs"]))
