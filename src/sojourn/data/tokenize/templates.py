"""The chat templates for tokenizers that bring none: ChatML, Llama-3's and a plain one.

All three are `chat.jinja` with other marks, so that every program that opens the tokenizer renders the same text.
Tools are written the way that Qwen and Hermes do: signatures in the system's turn, calls and answers between tags.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Marks:
    """What stands around a turn; `tokens` must be in the vocabulary."""

    tokens: tuple[str, ...]
    open: str
    mid: str
    end: str | None
    gap: str
    begin: str = "''"


NAMED = {
    "chatml": Marks(("<|im_start|>", "<|im_end|>"), "<|im_start|>", "\n", "<|im_end|>", "\n"),
    "llama3": Marks(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "", "bos_token or ''",
    ),
    "plain": Marks((), "### ", ":\n", None, "\n\n"),
}  # fmt: skip


@cache
def named_template(name: str, end_of_text: str) -> str:
    """The Jinja of a named template; `plain` ends a turn with the tokenizer's own end of a text."""
    marks = NAMED[name]
    text = resources.files("sojourn.data.tokenize").joinpath("chat.jinja").read_text(encoding="utf-8")
    words = {"OPEN": marks.open, "MID": marks.mid, "END": marks.end or end_of_text, "GAP": marks.gap}
    for word, meaning in words.items():
        text = text.replace(f"{word} ", f"{json.dumps(meaning)} ").replace(f" {word}", f" {json.dumps(meaning)}")
    return text.replace("BEGIN", marks.begin).rstrip("\n")
