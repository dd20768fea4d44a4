"""Chats rendered by the template inside a GGUF file."""

from __future__ import annotations

from typing import Any

from sojourn.data.tokenize.render_chat import render_template
from sojourn.infer.gguf.tokenizer import special_names
from sojourn.infer.runtimes.base import Messages, Tools


def render_chat(metadata: dict[str, Any], messages: Messages, tools: Tools | None, ask: bool) -> str | None:
    """`ask`: for the assistant's next turn. None where the file has no template; `ValueError` where it rejects the
    chat."""
    template = metadata.get("tokenizer.chat_template")
    if not template:
        return None
    try:
        return render_template(str(template), special_names(metadata), messages, tools, ask)
    except Exception as error:  # a template may raise anything
        raise ValueError(" ".join(str(error).split())[:200] or type(error).__name__) from None
