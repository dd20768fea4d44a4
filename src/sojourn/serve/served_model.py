"""The model as the gateway knows it: its tokenizer, chat template, stop tokens. A reload replaces it as a whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sojourn.data.sources.document import Message
from sojourn.data.sources.values import BadRecord, check_text
from sojourn.errors import UserError
from sojourn.infer.prompts import PromptEncoder
from sojourn.infer.runtimes.transformers_tokenizer import open_tokenizer
from sojourn.serve.engines.base import EngineInfo
from sojourn.serve.errors import bad_request
from sojourn.serve.schemas import AssistantMessage, ChatMessage, Content, ToolMessage
from sojourn.serve.tokens import TokenTexts
from sojourn.serve.tools import MARKERS, ToolForm, find_form


@dataclass(frozen=True)
class ServedModel:
    """`id`: changes with each load. `prompts`: tokenizes; it is not made for several threads, so one does all. That
    thread ends with the last request that uses the model."""

    info: EngineInfo
    tokenizer: Any
    prompts: PromptEncoder
    texts: TokenTexts
    id: str
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenize"))

    @classmethod
    def open(cls, info: EngineInfo, id: str) -> ServedModel:
        tokenizer = open_tokenizer(info.tokenizer_folder)
        model = cls(info, tokenizer, PromptEncoder(tokenizer), TokenTexts(tokenizer), id)
        if model.is_chat:  # here, and not with the first request, within the limits of the template sandbox
            model.prompts.chat([Message("user", "Hello")])
        return model

    @property
    def is_chat(self) -> bool:
        return self.prompts.is_chat

    @cached_property
    def tool_form(self) -> ToolForm | None:
        return find_form(self.tokenizer.get_chat_template()) if self.is_chat else None

    @cached_property
    def special_markers(self) -> set[str]:
        """Markers of tool calls that are special tokens."""
        special = {str(one) for one in self.tokenizer.added_tokens_decoder.values() if one.special}
        return {marker for markers in MARKERS.values() for marker in markers} & special

    def decoder(self, keep_markers: bool = False) -> Callable[[list[int]], str]:
        """Ids to text without special tokens, but for markers of tool calls if `keep_markers`."""
        return self._decoder_with_markers if keep_markers and self.special_markers else self._decoder

    @cached_property
    def _decoder(self) -> Callable[[list[int]], str]:
        from sojourn.infer.detokenize import make_decode

        return make_decode(self.tokenizer)

    @cached_property
    def _decoder_with_markers(self) -> Callable[[list[int]], str]:
        added = self.tokenizer.added_tokens_decoder.items()
        hidden = {number for number, one in added if one.special and str(one) not in self.special_markers}
        backend = self.tokenizer.backend_tokenizer
        return lambda ids: str(backend.decode([one for one in ids if one not in hidden], skip_special_tokens=False))

    async def encode_chat(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        if not self.is_chat:
            raise bad_request(
                f"the model {self.info.model!r} has no chat template; use /v1/completions",
                "messages",
                "not_a_chat_model",
            )
        self._check_characters(sum(len(one.content) for one in messages), "messages")
        return await self._encode("messages", self.prompts.chat, messages, tools)

    async def encode_text(self, text: str, param: str) -> list[int]:
        try:
            check_text(text, param)
        except BadRecord as error:
            raise bad_request(str(error), param) from None
        self._check_characters(len(text), param)
        return await self._encode(param, self.prompts.text, text)

    @cached_property
    def _longest_token(self) -> int:
        return max((len(token) for token in self.tokenizer.get_vocab()), default=1)

    def _check_characters(self, characters: int, param: str) -> None:
        """What cannot fit is not tokenized: other prompts would wait for it."""
        most = self.info.context_length * self._longest_token
        if characters > most:
            message = f"{characters:,} characters cannot fit the model's context of {self.info.context_length:,} tokens"
            raise bad_request(message, param, "context_length_exceeded")

    async def _encode(self, param: str, encode: Callable[..., list[int]], *args: Any) -> list[int]:
        """In a thread, so that a long prompt does not hold up the answers of others."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, encode, *args)
        except (BadRecord, UserError) as error:
            raise bad_request(str(error), param) from None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def to_messages(given: Sequence[ChatMessage]) -> list[Message]:
    """As training's data has them. The content of messages must be text that can be written as UTF-8."""
    return [_to_message(one, f"messages[{at}]") for at, one in enumerate(given)]


def _to_message(given: ChatMessage, where: str) -> Message:
    try:
        text = check_text(text_of(given.content), f"{where}.content")
        if isinstance(given, AssistantMessage):
            calls = tuple(
                {"name": one.function.name, "arguments": _arguments(one.function.arguments, where)}
                for one in given.tool_calls or ()
            )
            if given.content is None and not calls:
                raise BadRecord(f"{where}.content: an assistant's message needs content or tool_calls")
            return Message("assistant", text, calls, check_text(given.reasoning_content or "", where))
        if isinstance(given, ToolMessage):
            return Message("tool", text)
    except BadRecord as error:
        raise bad_request(str(error), where) from None
    return Message("user" if given.role == "user" else "system", text)


def _arguments(text: str, where: str) -> Any:
    check_text(text, f"{where}.tool_calls")
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text  # as the model wrote it
    return value if isinstance(value, dict) else text


def text_of(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)
