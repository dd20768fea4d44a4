"""The chat page: files of `page/` at `/` and `/page/…`, as they are. Nothing in them is loaded from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

from sojourn.serve.errors import ApiError

_FOLDER = Path(__file__).with_name("page")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    files = {path.name: path for path in _FOLDER.iterdir() if path.suffix in _TYPES}

    async def page_file(name: str = "index.html") -> Response:
        if name not in files:
            raise ApiError(404, f"no such file of the chat page: {name[:100]!r}")
        path = files[name]
        return Response(path.read_bytes(), headers=_HEADERS, media_type=_TYPES[path.suffix])

    async def index() -> Response:
        return await page_file()

    app.add_api_route("/", index, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/page/{name}", page_file, methods=["GET", "HEAD"], include_in_schema=False)
