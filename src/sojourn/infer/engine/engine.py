"""The engine: requests in, tokens out, one step at a time. All generation is this loop.

On CUDA a step is launched before the tokens of the one before are read: while the GPU computes, Python reads, and
prepares what comes next. A request that turns out to be finished has then computed one token too many, which nobody
sees. Where the next step depends on the last token's value (penalties, grammars, drafts), it waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sojourn.infer.engine.adapters import Adapters
from sojourn.infer.engine.batch import order_parts
from sojourn.infer.engine.block_pool import BLOCK, BlockPool
from sojourn.infer.engine.decoder import Decoder
from sojourn.infer.engine.forward import Forward, PlainForward
from sojourn.infer.engine.ops_torch import Ops
from sojourn.infer.engine.request import Request, Token
from sojourn.infer.engine.sample import Sampled, StepSampler
from sojourn.infer.engine.scheduler import Part, Scheduler
from sojourn.infer.sampling import SamplingParams


@dataclass(frozen=True)
class EngineOptions:
    """`max_rows`: requests at a time. `max_tokens`: that a step computes. `context`: of a request. `blocks`: of the KV
    cache. `draft_tokens`: guessed ones a step. `prefix_cache`: whether equal beginnings are computed once."""

    max_rows: int
    max_tokens: int
    context: int
    blocks: int
    draft_tokens: int = 0
    prefix_cache: bool = True


@dataclass(frozen=True)
class Output:
    """New tokens of a request; its `finish_reason` is set with the last ones."""

    request: Request
    tokens: tuple[Token, ...]


@dataclass
class _Launched:
    parts: list[Part]
    sampled: Sampled


class StepForward(Protocol):
    """How a step is computed: over a `Decoder` (forward.py, cuda/graphs.py), or by transformers."""

    def warm_up(self, last_tokens: Tensor) -> None: ...

    def __call__(self, parts: list[Part], last_tokens: Tensor) -> Tensor:
        """Logits (L, vocabulary). `last_tokens`: of each row, see `Request.token_at`."""


class DecodeLoop:
    """Used by one thread."""

    def __init__(self, forward: StepForward, device: torch.device, options: EngineOptions) -> None:
        self.options, self.device = options, device
        self.scheduler = Scheduler(
            BlockPool(options.blocks), options.max_rows, options.max_tokens, options.draft_tokens, options.prefix_cache
        )
        self._runs_ahead = device.type == "cuda" and not options.draft_tokens
        self._forward = forward
        self._sampler = StepSampler(device)
        self._last_tokens = torch.zeros(options.max_rows, dtype=torch.int32, device=device)
        self._launched: _Launched | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self._launched)

    def add(self, request: Request) -> None:
        """It must fit the context and the KV cache, and have a prompt."""
        self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        request.finish_reason = request.finish_reason or "cancelled"
        self.scheduler.remove(request)

    def cancel_all(self) -> None:
        """Also after a step that has failed half-way."""
        self._launched = None
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            self.cancel(request)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compiles kernels and captures CUDA graphs: the first request should not wait for that."""
        self._forward.warm_up(self._last_tokens)
        length = min(self.options.max_tokens, self.options.context - 2, (self.options.blocks - 1) * BLOCK - 2)
        self.add(Request("warm-up", [0] * length, SamplingParams(), 0, 2))
        while self.has_work:
            self.step()
        self.scheduler.pool.forget_all()

    @torch.no_grad()
    def step(self) -> list[Output]:
        """What became known: of this step on a CPU, of the one before on CUDA."""
        outputs: list[Output] = []
        waits = any(one.needs_last_token for one in self.scheduler.running)
        if waits:
            outputs += self._read()
        parts = order_parts(self.scheduler.schedule())
        launched = self._launch(parts) if parts else None
        outputs += self._read()
        self._launched = launched
        return outputs if self._runs_ahead else outputs + self._read()

    def _launch(self, parts: list[Part]) -> _Launched:
        logits_LV = self._forward(parts, self._last_tokens)
        sampled = self._sampler(logits_LV, parts, self._last_tokens)
        for part in parts:
            if part.samples:
                part.request.unread += 1
        return _Launched(parts, sampled)

    def _read(self) -> list[Output]:
        launched, self._launched = self._launched, None
        if launched is None:
            return []
        tokens = launched.sampled.read()
        outputs, at = [], 0
        for part in launched.parts:
            request, count = part.request, (1 + len(part.draft)) * part.samples
            own, at = tokens[at : at + count], at + count
            if part.samples:
                request.unread -= 1
            if not request.is_finished:  # it was not when the step was launched
                outputs += self._accept(part, own)
        return outputs

    def _accept(self, part: Part, tokens: Sequence[Token]) -> list[Output]:
        """Adds sampled tokens to their request: the next one, and those after it whose draft was right."""
        request = part.request
        found: list[Token] = []
        for at, token in enumerate(tokens):
            if token.id < 0:
                request.finish_reason = "error"
                request.error = "the model's logits are not finite numbers (NaN or infinity)"
                break
            request.tokens.append(token.id)
            found.append(token)
            if request.mask is not None:
                request.mask.accept(token.id)
            if token.id in request.stop_ids or (request.mask is not None and request.mask.error):
                request.finish_reason = "stop"
            elif len(request.tokens) >= request.most:
                request.finish_reason = "length"
            if request.finish_reason is not None or at >= len(part.draft) or part.draft[at] != token.id:
                break
            request.scheduled += 1
        if request in self.scheduler.running:  # not preempted meanwhile
            self.scheduler.commit(request)
        if request.is_finished:
            self.scheduler.remove(request)
        return [Output(request, tuple(found))] if found or request.is_finished else []


class Engine(DecodeLoop):
    """The loop over a decoder, with adapters."""

    def __init__(self, decoder: Decoder, ops: Ops, options: EngineOptions) -> None:
        self.decoder, self.adapters = decoder, Adapters()
        forward: Any = Forward(decoder, ops, options.blocks, self.adapters)
        if decoder.device.type == "cuda":
            from sojourn.infer.engine.cuda.graphs import GraphedForward

            forward = GraphedForward(forward, options.max_rows, options.max_tokens, options.context, self.adapters)
        else:
            forward = PlainForward(forward, self.adapters)
        super().__init__(forward, decoder.device, options)

    def load_adapter(self, name: str, folder: Path) -> None:
        self.adapters.load(name, folder, self.decoder)

    def unload_adapter(self, name: str) -> None:
        """No request may use it."""
        self.adapters.unload(name, self.decoder)


def blocks_for(kv_bytes_per_token: int, memory: int, max_rows: int, context: int) -> int:
    """As many blocks as fit into `memory` bytes, and no more than all rows can use; one more for padding."""
    most = max_rows * -(-context // BLOCK)
    return 1 + max(1, min(most, memory // (kv_bytes_per_token * BLOCK)))
