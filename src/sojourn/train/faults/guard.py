"""What ends a run early: signals and limits. Each leads to the same place: save, mirror, stop, resumable.

A signal leaves `limits.grace` seconds until the platform kills us. The step in hand is finished if it can be in that
time, saving included; otherwise it is abandoned where it stands, since nothing has changed before the update. Code that
may be left like that runs inside `interruptible`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

from sojourn.config.schema import LimitsConfig
from sojourn.run.ledger import Ledger

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_MARGIN = 0.5  # seconds for leaving
_SESSION_MARGIN = 60.0  # platforms' clocks are not ours
_WARN_AT = 0.8


class Interrupted(BaseException):
    """Leaves what is under way; whoever can save catches it."""


@dataclass
class Guard:
    """Watches from `__enter__` to `__exit__`. `session_end`: when the platform ends everything, by `time.time`.

    `save_seconds` is what saving and mirroring took at worst, `step_seconds` what a step usually takes; the loop keeps
    both up to date.
    """

    limits: LimitsConfig
    ledger: Ledger
    session_end: float | None = None
    together: bool = False  # with other processes: a step that one leaves would hang the rest
    reason: str | None = None
    save_seconds: float = 0.0
    step_seconds: float | None = None
    _old: dict[int, Any] = field(default_factory=dict)
    _open_since: float | None = None
    _kill_at: float | None = None
    _usual: float | None = None
    _warned: bool = False

    def __enter__(self) -> Guard:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has a hang-up ignored
                    self._old[number] = signal.signal(number, self._hear)
            if hasattr(signal, "SIGALRM"):
                self._old[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._too_late)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarm(0)
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @contextmanager
    def interruptible(self, usual: float | None = None, alone: bool = False) -> Iterator[None]:
        """Around what may be left at any point; `usual`: how long it takes, None where nobody knows. `alone`: even by
        one of several processes."""
        if self.together and not alone:
            yield
            return
        self._open_since, self._usual = time.monotonic(), usual
        try:
            if self.reason is not None and self._kill_at is not None:
                self._decide()
            yield
        finally:
            self._open_since = None
            self._alarm(0)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self._kill_at = time.monotonic() + float(self.limits.grace)
        if self._open_since is not None:
            self._decide()

    def _decide(self) -> None:
        """Finish what is under way, or leave it now?"""
        if self._kill_at is None or self._open_since is None:
            return
        until = self._kill_at - 1.5 * self.save_seconds - _MARGIN
        ready = None if self._usual is None else self._open_since + self._usual
        if ready is None or ready > until or time.monotonic() >= until:
            raise Interrupted
        self._alarm(until - time.monotonic())

    def _too_late(self, number: int, frame: FrameType | None) -> None:
        if self._open_since is not None:
            raise Interrupted

    def _alarm(self, seconds: float) -> None:
        if hasattr(signal, "SIGALRM") and signal.SIGALRM in self._old:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    @property
    def reserve(self) -> float:
        """Seconds to keep for the end: the next step, and saving with half as much again."""
        return 1.5 * self.save_seconds + (self.step_seconds or 0.0)

    def should_stop(self) -> str | None:
        """Why to stop now, or None."""
        if self.reason is None:
            limits, ledger = self.limits, self.ledger
            if limits.time is not None and ledger.elapsed + self.reserve >= limits.time:
                self.reason = f"the time limit of {limits.time}"
            elif limits.budget is not None and self._projected >= float(limits.budget.amount):
                self.reason = f"the budget of {limits.budget}"
            elif self.session_end is not None and time.time() + self.reserve + _SESSION_MARGIN >= self.session_end:
                self.reason = "the end of the platform's session"
        return self.reason

    @property
    def _projected(self) -> float:
        """Spent when everything is saved."""
        price = self.limits.price_per_hour
        return (self.ledger.spent or 0.0) + (float(price.amount) * self.reserve / 3600 if price else 0.0)

    def warning(self) -> str | None:
        """Once, when most of the budget is gone."""
        budget, spent = self.limits.budget, self.ledger.spent
        if self._warned or budget is None or spent is None or spent < _WARN_AT * float(budget.amount):
            return None
        self._warned = True
        return f"{spent:.2f} of the budget of {budget} are spent; at {budget} the run is saved and stops"
