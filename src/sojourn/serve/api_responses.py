"""POST /v1/responses: text and function calls. Nothing is stored: a conversation is sent whole each time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from sojourn.serve.answers import Answer, read_answers, whole_answers
from sojourn.serve.deployment import Deployment
from sojourn.serve.formats import ToolUse, format_grammar, tool_use
from sojourn.serve.gateway import Gateway, Record
from sojourn.serve.generation import Generation, Plan, Usage, make_plan
from sojourn.serve.schemas import (
    AssistantMessage,
    CalledFunction,
    ChatMessage,
    FunctionCallItem,
    FunctionOutputItem,
    InputMessage,
    ResponsesNamedTool,
    ResponsesRequest,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from sojourn.serve.served_model import ServedModel, to_messages
from sojourn.serve.streaming import EventStream, Write, event
from sojourn.serve.tools import Call

_WHY_INCOMPLETE = {"length": "max_output_tokens"}


@dataclass(frozen=True)
class _Job:
    body: ResponsesRequest
    id: str
    created: int
    deployment: Deployment
    model: ServedModel
    tools: ToolUse
    plan: Plan

    def response(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None, reason: str = ""
    ) -> dict[str, Any]:
        body = self.body
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text and body.text.format else None
        choice: Any = body.tool_choice or "auto"
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": None,
            "incomplete_details": {"reason": reason} if reason else None, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "model": body.model, "output": output,
            "parallel_tool_calls": self.tools.several, "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None}, "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": text or {"format": {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p, "truncation": "disabled",
            "usage": None if usage is None else _usage(usage), "user": body.user, "metadata": body.metadata or {},
        }  # fmt: skip

    def logprobs(self, tokens: Any) -> list[dict[str, Any]]:
        return [] if self.body.top_logprobs is None else self.model.texts.chat_logprobs(tokens, self.body.top_logprobs)

    def message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.id[5:]}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def text_part(self, text: str, tokens: Any) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs(tokens)}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens, "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }  # fmt: skip


async def responses(gateway: Gateway, record: Record, body: ResponsesRequest) -> Response:
    job = await _prepare(gateway, record, body)
    if body.stream:
        return EventStream(lambda write: _stream(gateway, record, job, write), "error")
    async with gateway.generating(record, job.deployment, job.plan) as generation:
        answer = (await whole_answers(generation, 1, job.tools))[0]
    record.finish_reason = answer.finish_reason
    return JSONResponse(_finished(job, answer, generation))


async def _prepare(gateway: Gateway, record: Record, body: ResponsesRequest) -> _Job:
    deployment, adapter = gateway.find(body.model)
    model = deployment.ready_model()
    grammar = format_grammar(body.text.format if body.text else None, "text.format")
    await gateway.check_grammar(grammar, "text.format")
    tools = tool_use(
        model,
        [tool.model_dump() for tool in body.tools or ()],
        body.tool_choice if isinstance(body.tool_choice, str) else None,
        body.tool_choice.name if isinstance(body.tool_choice, ResponsesNamedTool) else None,
        body.parallel_tool_calls is not False,
        grammar is not None,
    )
    await gateway.check_grammar(tools.grammar, "tools")
    messages = to_messages(_as_chat(body))
    if gateway.settings.log_prompts:
        record.prompt = [{"role": one.role, "content": one.content} for one in messages]
    prompt = await model.encode_chat(messages, tools.listed)
    plan = make_plan(
        model, body, f"resp_{record.id}", [prompt], n=1, max_tokens=body.max_output_tokens, adapter=adapter,
        prompt_param="input", max_tokens_param="max_output_tokens", logprobs=body.top_logprobs,
        grammar=grammar or tools.grammar, keep_markers=tools.form is not None,
    )  # fmt: skip
    return _Job(body, f"resp_{record.id}", int(time.time()), deployment, model, tools, plan)


def _as_chat(body: ResponsesRequest) -> list[ChatMessage]:
    """The input as messages of a chat; calls that follow each other are one message."""
    found: list[ChatMessage] = []
    if body.instructions:
        found.append(SystemMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*found, UserMessage(role="user", content=body.input)]
    for item in body.input:
        if isinstance(item, FunctionCallItem):
            call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
            last = found[-1] if found else None
            if isinstance(last, AssistantMessage):
                last.tool_calls = [*(last.tool_calls or ()), call]
            else:
                found.append(AssistantMessage(role="assistant", tool_calls=[call]))
        elif isinstance(item, FunctionOutputItem):
            found.append(ToolMessage(role="tool", content=item.output, tool_call_id=item.call_id))
        else:
            found.append(_as_message(item))
    return found


def _as_message(item: InputMessage) -> ChatMessage:
    if item.role == "assistant":
        return AssistantMessage(role="assistant", content=item.content)
    if item.role == "user":
        return UserMessage(role="user", content=item.content)
    return SystemMessage(role="system", content=item.content)


def _call_item(call: Call, status: str = "completed") -> dict[str, Any]:
    arguments = call.arguments if status == "completed" else ""
    return {
        "id": "fc_" + call.id[5:], "type": "function_call", "status": status, "call_id": call.id, "name": call.name,
        "arguments": arguments,
    }  # fmt: skip


def _finished(job: _Job, answer: Answer, generation: Generation) -> dict[str, Any]:
    reason = _WHY_INCOMPLETE.get(answer.finish_reason, "")
    status = "incomplete" if reason else "completed"
    return job.response(status, _output(job, answer, status), generation.usage, reason)


def _output(job: _Job, answer: Answer, status: str) -> list[dict[str, Any]]:
    calls = [_call_item(call) for call in answer.calls]
    if calls and not answer.text.strip():
        return calls
    return [job.message(status, [job.text_part(answer.text, answer.tokens)]), *calls]


class _Events:
    """Numbers the events, and opens and closes output items around what comes."""

    def __init__(self, job: _Job, write: Write) -> None:
        self._job, self._write, self._number, self._items = job, write, 0, 0
        self._in_message = False

    async def send(self, kind: str, **fields: Any) -> None:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        await self._write(event(body, kind))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._job.message("", [])["id"], "output_index": self._items, "content_index": 0}

    async def text(self, text: str, tokens: Sequence[Any]) -> None:
        if not self._in_message:
            self._in_message = True
            item = self._job.message("in_progress", [])
            await self.send("response.output_item.added", output_index=self._items, item=item)
            await self.send("response.content_part.added", **self._place, part=self._job.text_part("", ()))
        logprobs = self._job.logprobs(tokens)
        await self.send("response.output_text.delta", **self._place, delta=text, logprobs=logprobs)

    async def end_text(self, answer: Answer, status: str) -> None:
        if not self._in_message:
            return
        part = self._job.text_part(answer.text, answer.tokens)
        await self.send("response.output_text.done", **self._place, text=answer.text, logprobs=part["logprobs"])
        await self.send("response.content_part.done", **self._place, part=part)
        item = self._job.message(status, [part])
        await self.send("response.output_item.done", output_index=self._items, item=item)
        self._in_message = False
        self._items += 1

    async def call(self, call: Call) -> None:
        item, index = _call_item(call), self._items
        await self.send("response.output_item.added", output_index=index, item=_call_item(call, "in_progress"))
        place = {"item_id": item["id"], "output_index": index}
        await self.send("response.function_call_arguments.delta", **place, delta=call.arguments)
        await self.send("response.function_call_arguments.done", **place, arguments=call.arguments, name=call.name)
        await self.send("response.output_item.done", output_index=index, item=item)
        self._items += 1


async def _stream(gateway: Gateway, record: Record, job: _Job, write: Write) -> None:
    events, answer = _Events(job, write), Answer()
    async with gateway.generating(record, job.deployment, job.plan) as generation:
        await events.send("response.created", response=job.response("in_progress", [], None))
        await events.send("response.in_progress", response=job.response("in_progress", [], None))
        async with aclosing(read_answers(generation, 1, job.tools)) as pieces:
            async for piece in pieces:
                answer.add(piece)
                if piece.text.strip() or (piece.text and answer.text.strip()):
                    await events.text(piece.text, piece.tokens)
        record.finish_reason = answer.finish_reason
        if not answer.calls and not answer.text.strip():
            await events.text(answer.text, answer.tokens)
        body = _finished(job, answer, generation)
        await events.end_text(answer, body["status"])
        for call in answer.calls:
            await events.call(call)
        await events.send(f"response.{body['status']}", response=body)
