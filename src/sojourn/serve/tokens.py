"""What a token id is as text and as bytes, and log probabilities in the shapes of OpenAI's APIs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from sojourn.infer.engine.request import Token

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_FIRST_SHIFTED = 256  # byte-level BPE writes bytes that are no printable character as characters from here on


def _byte_characters() -> dict[str, int]:
    """Byte-level BPE's characters, and the bytes that they mean."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(_FIRST_SHIFTED + at): byte for at, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


class TokenTexts:
    """Of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        state = json.loads(backend.to_str()) if backend is not None else {}
        self._added = {int(number): str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        self._byte_level = "ByteLevel" in json.dumps([state.get("decoder"), state.get("pre_tokenizer")])
        self._bytes = _byte_characters() if self._byte_level else {}
        self.bytes_of: Callable[[int], bytes] = lru_cache(maxsize=65_536)(self._find_bytes)

    def _find_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._tokenizer.convert_ids_to_tokens(token)
        if text is None:  # the model has more logits than the tokenizer has tokens
            return b""
        if self._byte_level and all(character in self._bytes for character in text):
            return bytes(self._bytes[character] for character in text)
        found = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(found.group(1), 16)]) if found else str(text).replace("\u2581", " ").encode()

    def text_of(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "replace")

    def chat_logprobs(self, tokens: Sequence[Token], alternatives: int) -> list[dict[str, Any]]:
        return [
            {**self._entry(one.id, one.logprob), "top_logprobs": [self._entry(*top) for top in one.top[:alternatives]]}
            for one in tokens
        ]

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        spelled = self.bytes_of(token)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(spelled)}

    def completion_logprobs(self, tokens: Sequence[Token], alternatives: int, start: int) -> dict[str, Any]:
        """`start`: where in the text the first token begins."""
        texts = [self.text_of(one.id) for one in tokens]
        offsets = []
        for text in texts:
            offsets.append(start)
            start += len(text)
        top = [
            None if one.logprob is None else {self.text_of(token): finite(value) for token, value in one.top}
            for one in tokens
        ]
        return {
            "tokens": texts,
            "token_logprobs": [None if one.logprob is None else finite(one.logprob) for one in tokens],
            "top_logprobs": top if alternatives else None,
            "text_offset": offsets,
        }


def finite(logprob: float | None) -> float:
    """JSON has no infinity: OpenAI writes -9999 for a token that cannot come."""
    return -9999.0 if logprob is None or not logprob > -9999.0 else logprob
