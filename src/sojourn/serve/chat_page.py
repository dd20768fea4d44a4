"""The chat page: the files of `page/`."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI

from sojourn.serve.errors import ApiError
from sojourn.web.static import add_page

FOLDER = Path(__file__).with_name("page")


def add_chat_page(app: FastAPI) -> None:
    add_page(app, FOLDER, lambda name: ApiError(404, f"no such file of the chat page: {name[:100]!r}"))
