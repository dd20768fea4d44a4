"""What a run shows of itself: metrics.jsonl, TensorBoard, the trackers, and one live line (plain lines elsewhere)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from sojourn.config.schema import RunConfig
from sojourn.errors import Stopped
from sojourn.run.folder import RunFolder
from sojourn.train.metrics.progress_line import ProgressLine, Reading, format_plain_line
from sojourn.train.metrics.throughput import Interval, Throughput
from sojourn.train.metrics.trackers import Trackers


@dataclass(frozen=True)
class MfuInputs:
    """What a token costs and what the device could do at most, both in FLOP; None where it is not known."""

    flops_per_token: float | None = None
    peak_flops: float | None = None


@dataclass(frozen=True)
class EvalScores:
    """What the held-out rows say. `accuracy`: the share of tokens that are the likeliest one; `best`: of the run."""

    loss: float
    perplexity: float
    accuracy: float
    bits_per_byte: float | None = None
    best: bool = False


class Meters:
    """Between two logged steps it counts tokens and time; `log` writes them everywhere."""

    def __init__(self, run: RunFolder, config: RunConfig, total_steps: int, first_step: int, work: MfuInputs) -> None:
        self._run, self._total, self._work, self._device = run, total_steps, work, str(config.train.device)
        price = config.limits.price_per_hour
        self._price = None if price is None else float(price.amount)
        self._trackers = Trackers(run, config, self.say)
        self._writer = _tensorboard(run, config.log.tensorboard, first_step)
        self._line = ProgressLine(total_steps, first_step) if sys.stdout.isatty() else None
        self._pace = Throughput()

    def __enter__(self) -> Meters:
        self._trackers.start()
        if self._line:
            self._line.start()
        self._pace = Throughput()  # again: starting the trackers is no slow training
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line:
            self._line.stop()
        self._draw(lambda board: board.close())
        self._line = None
        self._trackers.close("done" if kind is None else "stopped" if issubclass(kind, Stopped) else "failed")

    def count(self, tokens: int, waited: float) -> None:
        """One more step is done, of so many real tokens, after waiting so many seconds for its data."""
        self._pace.step(tokens, waited)
        if self._line:
            self._line.step += 1

    def log(self, step: int, loss: float, rate: float, norm: float, epoch: float, spent: float | None) -> None:
        """`step`: how many are done."""
        lap = self._pace.lap()
        left = self._pace.left(self._total - step)
        memory = used_memory(self._device)
        values: dict[str, float] = {"loss": loss, "lr": rate, "grad_norm": norm, "epoch": round(epoch, 4)}
        values["tokens_per_second"] = round(lap.tokens_per_second, 1)
        mfu = self._mfu(lap)
        if mfu is not None:
            values["mfu"] = round(mfu, 4)
        values |= {"data_wait": round(lap.data_wait, 4), "memory": memory}
        if self._device == "cuda":
            values["memory_reserved"] = _reserved_memory()
        projected = None
        if spent is not None:
            values["spent"] = round(spent, 4)
            if self._price is not None and left is not None:
                projected = spent + self._price * left / 3600
                values["projected"] = round(projected, 4)
        if left is not None:
            values["eta"] = round(left, 1)
        self._write("train", step, values)
        reading = Reading(loss, lap.tokens_per_second, memory, mfu, lap.data_wait, spent, projected, left)
        if self._line:
            self._line.show(step, reading)
        else:
            print(format_plain_line(step, self._total, reading), flush=True)

    def log_eval(self, step: int, scores: EvalScores) -> None:
        values = {"loss": scores.loss, "perplexity": scores.perplexity, "accuracy": scores.accuracy}
        says = f"step {step}: held-out loss {scores.loss:.4f} · perplexity {scores.perplexity:.4g}"
        says += f" · {100 * scores.accuracy:.1f} % of tokens right"
        if scores.bits_per_byte is not None:
            values["bits_per_byte"] = scores.bits_per_byte
            says += f" · {scores.bits_per_byte:.3f} bits per byte"
        self._write("eval", step, values, best=scores.best)
        self.say(says + (" · best so far" if scores.best else ""))

    def log_samples(self, step: int, samples: list[tuple[str, str]]) -> None:
        """What the model says now: a line each here, the whole text everywhere else."""
        for number, (prompt, text) in enumerate(samples, 1):
            self._run.metric(kind="sample", step=step, prompt=prompt, text=text)
            shown = "\n".join(f"    {line}" for line in f"{prompt}\n→ {text}".split("\n"))  # Markdown's plain text
            self._draw(lambda board, n=number, s=shown: board.add_text(f"sample/{n}", s, step))
            self.say(_shortened(f"step {step}: {prompt} → {text}"))
        if samples:
            self._trackers.log_samples(list(samples), step)

    def say(self, line: str) -> None:
        if self._line:
            self._line.say(line)
        else:
            print(line, flush=True)

    def paused(self) -> AbstractContextManager[None]:
        """Around what is not training (saving, evaluating), so that it does not count as slow training."""
        return self._pace.paused()

    def _mfu(self, lap: Interval) -> float | None:
        if not self._work.flops_per_token or not self._work.peak_flops:
            return None
        return lap.tokens_per_second * self._work.flops_per_token / self._work.peak_flops

    def _draw(self, draw: Callable[..., Any]) -> None:
        """On TensorBoard, until a full disk forbids it: that must not end a run."""
        try:
            if self._writer is not None:
                draw(self._writer)
        except OSError as error:
            self._writer = None
            self.say(f"warning: no more curves for TensorBoard: {error.strerror or error}")

    def _write(self, kind: str, step: int, values: dict[str, float], **facts: Any) -> None:
        self._run.metric(kind=kind, step=step, **{name: _finite(value) for name, value in values.items()}, **facts)
        named = {f"{kind}/{name}": value for name, value in values.items()}
        self._draw(lambda board: [board.add_scalar(name, value, step) for name, value in named.items()])
        self._trackers.log(named, step)


def used_memory(device: str) -> int:
    """Bytes at the peak: allocated on a GPU, resident in the process on a CPU."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    if device == "mps":
        import torch

        return int(torch.mps.current_allocated_memory())
    import psutil

    return int(psutil.Process().memory_info().rss)


def _reserved_memory() -> int:
    import torch

    return int(torch.cuda.max_memory_reserved())


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def _shortened(text: str, most: int = 200) -> str:
    line = re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", re.sub(r"\r\n|\n|\r", "⏎", text))  # no command to the terminal
    return line if len(line) <= most else line[: most - 1] + "…"


def _tensorboard(run: RunFolder, wanted: str, first_step: int) -> Any:
    if wanted == "off":
        return None
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        if wanted == "on":
            print("note: tensorboard is not installed; curves are in metrics.jsonl (pip install tensorboard)")
        return None
    return SummaryWriter(str(run.logs), purge_step=first_step + 1 if first_step else None)
