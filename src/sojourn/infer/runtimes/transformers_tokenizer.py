"""The tokenizer's side of a runtime, from a Hugging Face folder: token ids, chat template, stop tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sojourn.data.tokenize.template_sandbox import SPAN_END, SPAN_START, compile_template
from sojourn.errors import UserError
from sojourn.infer.runtimes.base import Messages, Runtime, Tools
from sojourn.model.quiet import quiet_transformers


class TokenizerRuntime(Runtime):
    """For runtimes that read `tokenizer.json` and the chat template as transformers does."""

    def __init__(self, name: str, tokenizer: Any, stop_ids: set[int]) -> None:
        self.name, self.tokenizer, self._stop_ids = name, tokenizer, stop_ids

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def render(self, messages: Messages, tools: Tools | None = None, add_generation_prompt: bool = True) -> str | None:
        """transformers' own rendering. The limited sandbox renders first: a template may loop. Where the template asks
        for today's date, the sandbox's rendering counts, since its date is fixed."""
        if not self.tokenizer.chat_template:
            return None
        source = self.tokenizer.get_chat_template(None, tools)
        try:
            limited = render_template(source, self.tokenizer.special_tokens_map, messages, tools, add_generation_prompt)
            if "strftime_now" in source:
                return limited
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except Exception as error:  # a template may raise anything
            raise ValueError(" ".join(str(error).split())[:200] or type(error).__name__) from None

    def stops_at(self, token: int) -> bool:
        return token in self._stop_ids


def render_template(
    source: str, special_names: dict[str, Any], messages: Messages, tools: Tools | None, add_generation_prompt: bool
) -> str:
    """A chat template within limits of time and size, as transformers renders it. Raises whatever the template does."""
    text = compile_template(source)(
        messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **special_names
    )
    return text.translate({ord(SPAN_START): None, ord(SPAN_END): None})


def open_tokenizer(folder: Path, **given: Any) -> Any:
    """transformers' tokenizer; one-line errors."""
    quiet_transformers()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), **given)
    except Exception as error:  # tokenizers raises bare exceptions for damaged files
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{folder}: its tokenizer cannot be read: {reason}") from None


def as_ids(value: Any) -> set[int]:
    return {one for one in (value if isinstance(value, list) else [value]) if type(one) is int}
