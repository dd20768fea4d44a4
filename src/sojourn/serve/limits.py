"""Limits: how many sequences a model takes at a time, and how much each key may use.

A model takes as many sequences as its engine runs, and a bounded number more that wait. What is beyond gets 429 with
`Retry-After`: an estimate from the time that recent requests took.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sojourn.serve.auth import ApiKey
from sojourn.serve.errors import ApiError

_RECENT = 0.1  # weight of a new duration in the average
_LONGEST_RETRY = 60.0


@dataclass
class _Use:
    """Of one key. `started`: the times of its requests in the last minute."""

    started: deque[float] = field(default_factory=deque)
    running: int = 0
    day: int = 0
    tokens: int = 0


@dataclass
class Queue:
    """Of one model. `running`: sequences that its engine runs at a time. `waiting`: how many more may wait. `taken`:
    those that run or wait now. `seconds`: that a request takes."""

    running: int
    waiting: int
    taken: int = 0
    seconds: float = 1.0

    def check_size(self, sequences: int) -> None:
        if sequences > self.running + self.waiting:
            message = f"{sequences:,} sequences in one request; the server takes {self.running + self.waiting:,}"
            raise ApiError(400, message, param="n", code="too_many_sequences")

    def retry_after(self) -> float:
        """Seconds until those that wait now have probably run."""
        rounds = max(1.0, (self.taken - self.running) / max(1, self.running))
        return min(_LONGEST_RETRY, rounds * self.seconds)


class Admission:
    """What each key uses, of all models together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time) -> None:
        self._clock, self._now = clock, now
        self._uses: dict[str, _Use] = defaultdict(_Use)

    @contextmanager
    def admit(self, key: ApiKey, queue: Queue, sequences: int) -> Iterator[None]:
        """Raises ApiError 429 where there is no room, or the key is used up."""
        self._check_key(key, queue)
        queue.check_size(sequences)
        if queue.taken + sequences > queue.running + queue.waiting:
            raise ApiError(
                429, "the server is busy; try again later", code="server_overloaded", retry_after=queue.retry_after()
            )
        use, start = self._uses[key.name], self._clock()
        use.started.append(start)
        use.running += 1
        queue.taken += sequences
        try:
            yield
        finally:
            queue.taken -= sequences
            use.running -= 1
            queue.seconds += _RECENT * (self._clock() - start - queue.seconds)

    def _check_key(self, key: ApiKey, queue: Queue) -> None:
        use, quota, now = self._uses[key.name], key.quota, self._clock()
        while use.started and use.started[0] <= now - 60:
            use.started.popleft()
        if quota.requests_per_minute is not None and len(use.started) >= quota.requests_per_minute:
            wait = use.started[0] + 60 - now
            raise _used_up(f"{quota.requests_per_minute} requests a minute", "requests", wait)
        if quota.concurrency is not None and use.running >= quota.concurrency:
            raise _used_up(f"{quota.concurrency} requests at a time", "concurrency", min(queue.seconds, _LONGEST_RETRY))
        if quota.tokens_per_day is not None and self.tokens_today(key) >= quota.tokens_per_day:
            wait = 86_400 - self._now() % 86_400
            raise _used_up(f"{quota.tokens_per_day:,} tokens a day", "tokens", wait)

    def count_tokens(self, key: ApiKey, tokens: int) -> None:
        self.tokens_today(key)
        self._uses[key.name].tokens += tokens

    def tokens_today(self, key: ApiKey) -> int:
        use, day = self._uses[key.name], int(self._now() // 86_400)
        if use.day != day:
            use.day, use.tokens = day, 0
        return use.tokens


def _used_up(limit: str, code: str, wait: float) -> ApiError:
    return ApiError(429, f"this key's limit is reached: {limit}", code=f"{code}_limit_exceeded", retry_after=wait)
