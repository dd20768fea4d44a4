"""What a run shows of itself: metrics.jsonl, TensorBoard, and one live line (plain lines when not a terminal)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from sojourn.config.quantities import Duration
from sojourn.config.schema import RunConfig
from sojourn.run.folder import RunFolder


class Meters:
    """Between two logged steps it counts tokens and time; `log` writes them everywhere."""

    def __init__(self, run: RunFolder, config: RunConfig, total_steps: int, first_step: int) -> None:
        self._run, self._total, self._device = run, total_steps, config.train.device
        self._first, self._began = first_step, time.monotonic()
        self._mark, self._tokens = self._began, 0
        self._writer = _tensorboard(run, config.log.tensorboard, first_step)
        self._bar = _bar(total_steps, first_step) if sys.stdout.isatty() else None

    def __enter__(self) -> Meters:
        if self._bar:
            self._bar[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar[0].stop()
        if self._writer:
            self._writer.close()

    def count(self, tokens: int) -> None:
        """One more step is done, of so many real tokens."""
        self._tokens += tokens
        if self._bar:
            self._bar[0].advance(self._bar[1])

    def log(self, step: int, loss: float, rate: float, norm: float, epoch: float, spent: float | None) -> None:
        """`step`: how many are done."""
        elapsed = time.monotonic() - self._mark
        speed = self._tokens / elapsed if elapsed > 0 else 0.0
        self._mark, self._tokens = time.monotonic(), 0
        memory = used_memory(self._device)
        values = {"loss": loss, "lr": rate, "grad_norm": norm, "epoch": round(epoch, 4)}
        values |= {"tokens_per_second": round(speed, 1), "memory": memory}
        values |= {} if spent is None else {"spent": round(spent, 4)}
        self._run.metric(kind="train", step=step, **{k: _finite(v) for k, v in values.items()})
        if self._writer:
            for name in ("loss", "lr", "grad_norm", "tokens_per_second"):
                self._writer.add_scalar(f"train/{name}", values[name], step)
        says = f"loss {loss:.4f} · {speed:,.0f} tok/s · {memory / 2**30:.1f} GiB"
        says += "" if spent is None else f" · spent {spent:.2f}"
        if self._bar:
            self._bar[0].update(self._bar[1], completed=step, says=says)
            return
        left = (time.monotonic() - self._began) / max(1, step - self._first) * (self._total - step)
        print(f"step {step}/{self._total} · {says} · {Duration(round(left))} left", flush=True)

    def log_eval(self, step: int, loss: float) -> None:
        self._run.metric(kind="eval", step=step, loss=_finite(loss))
        if self._writer:
            self._writer.add_scalar("eval/loss", loss, step)
        self.say(f"step {step}: held-out loss {loss:.4f}")

    def say(self, line: str) -> None:
        if self._bar:
            self._bar[0].console.print(line, highlight=False)
        else:
            print(line, flush=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training (saving, evaluating), so that it does not count as slow training."""
        since = time.monotonic()
        try:
            yield
        finally:
            self._mark += time.monotonic() - since


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


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


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


def _bar(total: int, first: int) -> tuple[Any, Any]:
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
    from rich.text import Text

    class Left(ProgressColumn):
        def render(self, task: Any) -> Text:
            left = task.time_remaining
            return Text("" if left is None else f"{Duration(int(left))} left")

    columns = (
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[says]}"),
        Left(),
    )
    bar = Progress(*columns, refresh_per_second=4)
    return bar, bar.add_task("train", total=total, completed=first, says="starting")
