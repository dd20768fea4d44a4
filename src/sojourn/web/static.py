"""A page of ours over HTTP: its own files and the shared ones of `assets/`, as they are, at `/` and `/page/…`.

Nothing is loaded from elsewhere and no script or style is inline: the Content-Security-Policy forbids both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

ASSETS = Path(__file__).with_name("assets")
_NO_MODULE = "reload.js"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_headers(images: str = "'self'") -> dict[str, str]:
    """`images`: the sources of images, as in a Content-Security-Policy."""
    return {
        "content-security-policy": (
            f"default-src 'none'; script-src 'self'; style-src 'self'; img-src {images}; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
    }


def add_page(app: FastAPI, folder: Path, missing: Callable[[str], Exception], images: str = "'self'") -> None:
    """The files of `folder` and `assets/`; `missing` makes the error for a name that is in neither."""
    files = _files(ASSETS, folder)
    headers = page_headers(images)

    async def page_file(name: str) -> Response:
        if name not in files:
            raise missing(name)
        path = files[name]
        return Response(path.read_bytes(), headers=headers, media_type=_TYPES[path.suffix])

    async def index() -> Response:
        text = files["index.html"].read_text(encoding="utf-8").replace("</head>", f"{_preloads(files)}</head>", 1)
        return Response(text, headers=headers, media_type=_TYPES[".html"])

    app.add_api_route("/", index, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/page/{name}", page_file, methods=["GET", "HEAD"], include_in_schema=False)


def _preloads(files: dict[str, Path]) -> str:
    """All modules are asked for at once, not level by level as one imports another: over a tunnel that is seconds."""
    names = (name for name, path in files.items() if path.suffix == ".js" and name != _NO_MODULE)
    return "".join(f'  <link rel="modulepreload" href="/page/{name}">\n' for name in names)


def _files(*folders: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in (path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in _TYPES):
        if path.name in files:
            raise ValueError(f"two files of a page have the same name: {files[path.name]} and {path}")
        files[path.name] = path
    return files
