"""Forwards requests to an engine that speaks OpenAI's API itself, after authentication, limits and validation."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
from starlette.responses import Response

from sojourn.serve.engines.base import ProxyEngine
from sojourn.serve.errors import ApiError
from sojourn.serve.gateway import Gateway, Record, proxy_of
from sojourn.serve.schemas import Request
from sojourn.serve.streaming import EventStream, Write

_CONNECT_SECONDS = 10.0


async def forward(gateway: Gateway, record: Record, path: str, body: Request) -> Response:
    gateway.lifecycle.check_ready()
    record.model, record.user = body.model, body.user
    gateway.adapter_of(body.model)
    given = body.model_dump(exclude_none=True, by_alias=True)
    sequences = max(1, given.get("n") or 1) * _prompts(given.get("prompt"))
    if body.stream:
        asked = bool((given.get("stream_options") or {}).get("include_usage"))
        if path != "/responses":  # the daily limit needs it, whatever the client wants
            given["stream_options"] = {"include_usage": True}
        return EventStream(lambda write: _stream(gateway, record, path, given, sequences, asked, write))
    async with AsyncExitStack() as stack:
        answer = await _open(gateway, record, path, given, sequences, stack)
        data = await answer.aread()
        _count(gateway, record, _usage(data))
        kind = answer.headers.get("content-type", "application/json")
        return Response(data, answer.status_code, media_type=kind)


async def _open(
    gateway: Gateway, record: Record, path: str, given: dict[str, Any], sequences: int, stack: AsyncExitStack
) -> httpx.Response:
    """The engine's answer. Leaving the stack closes the connection, which ends the request there."""
    engine = proxy_of(gateway.engine)
    stack.enter_context(gateway.admission.admit(record.key, sequences))
    stack.enter_context(gateway.lifecycle.time_limit())
    client = await stack.enter_async_context(_client(engine))
    try:
        request = client.build_request("POST", engine.base_url + path, json=given)
        answer = await client.send(request, stream=True)
    except httpx.HTTPError as error:
        raise ApiError(503, f"the engine does not answer: {error}", code="engine_died", retry_after=10) from None
    stack.push_async_callback(answer.aclose)
    return answer


def _client(engine: ProxyEngine) -> httpx.AsyncClient:
    timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    return httpx.AsyncClient(transport=engine.transport(), timeout=timeout)


async def _stream(
    gateway: Gateway, record: Record, path: str, given: dict[str, Any], sequences: int, asked: bool, write: Write
) -> None:  # fmt: skip
    async with AsyncExitStack() as stack:
        answer = await _open(gateway, record, path, given, sequences, stack)
        if answer.status_code != 200:
            raise _error_of(answer.status_code, await answer.aread())
        try:
            async for line in answer.aiter_lines():
                usage = _usage(line.removeprefix("data: ").encode()) if '"usage"' in line else None
                if usage:
                    _count(gateway, record, usage)
                    if not asked and path != "/responses":
                        continue
                await write(line.encode() + b"\n")
        except httpx.HTTPError as error:
            raise ApiError(503, f"the engine ended the answer early: {error}", code="engine_died") from None


def _prompts(prompt: Any) -> int:
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def _usage(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
        found = body.get("usage") or (body.get("response") or {}).get("usage")
    except (ValueError, AttributeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _count(gateway: Gateway, record: Record, usage: dict[str, Any]) -> None:
    record.prompt_tokens = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    record.completion_tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))
    gateway.admission.count_tokens(record.key, record.prompt_tokens + record.completion_tokens)
    gateway.metrics.prompt_tokens += record.prompt_tokens
    gateway.metrics.completion_tokens += record.completion_tokens


def _error_of(status: int, data: bytes) -> ApiError:
    try:
        error = json.loads(data)["error"]
        return ApiError(status, str(error["message"]), param=error.get("param"), code=error.get("code"))
    except (ValueError, LookupError, TypeError):
        return ApiError(status, data.decode("utf-8", "replace")[:500])
