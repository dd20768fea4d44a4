"""Throughput and remaining time: training intervals between logged steps, without pauses (saves, evaluations)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_RECENT_STEPS = 100
_MIN_PAUSE = 0.01  # seconds; shorter pauses did nothing


@dataclass(frozen=True)
class Interval:
    """From one logged step to the next. `seconds` without pauses; `waited`: seconds spent waiting for data."""

    steps: int
    tokens: int
    waited: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def data_wait(self) -> float:
        """The share of the time spent waiting for data."""
        return min(1.0, self.waited / self.seconds) if self.seconds > 0 else 0.0


class Throughput:
    """Measures whole intervals: a GPU runs asynchronously between logged steps, so single steps cannot be timed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = self._interval_start = clock()
        self._paused = self._paused_in_interval = 0.0
        self._first_step_seconds: float | None = None
        self._steps: list[tuple[int, float]] = []
        self._intervals: deque[tuple[int, float]] = deque()
        self._trained_between_pauses: list[float] = []

    def count_step(self, tokens: int, waited: float) -> None:
        if self._first_step_seconds is None:
            self._first_step_seconds = self._trained()
        self._steps.append((tokens, waited))

    def end_interval(self) -> Interval:
        """The device must have finished its steps."""
        seconds = self._clock() - self._interval_start - self._paused_in_interval
        steps = len(self._steps)
        done = Interval(steps, sum(t for t, _ in self._steps), sum(w for _, w in self._steps), max(0.0, seconds))
        self._interval_start, self._paused_in_interval, self._steps = self._clock(), 0.0, []
        if self._first_step_seconds:  # the first step includes start-up and compilation
            steps, seconds, self._first_step_seconds = steps - 1, seconds - self._first_step_seconds, 0.0
        if steps > 0:
            self._intervals.append((steps, max(0.0, seconds)))
        while len(self._intervals) > 1 and sum(n for n, _ in self._intervals) - self._intervals[0][0] >= _RECENT_STEPS:
            self._intervals.popleft()
        return done

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around work that is not training."""
        since = self._clock()
        try:
            yield
        finally:
            took = self._clock() - since
            self._paused_in_interval += took
            if took >= _MIN_PAUSE:
                self._trained_between_pauses.append(self._trained(since) - sum(self._trained_between_pauses))
            self._paused += took

    def remaining_seconds(self, steps: int) -> float | None:
        """Until `steps` more are done, with pauses; None before the first measurement."""
        if not self._intervals:
            return None
        step = sum(seconds for _, seconds in self._intervals) / sum(n for n, _ in self._intervals)
        return steps * step * (1 + self._pause_share())

    def _pause_share(self) -> float:
        """Seconds of pause per second of training.

        Measured up to the last pause, so that it does not oscillate between pauses. When the next pause is overdue,
        its share decreases.
        """
        if not self._trained_between_pauses:
            return 0.0
        until_last = sum(self._trained_between_pauses)
        usual = until_last / len(self._trained_between_pauses)
        return self._paused / max(until_last, self._trained() - usual, 1e-9)

    def _trained(self, now: float | None = None) -> float:
        return (self._clock() if now is None else now) - self._start - self._paused
