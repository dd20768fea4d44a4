"""Errors as OpenAI's API has them: a status code and {"error": {message, type, param, code}}."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.responses import JSONResponse

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

CLIENT_CLOSED = 499  # nginx's code for a client that went away; only logs and metrics see it

_UNSUPPORTED = frozenset(
    {
        "audio", "background", "best_of", "chat_template", "chat_template_kwargs", "context_management",
        "conversation", "function_call", "functions", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
        "include", "max_tool_calls", "min_tokens", "modalities", "moderation", "prediction", "previous_response_id",
        "prompt_cache_retention", "reasoning", "reasoning_effort", "service_tier", "store", "suffix", "truncation",
        "use_beam_search", "verbosity", "web_search_options",
    }
)  # fmt: skip


class ApiError(Exception):
    """What a client is answered instead of a result. `param`: the parameter of the request that is wrong."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after: float | None = None, headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, round(retry_after)))

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": _type_of(self.status), "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def model_not_found(name: str) -> ApiError:
    message = f"the model {name[:200]!r} does not exist; GET /v1/models lists those that do"
    return ApiError(404, message, param="model", code="model_not_found")


def from_validation(errors: list[Any]) -> ApiError:
    """The first of pydantic's errors, as a 400 that names the parameter."""
    error = errors[0]
    place = [part for part in error.get("loc", ()) if part != "body" and not _is_union_member(part)]
    param = _path(place)
    if error.get("type") == "extra_forbidden":
        name = str(place[-1])[:100] if place else ""
        if len(place) == 1 and name in _UNSUPPORTED:
            return bad_request(f"not supported here: {name!r}; leave it out", param, "unsupported_parameter")
        return bad_request(f"unknown parameter: {param!r}", param, "unknown_parameter")
    code = "missing_required_parameter" if error.get("type") == "missing" else "invalid_value"
    message = str(error.get("msg", "not valid")).removeprefix("Value error, ")[:400]
    return bad_request(f"{param}: {message}" if param else message, param, code)


def _is_union_member(part: Any) -> bool:
    """pydantic puts the type that it tried into the place: `list[str]`, `constrained-str`, a class's name."""
    return isinstance(part, str) and (not part.replace("_", "").isalnum() or part[:1].isupper() or part in _TYPE_NAMES)


_TYPE_NAMES = frozenset({"str", "int", "float", "bool", "dict", "list", "constrained", "string"})


def _path(place: list[Any]) -> str | None:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text[:200] or None


def add_handlers(app: FastAPI) -> None:
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(Exception)
    async def internal_error(_: Request, __: Exception) -> JSONResponse:
        """A bug of ours, which the entrance logs."""
        return ApiError(500, "an internal error; the server's log has it", code="internal_error").response()

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        return from_validation(list(error.errors())).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{request.method} {request.url.path[:200]}"
        messages = {404: f"no such route: {where}", 405: f"method not allowed: {where}"}
        found = ApiError(
            error.status_code, messages.get(error.status_code, str(error.detail)), headers=dict(error.headers or {})
        )
        return found.response()
