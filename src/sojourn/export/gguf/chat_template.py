"""A tokenizer's chat templates as other programs render them, and chats rendered by them as probes."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from sojourn.data.tokenize.render_chat import render_template

_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is 2 + 3?"}],
    [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi, how can I help?"},
        {"role": "user", "content": "你好，再见。\nTwo  lines, 1,234.5"},
    ],
)


def templates_of(tokenizer: Any) -> dict[str, str]:
    """By name; the usual one is `default`."""
    found = tokenizer.chat_template
    named = found if isinstance(found, dict) else {"default": found} if found else {}
    return {name: without_generation_blocks(text) for name, text in named.items()}


def without_generation_blocks(template: str) -> str:
    """The same text from programs that do not know the tag, which only marks what a model is trained on."""
    return _GENERATION.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", template)


def probe_chats(tokenizer: Any) -> list[str]:
    """Those that the default template accepts."""
    template = templates_of(tokenizer).get("default")
    rendered: list[str] = []
    for chat in _CHATS if template else ():
        with contextlib.suppress(Exception):  # a template may raise anything
            rendered.append(render_template(str(template), tokenizer.special_tokens_map, chat, None, True))
    return rendered
