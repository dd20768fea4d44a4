"""What ends a run early: signals and limits. Each ends in the same way: save, mirror, mark as resumable, exit 3.

A signal leaves `limits.grace` seconds until the platform kills the process. The current step is finished if that and
saving fit in this time; otherwise it is interrupted, since nothing changes before the optimizer step. Code that may be
interrupted at any point runs inside `Guard.interruptible`. A second Ctrl-C leaves at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, TypeVar

from sojourn.config.schema import LimitsConfig
from sojourn.launch.stop_signals import STOP_SIGNALS
from sojourn.run.ledger import Ledger

T = TypeVar("T")

_MARGIN = 0.5  # seconds to exit
_SESSION_MARGIN = 60.0  # seconds: the platform's clock may differ from ours
_SAME_CTRL_C = 0.1  # seconds: terminals and wrappers send two
_WARN_AT = 0.8  # of the budget
_SIGNAL_CHECK = 0.2  # seconds


class Interrupted(BaseException):
    """Raised inside `interruptible` code; the training loop catches it, saves and stops."""


def wait_for(future: Future[T]) -> T:
    """Its result. A signal that arrives in another thread, or just before the wait, does not end a wait for a lock;
    Python calls the handler after it. So no wait is longer than `_SIGNAL_CHECK`."""
    while not future.done():
        wait([future], timeout=_SIGNAL_CHECK)
    return future.result()


@dataclass
class Guard:
    """`session_end`: when the platform ends the session, as `time.time`. `reason`: why the run must stop.

    `save_seconds`: the longest save so far, with mirroring; `step_seconds`: the time of a step. The loop updates both.
    """

    limits: LimitsConfig
    ledger: Ledger
    session_end: float | None = None
    distributed: bool = False  # several ranks: a step that one rank leaves would block the others
    reason: str | None = None
    save_seconds: float = 0.0
    step_seconds: float | None = None
    _handlers: dict[int, Any] = field(default_factory=dict)
    _entered_at: float | None = None
    _signalled_at: float | None = None
    _kill_at: float | None = None
    _expected_seconds: float | None = None
    _warned: bool = False

    def __enter__(self) -> Guard:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                    self._handlers[number] = signal.signal(number, self._on_signal)
            if hasattr(signal, "SIGALRM"):
                self._handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarm(0)
        if self._signalled_at is not None:  # the second of two signals must not hit what comes after
            time.sleep(max(0.0, self._signalled_at + _SAME_CTRL_C - time.monotonic()))
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def interruptible(self, expected_seconds: float | None = None, even_if_distributed: bool = False) -> Iterator[None]:
        """Around code that may be interrupted at any point. `expected_seconds`: how long it takes, if known.
        `even_if_distributed`: also on one of several ranks."""
        if self.distributed and not even_if_distributed:
            yield
            return
        self._entered_at, self._expected_seconds = time.monotonic(), expected_seconds
        try:
            if self.reason is not None and self._kill_at is not None:
                self._finish_or_interrupt()
            yield
        finally:
            self._entered_at = None
            self._alarm(0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._signalled_at = self._signalled_at or now
        if self.reason is not None:
            if number == signal.SIGINT and now - self._signalled_at >= _SAME_CTRL_C:
                raise KeyboardInterrupt
            return
        self.reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self._kill_at = now + float(self.limits.grace)
        if self._entered_at is not None:
            self._finish_or_interrupt()

    def _finish_or_interrupt(self) -> None:
        """Interrupts now, or sets an alarm for the latest moment."""
        if self._kill_at is None or self._entered_at is None:
            return
        latest = self._kill_at - 1.5 * self.save_seconds - _MARGIN
        finished = None if self._expected_seconds is None else self._entered_at + self._expected_seconds
        if finished is None or finished > latest or time.monotonic() >= latest:
            raise Interrupted
        self._alarm(latest - time.monotonic())

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self._entered_at is not None:
            raise Interrupted

    def _alarm(self, seconds: float) -> None:
        if hasattr(signal, "SIGALRM") and signal.SIGALRM in self._handlers:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    @property
    def reserve(self) -> float:
        """Seconds to keep for the end: the next step, and one and a half times the longest save."""
        return 1.5 * self.save_seconds + (self.step_seconds or 0.0)

    @property
    def grace_left(self) -> float | None:
        """After a signal: seconds until the platform kills the process."""
        return None if self._kill_at is None else max(0.0, self._kill_at - _MARGIN - time.monotonic())

    def should_stop(self) -> str | None:
        """Why to stop now, or None."""
        if self.reason is None:
            limits, ledger = self.limits, self.ledger
            if limits.time is not None and ledger.elapsed + self.reserve >= limits.time:
                self.reason = f"the time limit of {limits.time}"
            elif limits.budget is not None and self._projected_cost >= float(limits.budget.amount):
                self.reason = f"the budget of {limits.budget}"
            elif self.session_end is not None and time.time() + self.reserve + _SESSION_MARGIN >= self.session_end:
                self.reason = "the end of the platform's session"
        return self.reason

    @property
    def _projected_cost(self) -> float:
        """Money spent by the time everything is saved."""
        price = self.limits.price_per_hour
        return (self.ledger.spent or 0.0) + (float(price.amount) * self.reserve / 3600 if price else 0.0)

    def warning(self) -> str | None:
        """Once, when 80 % of the budget are spent."""
        budget, spent = self.limits.budget, self.ledger.spent
        if self._warned or budget is None or spent is None or spent < _WARN_AT * float(budget.amount):
            return None
        self._warned = True
        return f"{spent:.2f} of the budget of {budget} are spent; at {budget} the run saves and stops"
