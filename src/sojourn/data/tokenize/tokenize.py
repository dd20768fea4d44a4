"""Texts with trained spans to token ids and mask, as fast as the tokenizer itself.

No token reaches across a special token, so a text is tokenised in segments between them, and the segments that every
chat repeats are tokenised once. The assistant's words are a segment of their own, apart from what stands before them,
as they will be when the model speaks after a prompt. A tokenizer that would make other tokens of segments than of the
whole gets whole texts; a token that reaches into the assistant's words then belongs to them, as in transformers.
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
from sojourn.data.tokenize.chat_template import Span, Template
from sojourn.data.tokenize.token_cache import TokenCache, as_bytes, supports_token_cache

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROBES = ("Hello there", "你好", "123", "(a)", "“so”")
_REMEMBERED = 4096
_SHORT = 256


@dataclass(frozen=True, slots=True)
class SpannedText:
    """A text to be tokenised, and the spans of it that are trained on."""

    text: str
    spans: list[Span]


class SpanTokenizer:
    def __init__(self, tokenizer: Tokenizer, added: dict[str, bool], template: Template | None) -> None:
        self._tokenizer = tokenizer
        self._special = sorted((token for token, special in added.items() if special), key=len, reverse=True)
        literal = "|".join(map(re.escape, self._special)) or "(?!)"
        self._in_text = re.compile(literal)
        self._cut = re.compile(f"({literal}|\ufdd2[0-9]+\ufdd3)")
        self._known: dict[str, bytes] = {}  # the tokens of segments, as the bytes of 32-bit numbers
        for number, token in enumerate(self._special):
            self._known[token] = as_bytes(tokenizer.encode(token, add_special_tokens=False).ids)
            self._known[_escape(number)] = as_bytes(_as_words(tokenizer, token))
        self._encode = TokenCache(tokenizer) if supports_token_cache(tokenizer) else partial(_encoded, tokenizer)
        self._apart = not _swallows_spaces(tokenizer) and (template is None or self._agrees(template))
        self.before = _put_before(tokenizer)

    def has_special(self, text: str) -> bool:
        return self._in_text.search(text) is not None

    def escaped(self, text: str) -> str:
        """The text with each special token's text replaced by an escape, which becomes the tokens of mere words."""
        return self._in_text.sub(lambda found: _escape(self._special.index(found.group())), text)

    def __call__(self, strands: list[SpannedText]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids and mask of all strands one after another, and how many tokens each has."""
        return self._by_segments(strands) if self._apart else self._whole(strands)

    def _by_segments(self, strands: list[SpannedText]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        segments: list[str] = []
        trained: list[bool] = []
        ends: list[int] = []
        for strand in strands:
            for text, is_trained in _pieces(strand):
                found = [part for part in self._cut.split(text) if part]
                segments += found
                trained += [is_trained] * len(found)
            ends.append(len(segments))
        known = self._known
        new = list(dict.fromkeys(text for text in segments if text not in known))
        known.update(zip(new, self._encode(new), strict=True))
        tokens = [known[text] for text in segments]
        for text in new:
            if len(text) > _SHORT or len(known) > _REMEMBERED:
                del known[text]
        counts = np.fromiter(map(len, tokens), np.int64, len(tokens)) // 4
        totals = np.concatenate([[0], np.cumsum(counts)])[[0, *ends]]
        ids = np.frombuffer(b"".join(tokens), np.uint32)
        return ids, np.repeat(np.array(trained, np.uint8), counts), np.diff(totals)

    def _whole(self, strands: list[SpannedText]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, masks, counts = array("I"), [np.zeros(0, np.uint8)], []
        parts = [list(_at_escapes(strand)) for strand in strands]
        texts = [part.text for strand in parts for part in strand]
        encodings = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False))
        for strand in parts:
            before = len(ids)
            for part in strand:
                encoding, words = next(encodings), self._known.get(part.text)
                if words is None:
                    ids.extend(encoding.ids)
                    masks.append(_overlap(encoding.offsets, part.spans))
                else:
                    ids.frombytes(words)
                    masks.append(np.full(len(words) // 4, bool(part.spans), np.uint8))
            counts.append(len(ids) - before)
        return np.array(ids, np.uint32), np.concatenate(masks), np.array(counts, np.int64)

    def _agrees(self, template: Template) -> bool:
        """Do the segments of a chat give the tokens of the whole?"""
        for words in _PROBES:
            turns = (Message("user", words), Message("assistant", words)) * 2
            strand = SpannedText(*template.spans(turns))
            whole = self._tokenizer.encode(strand.text, add_special_tokens=False).ids
            if self._by_segments([strand])[0].tolist() != whole:
                return False
        return True


def _escape(number: int) -> str:
    return f"\ufdd2{number}\ufdd3"


def _pieces(strand: SpannedText) -> Iterator[tuple[str, bool]]:
    """The text in pieces, each trained on or not."""
    place = 0
    for start, end in strand.spans:
        yield strand.text[place:start], False
        yield strand.text[start:end], True
        place = end
    yield strand.text[place:], False


def _at_escapes(strand: SpannedText) -> Iterator[SpannedText]:
    """The strand cut at its escapes, each of which is a strand of its own."""
    cuts = [cut for match in re.finditer("\ufdd2[0-9]+\ufdd3", strand.text) for cut in match.span()]
    place = 0
    for cut in [*cuts, len(strand.text)]:
        spans = [(max(a, place) - place, min(b, cut) - place) for a, b in strand.spans if a < cut and b > place]
        yield SpannedText(strand.text[place:cut], spans)
        place = cut


def _overlap(offsets: list[Span], spans: list[Span]) -> np.ndarray:
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), np.uint8)
    for start, end in spans:
        mask[(ends > start) & (starts < end)] = 1
    return mask


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[bytes]:
    return [as_bytes(one.ids) for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _as_words(tokenizer: Tokenizer, token: str) -> Sequence[int]:
    """The ids of a special token's text as mere words."""
    tokenizer.encode_special_tokens = True
    try:
        return list(tokenizer.encode(token, add_special_tokens=False).ids)
    finally:
        tokenizer.encode_special_tokens = False


def _swallows_spaces(tokenizer: Tokenizer) -> bool:
    """Does a token take in the spaces beside it, so that segments would not be what they seem?"""
    tokens = tokenizer.get_added_tokens_decoder().values()
    return any(token.special and (token.lstrip or token.rstrip or token.single_word) for token in tokens)


def _put_before(tokenizer: Tokenizer) -> np.ndarray:
    """What the tokenizer puts before every text, such as Llama's <|begin_of_text|>."""
    bare, full = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    place = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
    return np.array(full[:place], np.uint32)
