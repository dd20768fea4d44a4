"""How fast a run goes and when it will be done: laps of training, pauses between them, and what is left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_RECENT_STEPS = 100
_NO_PAUSE = 0.01  # seconds; a pause in which nothing had to be done


@dataclass(frozen=True)
class Interval:
    """From one logged step to the next. Pauses are not in `seconds`."""

    steps: int
    tokens: int
    waited: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def data_wait(self) -> float:
        """The share of the time that went by waiting for data."""
        return min(1.0, self.waited / self.seconds) if self.seconds > 0 else 0.0


class Throughput:
    """Time is taken lap by lap: between two laps a GPU works on its own, and single steps cannot be told apart."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._lap_began = clock()
        self._paused = self._paused_in_lap = 0.0
        self._first: float | None = None
        self._in_lap: list[tuple[int, float]] = []
        self._laps: deque[tuple[int, float]] = deque()
        self._gaps: list[float] = []

    def step(self, tokens: int, waited: float) -> None:
        """One more step is done."""
        if self._first is None:
            self._first = self._trained()
        self._in_lap.append((tokens, waited))

    def lap(self) -> Interval:
        """Ends the lap; the device must have finished its steps."""
        seconds = self._clock() - self._lap_began - self._paused_in_lap
        steps = len(self._in_lap)
        done = Interval(steps, sum(t for t, _ in self._in_lap), sum(w for _, w in self._in_lap), max(0.0, seconds))
        self._lap_began, self._paused_in_lap, self._in_lap = self._clock(), 0.0, []
        if self._first:  # The first step starts everything up and says nothing about the others.
            steps, seconds, self._first = steps - 1, seconds - self._first, 0.0
        if steps > 0:
            self._laps.append((steps, max(0.0, seconds)))
        while len(self._laps) > 1 and sum(n for n, _ in self._laps) - self._laps[0][0] >= _RECENT_STEPS:
            self._laps.popleft()
        return done

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training."""
        since = self._clock()
        try:
            yield
        finally:
            took = self._clock() - since
            self._paused_in_lap += took
            if took >= _NO_PAUSE:
                self._gaps.append(self._trained(since) - sum(self._gaps))
            self._paused += took

    def left(self, steps: int) -> float | None:
        """Seconds until `steps` more are done, pauses among them; None before anything is known."""
        if not self._laps:
            return None
        step = sum(seconds for _, seconds in self._laps) / sum(n for n, _ in self._laps)
        return steps * step * (1 + self._pause_share())

    def _pause_share(self) -> float:
        """Seconds of pause for a second of training.

        Measured up to the last pause, so that it does not fall and jump from one pause to the next; a pause that
        does not come again at its usual distance loses its weight.
        """
        if not self._gaps:
            return 0.0
        until_last = sum(self._gaps)
        usual = until_last / len(self._gaps)
        return self._paused / max(until_last, self._trained() - usual, 1e-9)

    def _trained(self, now: float | None = None) -> float:
        return (self._clock() if now is None else now) - self._began - self._paused
