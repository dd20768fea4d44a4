"""The tokenizer's side of a runtime, from a Hugging Face folder: token ids, chat template, stop tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sojourn.data.tokenize.render_chat import render_chat
from sojourn.data.tokenize.tokenizer_check import check_tokenizer
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
        """In the limited sandbox alone: a template may loop, and may tell two ways of rendering it apart."""
        if not self.tokenizer.chat_template:
            return None
        try:
            return render_chat(self.tokenizer, messages, tools, add_generation_prompt)
        except UserError as error:
            raise ValueError(str(error)) from None

    def stops_at(self, token: int) -> bool:
        return token in self._stop_ids


def open_tokenizer(folder: Path, **given: Any) -> Any:
    """transformers' tokenizer; one-line errors."""
    quiet_transformers()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    check_tokenizer(folder)
    try:
        try:
            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **given)
        except ValueError as error:
            if given or "trust_remote_code" not in str(error) or not _lacks_code(folder):
                raise
            return PreTrainedTokenizerFast.from_pretrained(str(folder))
    except Exception as error:  # tokenizers raises bare exceptions for damaged files
        if "trust_remote_code" in str(error):
            what = "its tokenizer runs its own Python code, which is not run here"
            raise UserError(f"{folder}: {what}; take a model with a tokenizer.json") from None
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{folder}: its tokenizer cannot be read: {reason}") from None


def without_own_code(settings: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json beside a tokenizer.json, which is the tokenizer then."""
    if "auto_map" not in settings:
        return settings
    import transformers

    is_known = hasattr(transformers, str(settings.get("tokenizer_class")))
    kind = {} if is_known else {"tokenizer_class": "PreTrainedTokenizerFast"}
    return {**{key: value for key, value in settings.items() if key != "auto_map"}, **kind}


def _lacks_code(folder: Path) -> bool:
    """Whether tokenizer.json is all there is, as in prepared data, whatever code its settings name."""
    return (folder / "tokenizer.json").is_file() and not any(folder.glob("*.py"))


def as_ids(value: Any) -> set[int]:
    return {one for one in (value if isinstance(value, list) else [value]) if type(one) is int}
