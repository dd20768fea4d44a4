"""Which tokens of which requests the next step computes.

Every step: first one token (and its draft) of each request that is decoding, then parts of prompts, up to a number of
tokens (chunked prefill). A request that needs a block when none is free takes those of the request that came last;
that one is computed again later (preemption), mostly from the prefix cache.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sojourn.infer.engine.block_pool import BLOCK, BlockPool, hash_block
from sojourn.infer.engine.request import Request

_NGRAMS = (4, 3, 2)  # tokens at the end of a text that are looked for, the longest first
_LOOK_BACK = 1024  # tokens


@dataclass(frozen=True)
class Part:
    """Tokens `start` to `end` of a request, then guessed ones (`draft`). `samples`: whether the end is the last token
    known, so the next one is sampled."""

    request: Request
    start: int
    end: int
    samples: bool
    draft: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return self.end - self.start + len(self.draft)

    def ids(self) -> list[int]:
        return [self.request.token_at(position) for position in range(self.start, self.end)] + list(self.draft)


class Scheduler:
    """`max_rows`: requests at a time. `max_tokens`: of a step. `draft_tokens`: guessed ones a request and step."""

    def __init__(
        self, pool: BlockPool, max_rows: int, max_tokens: int, draft_tokens: int = 0, prefix_cache: bool = True
    ) -> None:
        self.pool, self.max_rows, self.max_tokens = pool, max_rows, max_tokens
        self.draft_tokens, self._prefix_cache = draft_tokens, prefix_cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._rows = list(range(max_rows))
        self.preemptions = 0
        self.prefix_tokens = 0  # found in the prefix cache

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def capacity(self) -> int:
        """The most tokens that one request may have."""
        return self.pool.total * BLOCK

    def remove(self, request: Request) -> None:
        """The request is finished or cancelled."""
        if request in self.running:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def schedule(self) -> list[Part]:
        """Decoding requests first, then prompts. Counts the tokens as computed: the step must be launched."""
        parts, budget = [], self.max_tokens
        for is_prompt in (False, True):
            for request in [one for one in self.running if (one.scheduled < one.length - 1) is is_prompt]:
                if request not in self.running or (request.is_full and not is_prompt) or budget <= 0:
                    continue  # preempted meanwhile, or its last token is being sampled
                end = min(request.length, request.scheduled + budget)
                draft = () if is_prompt else propose(request, min(budget, self.draft_tokens + 1) - 1)
                if self._grow(request, end + len(draft)):
                    parts.append(self._part(request, end, draft))
                    budget -= parts[-1].size
        while self.waiting and len(self.running) < self.max_rows and budget > 0 and not self._is_short():
            request = self.waiting[0]
            if request.unread or not self._admit(request, budget):
                break
            request.row = self._rows.pop()
            self.running.append(self.waiting.popleft())
            parts.append(self._part(request, min(request.length, request.scheduled + budget)))
            budget -= parts[-1].size
        return [part for part in parts if part.request in self.running]

    def commit(self, request: Request) -> None:
        """Remembers blocks that are full, and whose tokens are read, for the prefix cache."""
        known = min(request.scheduled, len(request.prompt) + len(request.tokens))
        while (len(request.hashes) + 1) * BLOCK <= known:
            at = len(request.hashes)
            tokens = [request.token_at(position) for position in range(at * BLOCK, (at + 1) * BLOCK)]
            request.hashes.append(hash_block(_root(request) if not at else request.hashes[-1], tokens))
            self.pool.remember(request.blocks[at], request.hashes[-1])

    def _part(self, request: Request, end: int, draft: tuple[int, ...] = ()) -> Part:
        part = Part(request, request.scheduled, end, end == request.length, draft)
        request.scheduled = end
        return part

    def _is_short(self) -> bool:
        """Whether running requests could soon need the blocks that are free: each may need one."""
        return self.pool.free <= len(self.running)

    def _admit(self, request: Request, budget: int) -> bool:
        known = [request.token_at(position) for position in range(request.length)]
        hashes: list[bytes] = []
        for at in range((len(known) - 1) // BLOCK):  # one token at least is computed: its logits are needed
            hashes.append(hash_block(hashes[-1] if at else _root(request), known[at * BLOCK : (at + 1) * BLOCK]))
        found = self.pool.find(hashes) if self._prefix_cache and request.prompt_logprobs is None else []
        request.blocks, request.hashes = found, hashes[: len(found)]
        request.scheduled = len(found) * BLOCK
        if not self._allocate(request, min(request.length, request.scheduled + budget)):
            self._release(request)
            return False
        if not request.tokens:
            request.cached = request.scheduled
        self.prefix_tokens += request.scheduled
        return True

    def _grow(self, request: Request, length: int) -> bool:
        """Blocks for so many tokens; False where the request itself had to give way."""
        while not self._allocate(request, length):
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
        return True

    def _allocate(self, request: Request, length: int) -> bool:
        blocks = self.pool.allocate(max(0, -(-length // BLOCK) - len(request.blocks)))
        if blocks is None:
            return False
        request.blocks += blocks
        return True

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._rows.append(request.row)
        self._release(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.hashes, request.scheduled = [], [], 0


def propose(request: Request, most: int) -> tuple[int, ...]:
    """Guesses the next tokens: what followed the last time that the text had its last few tokens (n-gram speculation).
    A step computes them together with the last token, and keeps those that are sampled indeed."""
    most = min(most, request.most - len(request.tokens) - 1)
    if most < 1 or request.unread or request.needs_last_token:
        return ()
    text = [*request.prompt[-_LOOK_BACK:], *request.tokens][-_LOOK_BACK:]
    for size in _NGRAMS:
        pattern, last = text[-size:], len(text) - size
        for at in range(last - 1, -1, -1):
            if text[at : at + size] == pattern:
                return tuple(text[at + size : at + size + most])
    return ()


def _root(request: Request) -> bytes:
    return (request.adapter or "").encode()
