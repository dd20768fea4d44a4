"""Prompts to token ids, exactly as `prepare` makes them for training: chats in the model's template, texts after its
beginning-of-text token. The text of a special token inside a message stays text: a user who writes <|im_end|> does not
end a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sojourn.data.sources.document import Message
from sojourn.data.sources.turns import read_turns
from sojourn.data.sources.values import BadRecord
from sojourn.data.tokenize.chat_template import Span, Template
from sojourn.data.tokenize.render_chat import render_chat
from sojourn.data.tokenize.span_tokenizer import SpannedText, SpanTokenizer
from sojourn.errors import UserError

Tools = Sequence[dict[str, Any]]


class PromptEncoder:
    """For a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.is_chat = bool(tokenizer.chat_template)
        self._template: Template | None = None
        if self._backend is None:
            return
        added = {one.content: one.special for one in self._backend.get_added_tokens_decoder().values()}
        if self.is_chat:
            names = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
            self._template = Template(tokenizer.get_chat_template(), names, added)
        self._spans = SpanTokenizer(self._backend, added, self._template)

    def prompt(self, text: str, raw: bool = False) -> list[int]:
        """A user's message; the text itself if `raw`, or if the model has no chat template."""
        return self.text(text) if raw or not self.is_chat else self.chat([Message("user", text)])

    def text(self, text: str) -> list[int]:
        """A text to continue. Special tokens in it are special."""
        if self._backend is None:
            return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]
        ids = [int(i) for i in self._backend.encode(text, add_special_tokens=False).ids]
        begin = self._spans.bos.tolist()
        return ids if ids[: len(begin)] == begin else [*begin, *ids]

    def continuation(self, text: str) -> list[int]:
        """What the assistant says after a prompt. Special tokens in it stay text."""
        if self._backend is None:
            return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]
        safe = self._escape(text)
        return [int(i) for i in self._spans([SpannedText(safe, [(0, len(safe))])])[0]]

    def chat(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Up to where the assistant's next turn begins. Raises BadRecord where the template rejects it."""
        if self._template is None:
            given = [{"role": m.role, "content": m.content} for m in messages]
            rendered = render_chat(self._tokenizer, given)
            return [int(i) for i in self._tokenizer(rendered, add_special_tokens=False)["input_ids"]]
        safe = [replace(m, content=self._escape(m.content), reasoning=self._escape(m.reasoning)) for m in messages]
        text = self._template.text(safe, tools, prompt=True)
        return [int(i) for i in self._spans([SpannedText(text, self._earlier_answers(text, safe, tools))])[0]]

    def _escape(self, text: str) -> str:
        return self._spans.escape(text) if self._spans.has_special(text) else text

    def _earlier_answers(self, text: str, messages: Sequence[Message], tools: Tools) -> list[Span]:
        """Spans of the assistant's earlier turns, which are tokenized as in training: apart from the text around."""
        assert self._template is not None  # noqa: S101
        last = max((at for at, m in enumerate(messages) if m.role == "assistant"), default=None)
        if last is None:
            return []
        try:
            rendered, spans = self._template.spans(messages[: last + 1], tools)
        except (BadRecord, UserError):  # a template that cannot be trained on
            return []
        return spans if spans and text.startswith(rendered[: spans[-1][1]]) else []


def read_messages(turns: Any, key: str = "messages") -> list[Message]:
    """Messages as data files have them. Raises BadRecord."""
    messages = read_turns(turns, key)
    if messages[-1].role == "assistant":
        raise BadRecord(f"{key}: the last message is the assistant's; there is nothing to answer")
    return messages
