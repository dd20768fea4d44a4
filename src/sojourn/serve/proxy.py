"""Forwards requests to an engine that speaks OpenAI's API itself, after authentication, limits and validation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.responses import Response

from sojourn.errors import UserError
from sojourn.serve.deployment import Deployment
from sojourn.serve.errors import ApiError, bad_request
from sojourn.serve.gateway import Gateway, Record
from sojourn.serve.schemas import Request
from sojourn.serve.streaming import EventStream, Write

_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class _Job:
    """`path`: after /v1. `body`: for the engine. `sequences`: that it asks for."""

    gateway: Gateway
    deployment: Deployment
    record: Record
    path: str
    body: dict[str, Any]
    sequences: int


async def forward(gateway: Gateway, deployment: Deployment, record: Record, path: str, given: Request) -> Response:
    deployment.check_ready()
    body = given.model_dump(exclude_none=True, by_alias=True)
    sequences = max(1, body.get("n") or 1) * _prompts(body.get("prompt"))
    try:
        body = deployment.proxy.translate(path, body)
    except UserError as error:
        raise bad_request(str(error), code="unsupported_parameter") from None
    job = _Job(gateway, deployment, record, path, body, sequences)
    if given.stream:
        asked = bool((body.get("stream_options") or {}).get("include_usage"))
        if path != "/responses":  # the daily limit needs it, whatever the client wants
            body["stream_options"] = {"include_usage": True}
        return EventStream(lambda write: _stream(job, asked, write))
    async with AsyncExitStack() as stack:
        answer = await _open(job, stack)
        async with _watching(job):
            data = await answer.aread()
        if answer.status_code != 200:
            raise _error_of(answer.status_code, data)
        _count(gateway, record, _usage(_read(data)))
        return Response(data, media_type=answer.headers.get("content-type", "application/json"))


async def _open(job: _Job, stack: AsyncExitStack) -> httpx.Response:
    """The engine's answer. Leaving the stack closes the connection, which ends the request there."""
    engine = job.deployment.proxy
    stack.enter_context(job.gateway.admission.admit(job.record.key, job.deployment.queue, job.sequences))
    stack.enter_context(job.gateway.lifecycle.time_limit())
    timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    client = await stack.enter_async_context(httpx.AsyncClient(transport=engine.transport(), timeout=timeout))
    async with _watching(job):
        request = client.build_request("POST", engine.base_url + job.path, json=job.body)
        answer = await client.send(request, stream=True)
    stack.push_async_callback(answer.aclose)
    return answer


@asynccontextmanager
async def _watching(job: _Job) -> AsyncIterator[None]:
    """A connection that breaks is a 503; where the engine's process is gone, it is started again."""
    try:
        yield
    except httpx.HTTPError as error:
        reason = await asyncio.to_thread(job.deployment.engine.why_dead)
        if reason:
            job.gateway.engine_died(job.deployment, reason)
        message = f"the engine ended the answer early: {reason or error or type(error).__name__}"
        raise ApiError(503, message, code="engine_died", retry_after=10) from None


async def _stream(job: _Job, asked: bool, write: Write) -> None:
    async with AsyncExitStack() as stack:
        answer = await _open(job, stack)
        if answer.status_code != 200:
            async with _watching(job):
                raise _error_of(answer.status_code, await answer.aread())
        async with _watching(job):
            async for line in answer.aiter_lines():
                event = _read(line.removeprefix("data: ")) if '"usage"' in line else {}
                if usage := _usage(event):
                    _count(job.gateway, job.record, usage)
                    if not asked and event.get("choices") == []:
                        continue
                await write(line.encode() + b"\n")


def _prompts(prompt: Any) -> int:
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def _read(data: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    response = body.get("response")
    found = body.get("usage") or (response.get("usage") if isinstance(response, dict) else None)
    return found if isinstance(found, dict) else {}


def _count(gateway: Gateway, record: Record, usage: dict[str, Any]) -> None:
    record.prompt_tokens = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    record.completion_tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))
    gateway.admission.count_tokens(record.key, record.prompt_tokens + record.completion_tokens)
    gateway.metrics.prompt_tokens += record.prompt_tokens
    gateway.metrics.completion_tokens += record.completion_tokens


def _error_of(status: int, data: bytes) -> ApiError:
    error = _read(data).get("error")
    if not isinstance(error, dict) or "message" not in error:
        return ApiError(status, data.decode("utf-8", "replace")[:500])
    code = error.get("code")  # vLLM and llama.cpp have the status there
    return ApiError(
        status, str(error["message"]), param=error.get("param"), code=code if isinstance(code, str) else None
    )
