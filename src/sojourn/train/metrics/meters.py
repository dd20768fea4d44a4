"""Metrics of a run, written to metrics.jsonl, TensorBoard, the trackers, and the progress line (plain lines where the
output is not a terminal)."""

from __future__ import annotations

import os
import re
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any

from sojourn.config.schema import RunConfig
from sojourn.errors import RunFailed, Stopped
from sojourn.plot.loss import loss_points, loss_svg
from sojourn.run import unwritten
from sojourn.run.folder import RunFolder
from sojourn.storage.files import write_text
from sojourn.train.metrics.progress_line import ProgressLine, StepReport, format_plain_line
from sojourn.train.metrics.tensorboard_file import TensorBoardFile
from sojourn.train.metrics.throughput import Interval, Throughput
from sojourn.train.metrics.trackers import Trackers


@dataclass(frozen=True)
class MfuInputs:
    """FLOPs per token and peak FLOP/s of the devices, for model FLOPs utilization; None where unknown."""

    flops_per_token: float | None = None
    peak_flops: float | None = None


@dataclass(frozen=True)
class EvalScores:
    """Of the held-out rows. `accuracy`: the share of target tokens with the highest logit; `best`: of the run."""

    loss: float
    perplexity: float
    accuracy: float
    bits_per_byte: float | None = None
    best: bool = False


class Meters:
    """Counts tokens and time between two logged steps; `log` writes the metrics."""

    def __init__(
        self, run: RunFolder, config: RunConfig, total_steps: int, first_step: int, mfu_inputs: MfuInputs
    ) -> None:
        self._run, self._total, self._mfu_inputs, self._device = run, total_steps, mfu_inputs, str(config.train.device)
        price = config.limits.price_per_hour
        self._price = None if price is None else float(price.amount)
        self._trackers = Trackers(run, config, self.say)
        self._tensorboard = _open_tensorboard(run, config.log.tensorboard, first_step)
        self._line = ProgressLine(total_steps, first_step) if sys.stdout.isatty() else None
        self._throughput = Throughput()

    def __enter__(self) -> Meters:
        self._trackers.start()
        if self._line:
            self._line.start()
        self._throughput = Throughput()  # again: starting the trackers is not training time
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line:
            self._line.stop()
        self._line = None
        _write_loss_plot(self._run)
        self._trackers.close("done" if kind is None else "stopped" if issubclass(kind, Stopped) else "failed")

    def count_step(self, tokens: int, waited: float) -> None:
        """`tokens`: without padding; `waited`: seconds spent waiting for data."""
        self._throughput.count_step(tokens, waited)
        if self._line:
            self._line.step += 1

    def log(
        self, step: int, loss: float, lr: float, grad_norm: float, epoch: float, tokens: int, spent: float | None
    ) -> None:
        """`step`: how many are done; `tokens`: trained on so far; `spent`: money."""
        interval = self._throughput.end_interval()
        remaining = self._throughput.remaining_seconds(self._total - step)
        memory = used_memory(self._device)
        values: dict[str, float] = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "epoch": round(epoch, 4)}
        values["tokens"] = tokens
        values["tokens_per_second"] = round(interval.tokens_per_second, 1)
        mfu = self._mfu(interval)
        if mfu is not None:
            values["mfu"] = round(mfu, 4)
        values |= {"data_wait": round(interval.data_wait, 4), "memory": memory}
        if self._device == "cuda":
            values["memory_reserved"] = _reserved_memory()
        projected = None
        if spent is not None:
            values["spent"] = round(spent, 4)
            if self._price is not None and remaining is not None:
                projected = spent + self._price * remaining / 3600
                values["projected"] = round(projected, 4)
        if remaining is not None:
            values["eta"] = round(remaining, 1)
        self._write("train", step, values)
        report = StepReport(
            loss, interval.tokens_per_second, memory, mfu, interval.data_wait, spent, projected, remaining
        )
        if self._line:
            self._line.show(step, report)
        else:
            print(format_plain_line(step, self._total, report), flush=True)

    def log_eval(self, step: int, scores: EvalScores) -> None:
        values = {"loss": scores.loss, "perplexity": scores.perplexity, "accuracy": scores.accuracy}
        line = f"step {step}: held-out loss {scores.loss:.4f} · perplexity {scores.perplexity:.4g}"
        line += f" · {100 * scores.accuracy:.1f} % of tokens right"
        if scores.bits_per_byte is not None:
            values["bits_per_byte"] = scores.bits_per_byte
            line += f" · {scores.bits_per_byte:.3f} bits per byte"
        self._write("eval", step, values, best=scores.best)
        self.say(line + (" · best so far" if scores.best else ""))

    def log_samples(self, step: int, samples: list[tuple[str, str]]) -> None:
        """Prints one shortened line each; the full text goes to the files and trackers."""
        for number, (prompt, text) in enumerate(samples, 1):
            self._run.metric(kind="sample", step=step, prompt=prompt, text=text)
            shown = "\n".join(f"    {line}" for line in f"{prompt}\n→ {text}".split("\n"))  # Markdown code block
            if self._tensorboard is not None:
                self._tensorboard.add_text(f"sample/{number}", shown, step)
            self.say(_shorten(f"step {step}: {prompt} → {text}"))
        if samples:
            self._trackers.log_samples(list(samples), step)

    def say(self, line: str) -> None:
        if self._line:
            self._line.say(line)
        else:
            print(line, flush=True)

    def paused(self) -> AbstractContextManager[None]:
        """Around work that is not training (saving, evaluating)."""
        return self._throughput.paused()

    def _mfu(self, interval: Interval) -> float | None:
        if not self._mfu_inputs.flops_per_token or not self._mfu_inputs.peak_flops:
            return None
        return interval.tokens_per_second * self._mfu_inputs.flops_per_token / self._mfu_inputs.peak_flops

    def _write(self, kind: str, step: int, values: dict[str, float], **facts: Any) -> None:
        self._run.metric(kind=kind, step=step, **{name: _finite(value) for name, value in values.items()}, **facts)
        named = {f"{kind}/{name}": value for name, value in values.items()}
        if self._tensorboard is not None:
            self._tensorboard.add_scalars(named, step)
        self._trackers.log(named, step)


def used_memory(device: str) -> int:
    """Bytes: peak allocation on a GPU, resident memory of the process on a CPU."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    if device == "mps":
        import torch

        return int(torch.mps.current_allocated_memory())
    return int(_process(os.getpid()).memory_info().rss)


@cache
def _process(pid: int) -> Any:
    """Made once: its making takes longer than its question."""
    import psutil

    return psutil.Process(pid)


def _reserved_memory() -> int:
    import torch

    return int(torch.cuda.max_memory_reserved())


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def _shorten(text: str, most: int = 200) -> str:
    line = re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", re.sub(r"\r\n|\n|\r", "⏎", text))  # no terminal control characters
    return line if len(line) <= most else line[: most - 1] + "…"


def _open_tensorboard(run: RunFolder, setting: str, first_step: int) -> TensorBoardFile | None:
    if setting == "off" or not run.is_main_process:
        return None
    try:
        import torch.utils.tensorboard  # noqa: F401
    except Exception as error:  # not installed, or its protobuf does not fit
        if setting == "on":
            missing = isinstance(error, ModuleNotFoundError)
            reason = "is not installed (pip install tensorboard)" if missing else f"cannot be imported: {error}"
            print(f"note: tensorboard {reason}; metrics are in metrics.jsonl", flush=True)
        return None
    return TensorBoardFile(run.logs, first_step)


def _write_loss_plot(run: RunFolder) -> None:
    """However training ends: `loss.svg`."""
    if not run.writable:
        return
    try:
        metrics = run.read_metrics()
        svg = loss_svg(run.path.name, loss_points(metrics, "train"), loss_points(metrics, "eval"))
        write_text(run.loss_plot, svg)
    except (OSError, RunFailed) as error:
        unwritten.count(str(run.loss_plot), error)
