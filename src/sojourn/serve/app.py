"""The FastAPI application: routes, the OpenAPI document, the chat page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.middleware.cors import CORSMiddleware

from sojourn import __version__
from sojourn.serve import admin, proxy
from sojourn.serve.api_chat import chat_completions
from sojourn.serve.api_completions import completions
from sojourn.serve.api_responses import responses
from sojourn.serve.chat_page import add_chat_page
from sojourn.serve.deployment import Deployment
from sojourn.serve.errors import ApiError, add_handlers, bad_request
from sojourn.serve.gateway import Gateway, Record
from sojourn.serve.middleware import App, Entrance
from sojourn.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    Feedback,
    LoadAdapter,
    Reload,
    ResponsesRequest,
    UnloadAdapter,
)

AnyRequest = ChatRequest | CompletionRequest | ResponsesRequest

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"},
                "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
            },
        }
    },
}  # fmt: skip
_STATUSES = {
    400: "The request is wrong; param says where.", 401: "An API key is needed.", 403: "Not allowed.",
    404: "No such model or route.", 409: "Something else is being loaded.", 413: "The body is too large.",
    415: "The body is not application/json.",
    429: "Busy, or a limit of the key is reached; see Retry-After.", 503: "Not ready.", 504: "Not answered in time.",
}  # fmt: skip
_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
    for status, text in _STATUSES.items()
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its events.", "content": {"application/json": {}, "text/event-stream": {}}}
}


class _ParsedRequest(Request):
    parsed: Any = None

    async def json(self) -> Any:
        return self.parsed


class _StrictRoute(APIRoute):
    """Bodies are read here: of one that is no JSON, FastAPI would only say that there was an error."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, has_body = super().get_route_handler(), self.body_field is not None

        async def strict(request: Request) -> Response:
            found = _ParsedRequest(request.scope, request.receive)
            if has_body:
                found.parsed = _parse(found.headers.get("content-type", ""), await found.body())
            return await handle(found)

        return strict


def _parse(content_type: str, body: bytes) -> Any:
    """JSON as the standard has it: no NaN, no lone surrogates, in UTF-8."""
    if (
        content_type.partition(";")[0].strip().lower() != "application/json"
    ):  # a web form of another site can send others
        raise ApiError(415, "send the body as content-type: application/json", code="unsupported_media_type")
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None


def make_app(gateway: Gateway) -> App:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(gateway.start())
        try:
            yield
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await gateway.close()

    app = FastAPI(
        title="sojourn serve", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        description="An OpenAI-compatible API.",
    )  # fmt: skip
    app.router.route_class = _StrictRoute
    add_handlers(app)
    _add_generation(app, gateway)
    _add_operations(app, gateway)
    _add_feedback(app, gateway)
    add_chat_page(app)
    _remove_422(app)
    entrance: App = Entrance(app, gateway)
    if not gateway.settings.origins:
        return entrance
    return CORSMiddleware(
        entrance, allow_origins=list(gateway.settings.origins), allow_methods=["GET", "POST"], allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )  # fmt: skip


def _remove_422(app: FastAPI) -> None:
    """From the OpenAPI document, where FastAPI puts it: a wrong body is a 400 here, as in OpenAI's API."""
    document = app.openapi

    def without_422() -> dict[str, Any]:
        described = document()
        for operations in described["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return described

    app.openapi = without_422  # type: ignore[method-assign] # as FastAPI's documentation advises


def record_of(request: Request) -> Record:
    found: Record = request.scope["state"]["record"]
    return found


def _add_generation(app: FastAPI, gateway: Gateway) -> None:
    answers: dict[int | str, dict[str, Any]] = {**_STREAM, **_RESPONSES}

    async def answer(path: str, ours: Any, body: AnyRequest, request: Request) -> Response:
        """Ours, or that of an engine with an API of its own."""
        record = record_of(request)
        record.model, record.user = body.model, body.user
        deployment, _ = gateway.find(body.model)
        if deployment.is_proxy:
            return await proxy.forward(gateway, deployment, record, path, body)
        found: Response = await ours(gateway, record, body)
        return found

    @app.post("/v1/chat/completions", responses=answers)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        return await answer("/chat/completions", chat_completions, body, request)

    @app.post("/v1/completions", responses=answers)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return await answer("/completions", completions, body, request)

    @app.post("/v1/responses", responses=answers)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        return await answer("/responses", responses, body, request)

    @app.get("/v1/models", responses=_RESPONSES)
    async def list_models() -> dict[str, Any]:
        gateway.lifecycle.check_ready()
        listed = [(one, name) for one in gateway.deployments for name in one.names]
        return {"object": "list", "data": [_model(gateway, *one) for one in listed]}

    @app.get("/v1/models/{name:path}", responses=_RESPONSES)
    async def retrieve_model(name: str) -> dict[str, Any]:
        return _model(gateway, gateway.find(name)[0], name)


def _model(gateway: Gateway, deployment: Deployment, name: str) -> dict[str, Any]:
    info = deployment.engine.info
    return {
        "id": name, "object": "model", "created": int(gateway.lifecycle.started), "owned_by": "sojourn",
        "root": info.model, "parent": deployment.name if name != deployment.name else None,
        "max_model_len": info.context_length,
    }  # fmt: skip


def _add_operations(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health", responses={503: _RESPONSES[503]})
    async def health() -> Response:
        proxies = [one.proxy for one in gateway.deployments if one.is_proxy] if gateway.is_ready else []
        healthy = gateway.is_ready and all([await one.health() for one in proxies])
        state = gateway.lifecycle.state
        status = state if healthy or state != "ready" else "starting"
        body = {"status": status, "uptime_seconds": round(time.time() - gateway.lifecycle.started, 1)}
        return JSONResponse(body, 200 if healthy else 503)

    @app.get("/metrics", response_class=PlainTextResponse, responses=_RESPONSES)
    async def metrics() -> Response:
        started = [one for one in gateway.deployments if one.is_ready]
        stats = {one.name: await one.engine.stats() for one in started}
        text = gateway.metrics.text(stats, gateway.taken, gateway.is_ready)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/v1/load_lora_adapter", responses=_RESPONSES)
    async def load_lora_adapter(body: LoadAdapter, request: Request) -> dict[str, Any]:
        return await admin.load_adapter(gateway, record_of(request), body)

    @app.post("/v1/unload_lora_adapter", responses=_RESPONSES)
    async def unload_lora_adapter(body: UnloadAdapter, request: Request) -> dict[str, Any]:
        return await admin.unload_adapter(gateway, record_of(request), body)

    @app.post("/admin/reload", responses=_RESPONSES)
    async def reload_model(body: Reload, request: Request) -> dict[str, Any]:
        return await admin.reload(gateway, record_of(request), body)

    for path in ("/v1/embeddings", "/v1/audio/speech", "/v1/images/generations", "/v1/moderations"):
        app.add_api_route(path, _not_here, methods=["POST"], include_in_schema=False)


def _add_feedback(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/feedback", responses=_RESPONSES)
    async def feedback_state() -> dict[str, bool]:
        return {"enabled": gateway.feedback is not None}

    @app.post("/v1/feedback", responses=_RESPONSES)
    async def save_feedback(body: Feedback, request: Request) -> dict[str, bool]:
        if gateway.feedback is None:
            raise ApiError(404, "this server keeps no feedback; start it with --feedback FOLDER", code="feedback_off")
        await asyncio.to_thread(gateway.feedback.save, body, record_of(request).key.name)
        return {"saved": True}


async def _not_here(request: Request) -> Response:
    raise ApiError(404, f"{request.url.path}: this server generates text only", code="unsupported_route")
