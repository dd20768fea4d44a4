"""Texts with trained spans to token ids and loss mask, as fast as the tokenizer itself.

No token crosses a special token, so a text is tokenized in segments between them, and segments that every chat repeats
are tokenized once. What the assistant says is a segment of its own, as it is when the model generates after a prompt.
Segments are tokenized piece by piece through a cache where the tokenizer allows it (`token_cache.py`). A tokenizer
that gives other tokens for segments than for the whole text (checked on probes) gets whole texts; a token that
overlaps the assistant's span is then trained on, as in transformers. The text of a special token inside a document is
escaped before rendering and becomes the tokens of plain text.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sojourn.data.sources.document import Message
from sojourn.data.sources.values import BadRecord
from sojourn.data.tokenize.chat_template import Span, Template
from sojourn.data.tokenize.token_cache import TokenCache, ids_to_bytes, supports_token_cache
from sojourn.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROBES = ("Hello there", "你好", "123", "(a)", "“so”")
_MAX_CACHED_SEGMENTS = 4096
_MAX_CACHED_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class SpannedText:
    """A text, and the character spans of it that are trained on."""

    text: str
    spans: list[Span]


class SpanTokenizer:
    def __init__(self, tokenizer: Tokenizer, added_tokens: dict[str, bool], template: Template | None) -> None:
        self._tokenizer = tokenizer
        self._special = sorted((token for token, special in added_tokens.items() if special), key=len, reverse=True)
        literal = "|".join(map(re.escape, self._special)) or "(?!)"
        self._special_pattern = re.compile(literal)
        self._split_pattern = re.compile(f"({literal}|\ufdd2[0-9]+\ufdd3)")
        self._cached: dict[str, bytes] = {}  # token ids of segments as 32-bit integers
        for index, token in enumerate(self._special):
            self._cached[token] = ids_to_bytes(tokenizer.encode(token, add_special_tokens=False).ids)
            self._cached[_escape_code(index)] = ids_to_bytes(_encode_as_text(tokenizer, token))
        self._encode = TokenCache(tokenizer) if supports_token_cache(tokenizer) else partial(_encode_batch, tokenizer)
        self._by_segment = not _strips_spaces(tokenizer) and (template is None or self._segments_match(template))
        self.bos = _prefix_ids(tokenizer)

    def has_special(self, text: str) -> bool:
        return self._special_pattern.search(text) is not None

    def escape(self, text: str) -> str:
        """The text with each special token's text replaced by a code, which becomes the tokens of plain text."""
        return self._special_pattern.sub(lambda match: _escape_code(self._special.index(match.group())), text)

    def __call__(self, texts: list[SpannedText]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids and loss mask of all texts, concatenated, and the number of tokens of each text."""
        return self._encode_segments(texts) if self._by_segment else self._encode_whole(texts)

    def _encode_segments(self, texts: list[SpannedText]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        segments: list[str] = []
        trained: list[bool] = []
        ends: list[int] = []
        for spanned in texts:
            for text, is_trained in _split_at_spans(spanned):
                parts = [part for part in self._split_pattern.split(text) if part]
                segments += parts
                trained += [is_trained] * len(parts)
            ends.append(len(segments))
        cached = self._cached
        new = list(dict.fromkeys(text for text in segments if text not in cached))
        cached.update(zip(new, self._encode(new), strict=True))
        tokens = [cached[text] for text in segments]
        for text in new:
            if len(text) > _MAX_CACHED_CHARACTERS or len(cached) > _MAX_CACHED_SEGMENTS:
                del cached[text]
        counts = np.fromiter(map(len, tokens), np.int64, len(tokens)) // 4
        totals = np.concatenate([[0], np.cumsum(counts)])[[0, *ends]]
        ids = np.frombuffer(b"".join(tokens), np.uint32)
        return ids, np.repeat(np.array(trained, np.uint8), counts), np.diff(totals)

    def _encode_whole(self, texts: list[SpannedText]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, masks, counts = array("I"), [np.zeros(0, np.uint8)], []
        parts = [list(_split_at_escapes(text)) for text in texts]
        strings = [part.text for text in parts for part in text]
        encodings = iter(self._tokenizer.encode_batch(strings, add_special_tokens=False))
        for text in parts:
            before = len(ids)
            for part in text:
                encoding, cached = next(encodings), self._cached.get(part.text)
                if cached is None:
                    ids.extend(encoding.ids)
                    masks.append(_overlap(encoding.offsets, part.spans))
                else:
                    ids.frombytes(cached)
                    masks.append(np.full(len(cached) // 4, bool(part.spans), np.uint8))
            counts.append(len(ids) - before)
        return np.array(ids, np.uint32), np.concatenate(masks), np.array(counts, np.int64)

    def _segments_match(self, template: Template) -> bool:
        """Whether the segments of a chat give the tokens of the whole chat."""
        for content in _PROBES:
            turns = (Message("user", content), Message("assistant", content)) * 2
            try:
                text = SpannedText(*template.spans(turns))
            except (BadRecord, UserError):  # a template that cannot be trained on may still begin an answer
                return False
            whole = self._tokenizer.encode(text.text, add_special_tokens=False).ids
            if self._encode_segments([text])[0].tolist() != whole:
                return False
        return True


def _escape_code(index: int) -> str:
    return f"\ufdd2{index}\ufdd3"


def _split_at_spans(spanned: SpannedText) -> Iterator[tuple[str, bool]]:
    """The text in parts, each with whether it is trained on."""
    last = 0
    for start, end in spanned.spans:
        yield spanned.text[last:start], False
        yield spanned.text[start:end], True
        last = end
    yield spanned.text[last:], False


def _split_at_escapes(spanned: SpannedText) -> Iterator[SpannedText]:
    """Escape codes become texts of their own."""
    boundaries = [at for match in re.finditer("\ufdd2[0-9]+\ufdd3", spanned.text) for at in match.span()]
    start = 0
    for end in [*boundaries, len(spanned.text)]:
        spans = [(max(a, start) - start, min(b, end) - start) for a, b in spanned.spans if a < end and b > start]
        yield SpannedText(spanned.text[start:end], spans)
        start = end


def _overlap(offsets: list[Span], spans: list[Span]) -> np.ndarray:
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), np.uint8)
    for start, end in spans:
        mask[(ends > start) & (starts < end)] = 1
    return mask


def _encode_batch(tokenizer: Tokenizer, texts: list[str]) -> list[bytes]:
    return [ids_to_bytes(one.ids) for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _encode_as_text(tokenizer: Tokenizer, token: str) -> Sequence[int]:
    """The ids of a special token's text, read as plain text."""
    tokenizer.encode_special_tokens = True
    try:
        return list(tokenizer.encode(token, add_special_tokens=False).ids)
    finally:
        tokenizer.encode_special_tokens = False


def _strips_spaces(tokenizer: Tokenizer) -> bool:
    """Whether a special token takes in the spaces beside it, so that segments give other tokens than the whole."""
    tokens = tokenizer.get_added_tokens_decoder().values()
    return any(token.special and (token.lstrip or token.rstrip or token.single_word) for token in tokens)


def _prefix_ids(tokenizer: Tokenizer) -> np.ndarray:
    """What the tokenizer adds before every text, such as Llama's <|begin_of_text|>."""
    bare, full = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    start = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
    return np.array(full[:start], np.uint32)
