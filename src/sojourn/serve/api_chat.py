"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from sojourn.serve.answers import Answer, Piece, read_answers, whole_answers
from sojourn.serve.deployment import Deployment
from sojourn.serve.errors import bad_request
from sojourn.serve.formats import ToolUse, format_grammar, tool_use
from sojourn.serve.gateway import Gateway, Record
from sojourn.serve.generation import Plan, make_plan
from sojourn.serve.schemas import ChatRequest, NamedTool
from sojourn.serve.served_model import ServedModel, to_messages
from sojourn.serve.streaming import DONE, INDEX, TEXT, EventStream, TextEvents, Write, event
from sojourn.serve.tools import Call


@dataclass(frozen=True)
class _Job:
    body: ChatRequest
    id: str
    created: int
    deployment: Deployment
    model: ServedModel
    tools: ToolUse
    plan: Plan

    def envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.body.model,
            "system_fingerprint": self.model.id,
        }  # fmt: skip

    def logprobs(self, tokens: Any) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": self.model.texts.chat_logprobs(tokens, self.body.top_logprobs or 0), "refusal": None}


async def chat_completions(gateway: Gateway, record: Record, body: ChatRequest) -> Response:
    job = await _prepare(gateway, record, body)
    if body.stream:
        return EventStream(lambda write: _stream(gateway, record, job, write))
    async with gateway.generating(record, job.deployment, job.plan) as generation:
        answers = await whole_answers(generation, job.plan.n, job.tools)
    record.finish_reason = answers[0].finish_reason
    choices = [_choice(job, index, answer) for index, answer in enumerate(answers)]
    return JSONResponse({**job.envelope("chat.completion"), "choices": choices, "usage": generation.usage.body})


async def _prepare(gateway: Gateway, record: Record, body: ChatRequest) -> _Job:
    deployment, adapter = gateway.find(body.model)
    model = deployment.ready_model()
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_request("give either max_tokens or max_completion_tokens", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    grammar = format_grammar(body.response_format, "response_format")
    await gateway.check_grammar(grammar, "response_format")
    tools = tool_use(
        model,
        [tool.function.model_dump() for tool in body.tools or ()],
        body.tool_choice if isinstance(body.tool_choice, str) else None,
        body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None,
        body.parallel_tool_calls is not False,
        grammar is not None,
    )
    await gateway.check_grammar(tools.grammar, "tools")
    messages = to_messages(body.messages)
    if gateway.settings.log_prompts:
        record.prompt = [{"role": one.role, "content": one.content} for one in messages]
    prompt = await model.encode_chat(messages, tools.listed)
    plan = make_plan(
        model, body, f"chatcmpl-{record.id}", [prompt], n=body.n or 1,
        max_tokens=body.max_completion_tokens or body.max_tokens, prompt_param="messages",
        max_tokens_param="max_completion_tokens" if body.max_completion_tokens else "max_tokens",
        adapter=adapter, logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar or tools.grammar, keep_markers=tools.form is not None,
    )  # fmt: skip
    return _Job(body, f"chatcmpl-{record.id}", int(time.time()), deployment, model, tools, plan)


def _choice(job: _Job, index: int, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message |= {"content": answer.text or None, "tool_calls": [_call(call) for call in answer.calls]}
    return {
        "index": index, "message": message, "logprobs": job.logprobs(answer.tokens),
        "finish_reason": answer.finish_reason,
    }  # fmt: skip


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def _stream(gateway: Gateway, record: Record, job: _Job, write: Write) -> None:
    envelope = job.envelope("chat.completion.chunk")
    with_usage = bool(job.body.stream_options and job.body.stream_options.include_usage)
    if with_usage:
        envelope["usage"] = None
    async with gateway.generating(record, job.deployment, job.plan) as generation:
        started = False  # with the first token: an engine that fails before it has a status of its own
        choice = {"index": INDEX, "delta": {"content": TEXT}, "logprobs": None, "finish_reason": None}
        text_event = TextEvents(envelope, choice)
        async with aclosing(read_answers(generation, job.plan.n, job.tools)) as pieces:
            async for piece in pieces:
                if not started:
                    started = True
                    for index in range(job.plan.n):
                        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                        await write(event({**envelope, "choices": [{**first, "logprobs": None}]}))
                if piece.text and not (piece.calls or piece.finish_reason or job.body.logprobs):
                    await write(text_event(piece.index, piece.text))
                    continue
                record.finish_reason = piece.finish_reason or record.finish_reason
                if piece.text or piece.calls or piece.tokens or piece.finish_reason:
                    await write(event({**envelope, "choices": [_chunk(job, piece)]}))
        if with_usage:
            await write(event({**envelope, "choices": [], "usage": generation.usage.body}))
    await write(DONE)


def _chunk(job: _Job, piece: Piece) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
    if piece.calls:
        delta["tool_calls"] = [{"index": piece.first_call + at, **_call(call)} for at, call in enumerate(piece.calls)]
    return {
        "index": piece.index, "delta": delta, "logprobs": job.logprobs(piece.tokens) if piece.tokens else None,
        "finish_reason": piece.finish_reason,
    }  # fmt: skip
