"""POST /v1/completions"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response

from sojourn.infer.engine.request import Token
from sojourn.serve.deployment import Deployment
from sojourn.serve.errors import bad_request
from sojourn.serve.formats import format_grammar
from sojourn.serve.gateway import Gateway, Record
from sojourn.serve.generation import Delta, Plan, make_plan
from sojourn.serve.schemas import CompletionRequest
from sojourn.serve.served_model import ServedModel
from sojourn.serve.streaming import DONE, INDEX, TEXT, EventStream, TextEvents, Write, event

_DEFAULT_TOKENS = 16  # OpenAI's


@dataclass
class _Choice:
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True)
class _Job:
    """`texts`: of the prompts, to echo."""

    body: CompletionRequest
    id: str
    created: int
    deployment: Deployment
    model: ServedModel
    plan: Plan
    texts: list[str]

    def envelope(self) -> dict[str, Any]:
        return {
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.body.model,
            "system_fingerprint": self.model.id,
        }  # fmt: skip

    @property
    def only_echo(self) -> bool:
        """No answer is wanted: the engine's one token is left out."""
        return self.body.max_tokens == 0

    def part(self, delta: Delta) -> tuple[str, list[Token], str | None]:
        """Text, tokens and finish_reason of a delta, without an answer that is not wanted."""
        text, tokens = ("", []) if self.only_echo else (delta.text, list(delta.tokens))
        if delta.prompt is not None and self.body.echo:
            ids = self.plan.requests[delta.index].prompt
            scored = zip(ids, delta.prompt, strict=True)
            tokens = [Token(id) if one is None else one for id, one in scored] + tokens
        finish = "length" if self.only_echo and delta.finish_reason else delta.finish_reason
        return text, tokens, finish

    def choice(self, index: int, text: str, tokens: list[Token], finish: str | None, start: int) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = self.model.texts.completion_logprobs(tokens, self.body.logprobs, start)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


async def completions(gateway: Gateway, record: Record, body: CompletionRequest) -> Response:
    job = await _prepare(gateway, record, body)
    if body.stream:
        return EventStream(lambda write: _stream(gateway, record, job, write))
    choices = [_Choice(job.texts[at // job.plan.n] if body.echo else "") for at in range(len(job.plan.requests))]
    async with (
        gateway.generating(record, job.deployment, job.plan) as generation,
        aclosing(generation.deltas()) as deltas,
    ):
        async for delta in deltas:
            choice, (text, tokens, finish) = choices[delta.index], job.part(delta)
            choice.text += text
            choice.tokens += tokens
            choice.finish_reason = finish or choice.finish_reason
    record.finish_reason = choices[0].finish_reason
    found = [job.choice(at, one.text, one.tokens, one.finish_reason, 0) for at, one in enumerate(choices)]
    return JSONResponse({**job.envelope(), "choices": found, "usage": generation.usage.body})


async def _prepare(gateway: Gateway, record: Record, body: CompletionRequest) -> _Job:
    deployment, adapter = gateway.find(body.model)
    model = deployment.ready_model()
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens: 0 needs echo: true", "max_tokens")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    grammar = format_grammar(body.response_format, "response_format")
    await gateway.check_grammar(grammar, "response_format")
    is_one = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    given: Sequence[Any] = [body.prompt] if is_one else body.prompt
    deployment.queue.check_size(len(given) * (body.n or 1))
    prompts, texts = await _prompts(model, given, bool(body.echo))
    if gateway.settings.log_prompts:
        record.prompt = texts
    plan = make_plan(
        model, body, f"cmpl-{record.id}", prompts, n=body.n or 1,
        max_tokens=_DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens, prompt_param="prompt",
        max_tokens_param="max_tokens", adapter=adapter, logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None, grammar=grammar,
    )  # fmt: skip
    return _Job(body, f"cmpl-{record.id}", int(time.time()), deployment, model, plan, texts)


async def _prompts(model: ServedModel, given: Sequence[Any], echo: bool) -> tuple[list[list[int]], list[str]]:
    """Token ids of each prompt, and its text."""
    prompts, texts = [], []
    for one in given:
        if isinstance(one, str):
            prompts.append(await model.encode_text(one, "prompt"))
            texts.append(one)
            continue
        if any(token >= model.info.vocab_size for token in one):
            raise bad_request(f"prompt: token ids go up to {model.info.vocab_size - 1:,}", "prompt")
        prompts.append(one)
        texts.append(model.decoder()(one) if echo else "")
    return prompts, texts


async def _stream(gateway: Gateway, record: Record, job: _Job, write: Write) -> None:
    envelope = job.envelope()
    with_usage = bool(job.body.stream_options and job.body.stream_options.include_usage)
    if with_usage:
        envelope["usage"] = None
    offsets = [0] * len(job.plan.requests)
    echoes = {at: job.texts[at // job.plan.n] for at in range(len(offsets))} if job.body.echo else {}
    text_event = TextEvents(envelope, {"index": INDEX, "text": TEXT, "logprobs": None, "finish_reason": None})
    async with gateway.generating(record, job.deployment, job.plan) as generation:
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                if delta.finish_reason is None and job.body.logprobs is None and not job.body.echo:
                    await write(text_event(delta.index, delta.text))
                    continue
                text, tokens, finish = job.part(delta)
                text = echoes.pop(delta.index, "") + text
                choice = job.choice(delta.index, text, tokens, finish, offsets[delta.index])
                offsets[delta.index] += len(text)
                record.finish_reason = finish or record.finish_reason
                await write(event({**envelope, "choices": [choice]}))
        if with_usage:
            await write(event({**envelope, "choices": [], "usage": generation.usage.body}))
    await write(DONE)
