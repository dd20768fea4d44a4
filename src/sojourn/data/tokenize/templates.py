"""Chat templates for tokenizers without one: ChatML, Llama 3's, and a plain one.

All three are `chat.jinja` with other delimiters, so every program that opens the tokenizer renders the same text. Tools
are written as Qwen and Hermes do: signatures in the system message, calls and responses between tags.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from sojourn.config.messages import did_you_mean
from sojourn.data.sources.files import user_path
from sojourn.errors import UserError
from sojourn.storage.files import read_json_object

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Delimiters:
    """What the template writes around a turn; `tokens` must be in the vocabulary."""

    tokens: tuple[str, ...]
    open: str
    mid: str
    end: str | None
    gap: str
    begin: str = "''"


NAMED = {
    "chatml": Delimiters(("<|im_start|>", "<|im_end|>"), "<|im_start|>", "\n", "<|im_end|>", "\n"),
    "llama3": Delimiters(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "", "bos_token or ''",
    ),
    "plain": Delimiters((), "### ", ":\n", None, "\n\n"),
}  # fmt: skip


@cache
def named_template(name: str, end_of_text: str) -> str:
    """The Jinja source of a named template; `plain` ends a turn with the tokenizer's end-of-text token."""
    delimiters = NAMED[name]
    text = resources.files("sojourn.data.tokenize").joinpath("chat.jinja").read_text(encoding="utf-8")
    values = {
        "OPEN": delimiters.open,
        "MID": delimiters.mid,
        "END": delimiters.end or end_of_text,
        "GAP": delimiters.gap,
    }
    for variable, value in values.items():
        quoted = json.dumps(value)
        text = text.replace(f"{variable} ", f"{quoted} ").replace(f" {variable}", f" {quoted}")
    return text.replace("BEGIN", delimiters.begin).rstrip("\n")


def has_chat_template(folder: Path) -> bool:
    """Of a saved tokenizer."""
    settings = read_json_object(folder / "tokenizer_config.json")
    return (folder / "chat_template.jinja").is_file() or bool(settings.get("chat_template"))


def read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "not UTF-8 text; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(f"data.template: {path}: {why}") from None


def read_template_file(choice: str) -> str:
    path = user_path(choice, "data.template")
    if path.suffix not in (".jinja", ".j2") or not path.is_file():
        hint, names = did_you_mean(choice, ("auto", *NAMED)), ", ".join(NAMED)
        raise UserError(f"data.template: “{choice}”: no such template{hint}; allowed: auto, {names}, or a .jinja file")
    return read_template(path)
