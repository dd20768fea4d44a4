"""From an engine's tokens to text: sampling parameters, stop strings, several sequences at once, usage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from sojourn.errors import UserError
from sojourn.infer.detokenize import Detokenizer
from sojourn.infer.engine.request import Token
from sojourn.infer.generate import draw_seed
from sojourn.infer.sampling import SamplingParams, row_key
from sojourn.infer.stop_strings import StopStrings
from sojourn.serve.engines.base import EngineDied, GenerationRequest, Grammar, Output, TokenEngine
from sojourn.serve.errors import ApiError, bad_request

if TYPE_CHECKING:
    from sojourn.serve.metrics import Metrics
    from sojourn.serve.schemas import Request
    from sojourn.serve.served_model import ServedModel


@dataclass(frozen=True)
class Delta:
    """New text of one choice, and the tokens that it came from. `prompt`: the prompt's tokens with logprobs."""

    index: int
    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish_reason: Literal["stop", "length"] | None = None
    prompt: tuple[Token | None, ...] | None = None


@dataclass
class Usage:
    """Of one request. The prompt of several choices counts once."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Plan:
    """What a request asks of the engine: `n` sequences for each prompt. `keep_markers`: see ServedModel.decoder."""

    requests: list[GenerationRequest]
    n: int
    stops: tuple[str, ...]
    keep_markers: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(len(one.prompt) for one in self.requests[:: self.n])


def make_plan(
    model: ServedModel, body: Request, id: str, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int | None,
    adapter: str | None, prompt_param: str, max_tokens_param: str, logprobs: int | None = None,
    prompt_logprobs: int | None = None, grammar: Grammar | None = None, keep_markers: bool = False,
) -> Plan:  # fmt: skip
    """`max_tokens`: None for all that fit the context. Raises ApiError 400 where the engine could not do it."""
    special = {str(token): number for number, token in model.tokenizer.added_tokens_decoder.items()}
    stop_ids = {special[stop] for stop in body.stops if stop in special} | set(body.stop_token_ids or ())
    if not body.ignore_eos:
        stop_ids |= model.info.stop_ids
    elif grammar is not None:
        raise bad_request("ignore_eos: an answer with a grammar ends with a stop token", "ignore_eos")
    params = _sampling_params(body, model.info.vocab_size)
    seed = draw_seed() if body.seed is None else body.seed
    requests = []
    for index, prompt in enumerate(prompts):
        most = _room(model, prompt, prompt_param, max_tokens, max_tokens_param)
        one = GenerationRequest(
            id, tuple(prompt), replace(params, max_tokens=most), 0, most, frozenset(stop_ids), adapter, logprobs,
            prompt_logprobs, grammar,
        )  # fmt: skip
        requests += [
            replace(one, id=f"{id}-{index * n + sample}", key=row_key(seed, index, sample)) for sample in range(n)
        ]
    return Plan(requests, n, tuple(stop for stop in body.stops if stop not in special), keep_markers)


def _sampling_params(body: Request, vocab_size: int) -> SamplingParams:
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    for token in bias:
        if token >= vocab_size:
            raise bad_request(f"logit_bias: the model has no token {token}; it has {vocab_size:,}", "logit_bias")
    try:
        return SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=min(max(body.top_k or 0, 0), vocab_size),
            min_p=body.min_p or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            logit_bias=bias,
        )
    except UserError as error:
        raise bad_request(str(error)) from None


def _room(model: ServedModel, prompt: Sequence[int], prompt_param: str, max_tokens: int | None, param: str) -> int:
    """How many tokens may be generated."""
    context, length = model.info.context_length, len(prompt)
    if not length:
        raise bad_request("the prompt is empty", prompt_param)
    if length >= context:
        message = f"the prompt has {length:,} tokens; the model's context is {context:,}, answer included"
        raise bad_request(message, prompt_param, "context_length_exceeded")
    if max_tokens is None:
        return context - length
    if length + max_tokens > context:
        message = f"{length:,} tokens of prompt and {max_tokens:,} of {param} exceed the model's context of {context:,}"
        raise bad_request(message, param, "context_length_exceeded")
    return max(1, max_tokens)


class SequenceText:
    """The text of one sequence up to its first stop string, and which tokens it came from."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self._detokenizer, self._stops = Detokenizer(decode), StopStrings(stops)
        self._spelled = self._given = 0  # characters of all tokens, and of what was given out
        self._pending: list[tuple[Token, int]] = []  # tokens not given out, and where their text begins

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def add(self, token: Token) -> None:
        if not self.stopped:
            self._pending.append((token, self._spelled))
            self._push(self._detokenizer.add(token.id))

    def _push(self, piece: str) -> None:
        self._spelled += len(piece)
        self._text += self._stops.add(piece)

    _text = ""

    def take(self, finish: bool = False) -> tuple[str, tuple[Token, ...]]:
        """The text and tokens since the last call."""
        if finish and not self.stopped:
            self._push(self._detokenizer.finish())
            self._text += self._stops.finish()
        text, self._text = self._text, ""
        self._given += len(text)
        whole = finish and not self.stopped
        count = len(self._pending) if whole else sum(1 for _, start in self._pending if start < self._given)
        tokens, self._pending = self._pending[:count], self._pending[count:]
        return text, tuple(token for token, _ in tokens)


@dataclass
class Clock:
    """When tokens came, for metrics and the log."""

    metrics: Metrics
    start: float = field(default_factory=time.monotonic)
    first: float | None = None

    def first_token(self) -> None:
        if self.first is None:
            self.first = time.monotonic() - self.start
            self.metrics.histograms["time_to_first_token_seconds"].add(self.first)


class Generation:
    """All sequences of one request, while they are generated."""

    def __init__(
        self, engine: TokenEngine, model: ServedModel, plan: Plan, metrics: Metrics,
        on_death: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._model, self._plan, self._metrics = engine, model, plan, metrics
        self._on_death = on_death
        self.usage = Usage(plan.prompt_tokens)
        self.clock = Clock(metrics)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Of all choices as they come; each ends with a finish_reason. Leaving it frees their slots at once."""
        streams = [self._sequence(index, request) for index, request in enumerate(self._plan.requests)]
        merged = streams[0] if len(streams) == 1 else _merge(streams)
        async with aclosing(merged):
            async for delta in merged:
                yield delta

    async def _sequence(self, index: int, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        text = SequenceText(self._model.decoder(self._plan.keep_markers), self._plan.stops)
        last = time.monotonic()
        latency = self._metrics.histograms["inter_token_latency_seconds"]
        async with aclosing(self._submit(request)) as outputs:
            async for output in outputs:
                self.clock.first_token()
                now = time.monotonic()
                if output.tokens:
                    latency.add((now - last) / len(output.tokens), len(output.tokens))
                last = now
                delta = self._read(index, request, text, output)
                if delta is not None:
                    yield delta
                    if delta.finish_reason is not None:
                        return
        raise ApiError(503, "the engine ended the answer early", code="engine_error", retry_after=5)

    async def _submit(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        try:
            async with aclosing(self._engine.submit(request)) as outputs:
                async for output in outputs:
                    yield output
        except EngineDied as error:
            if self._on_death is not None:
                self._on_death(str(error))
            raise ApiError(503, f"the engine stopped: {error}", code="engine_died", retry_after=10) from None
        except UserError as error:
            raise bad_request(str(error)) from None

    def _read(self, index: int, request: GenerationRequest, text: SequenceText, output: Output) -> Delta | None:
        """None where there is nothing to give out yet."""
        self.usage.completion_tokens += len(output.tokens)
        if index % self._plan.n == 0:
            self.usage.cached_tokens += output.cached_tokens
        if output.finish_reason == "error":
            raise ApiError(503, f"the engine failed: {output.error or 'unknown'}", code="engine_error", retry_after=5)
        for token in output.tokens:
            if token.id not in request.stop_ids:
                text.add(token)
        finish = "stop" if text.stopped else output.finish_reason
        piece, tokens = text.take(finish is not None)
        if not piece and not tokens and finish is None and output.prompt_logprobs is None:
            return None
        return Delta(index, piece, tokens, finish, output.prompt_logprobs)


async def _merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Several streams as one, whichever comes first. The first error ends all."""
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    queue.put_nowait(delta)
            queue.put_nowait(None)
        except Exception as error:  # whoever reads the queue raises it
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
