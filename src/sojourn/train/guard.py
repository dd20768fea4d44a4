"""What ends a run early: signals and limits. Each leads to the same place: finish the step, save, stop, resumable."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

from sojourn.config.schema import LimitsConfig

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@dataclass
class Guard:
    """Watches from `__enter__` to `__exit__`. `before` is the time that earlier calls took; this one began at `began`:
    opening the model and reading data are paid for too."""

    limits: LimitsConfig
    before: float = 0.0
    began: float = field(default_factory=time.monotonic)
    reason: str | None = None
    _old: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Guard:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has a hang-up ignored
                    self._old[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name

    @property
    def seconds(self) -> float:
        """Of this run, all sessions together."""
        return self.before + time.monotonic() - self.began

    @property
    def spent(self) -> float | None:
        price = self.limits.price_per_hour
        return None if price is None else float(price.amount) * self.seconds / 3600

    def should_stop(self) -> str | None:
        """Why to stop now, or None."""
        if self.reason is None:
            if self.limits.time is not None and time.monotonic() - self.began >= self.limits.time:
                self.reason = f"the time limit of {self.limits.time}"
            elif self.limits.budget is not None and (self.spent or 0.0) >= float(self.limits.budget.amount):
                self.reason = f"the budget of {self.limits.budget}"
        return self.reason
