"""Tokenizes texts piece by piece through a cache of pieces, which is several times as fast as tokenizing whole texts.

Byte-level tokenizers first split a text into pre-tokens, and no token crosses them. For ASCII text Python makes the
same splits with the tokenizer's own pattern, and a pre-token in the cache need not be tokenized again. Other text is
split only at single spaces between two other characters, where the patterns of GPT-2, Qwen2 and Llama 3 always have a
boundary: nothing before the space can share a pre-token with it, and what follows does not change the splits before
it. A SentencePiece BPE has no pre-tokens, but where no piece has a space after another character its merges stop there
too.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from sojourn.data.tokenize.bpe import ONE_DIGIT, PATTERN, THREE_DIGITS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_CACHED_PIECES = 200_000
_MAX_CACHED_CHARACTERS = 24
_SPACE = "▁"

# Pre-tokenization patterns: GPT-2 (also built into ByteLevel), Qwen2, Llama 3.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_KNOWN_PATTERNS = {_GPT2, *(PATTERN.replace("DIGITS", digits) for digits in (ONE_DIGIT, THREE_DIGITS))}

# Up to the next single space between two other characters.
_WORDS = re.compile(r"\s*\S+(?:(?! \S)\s+\S*)*|\s+")

_PROBES = (
    "The cat's 12 mats, (and 3.5 more) don't fit!\n\nNew line\tand tab.", "a  b   c\n d \n e", " lead and trail ",
    "def f(x):\n    return x ** 2  # twice\n\n\nclass A: pass", "中文 and English 混排，OK？ 是 的。",
    "é è naïve “so” … 🙂",
    "I'll we're 'tis 's 't WE'LL", "x\r\ny \r\n z", "1,234 567 8 90", "\u00a0nbsp \u2003em x\u3000y",
    "a.b_c=d(e)\n  f:\n-g", '<tool_call> {"a": 1} </tool_call>', "\x1c \x1f a\x1eb \x85 c",
)  # fmt: skip


def supports_token_cache(tokenizer: Tokenizer) -> bool:
    """Whether this tokenizer gives the same tokens for the pieces as for the whole text."""
    if not (_splits_at_spaces(tokenizer) or _merges_stop_at_spaces(tokenizer)):
        return False
    if any(re.search(r"\S \S", token.content) for token in tokenizer.get_added_tokens_decoder().values()):
        return False
    whole = tokenizer.encode_batch(list(_PROBES), add_special_tokens=False)
    return TokenCache(tokenizer)(_PROBES) == [ids_to_bytes(one.ids) for one in whole]


class TokenCache:
    """Texts to token ids, as bytes of 32-bit integers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cached: dict[str, bytes] = {}
        self._ascii_pattern = _ascii_pattern(tokenizer)
        added = [re.escape(token.content) for token in tokenizer.get_added_tokens_decoder().values()]
        # Whitespace to Python but not to the tokenizer, and added tokens, which are matched before the text is split.
        self._exceptions = re.compile("|".join([r"[\x1c-\x1f]", *added]))

    def __call__(self, texts: Sequence[str]) -> list[bytes]:
        cached = self._cached
        pieces_of = [self._pieces(text) for text in texts]
        new = list(set(chain.from_iterable(pieces_of)) - cached.keys())
        encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        cached.update((piece, ids_to_bytes(one.ids)) for piece, one in zip(new, encodings, strict=True))
        tokens = cached.__getitem__
        encoded = [b"".join(map(tokens, pieces)) for pieces in pieces_of]
        self._evict(new)
        return encoded

    def _pieces(self, text: str) -> list[str]:
        if self._ascii_pattern is None:
            return _WORDS.findall(text)
        if text.isascii() and not self._exceptions.search(text):
            return self._ascii_pattern.findall(text)
        pieces: list[str] = []
        for word in _WORDS.findall(text):
            if word.isascii() and not self._exceptions.search(word):
                pieces += self._ascii_pattern.findall(word)
            else:
                pieces.append(word)
        return pieces

    def _evict(self, new: list[str]) -> None:
        """Drops long pieces, which rarely recur; from a full cache the later half, since frequent pieces came first."""
        for piece in new:
            if len(piece) > _MAX_CACHED_CHARACTERS:
                del self._cached[piece]
        if len(self._cached) > _MAX_CACHED_PIECES:
            for piece in list(self._cached)[_MAX_CACHED_PIECES // 2 :]:
                del self._cached[piece]


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def _splits_at_spaces(tokenizer: Tokenizer) -> bool:
    normalizer, steps = _state(tokenizer.normalizer), _steps(_state(tokenizer.pre_tokenizer))
    return (
        normalizer.get("type") in (None, "NFC")
        and bool(_patterns(steps))
        and all(step["type"] in ("Split", "ByteLevel", "Digits") for step in steps)
        and not any(step.get("add_prefix_space") or step.get("invert") for step in steps)
        and all(pattern in _KNOWN_PATTERNS for pattern in _patterns(steps))
    )


def _merges_stop_at_spaces(tokenizer: Tokenizer) -> bool:
    steps = _steps(_state(tokenizer.normalizer))
    if tokenizer.pre_tokenizer is not None or type(tokenizer.model).__name__ != "BPE" or len(steps) != 1:
        return False
    replaces_spaces = steps[0].get("pattern") == {"String": " "} and steps[0].get("content") == _SPACE
    return replaces_spaces and not any(re.search(f"[^{_SPACE}]{_SPACE}", piece) for piece in tokenizer.get_vocab())


def _ascii_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """The pattern for Python's re, which for ASCII splits alike; None unless there is exactly one pattern."""
    steps = _steps(_state(tokenizer.pre_tokenizer))
    patterns = _patterns(steps)
    if not _splits_at_spaces(tokenizer) or len(patterns) != 1 or any(step["type"] == "Digits" for step in steps):
        return None
    ascii_only = (
        patterns[0].replace(r"\p{L}\p{N}", "A-Za-z0-9").replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
    )
    return re.compile(ascii_only)


def _patterns(steps: list[dict[str, Any]]) -> list[str]:
    splitting = [step for step in steps if step["type"] == "Split" or step.get("use_regex")]
    return [str(step["pattern"].get("Regex")) if step["type"] == "Split" else _GPT2 for step in splitting]


def _state(part: Any) -> dict[str, Any]:
    return dict(json.loads(part.__getstate__())) if part is not None else {}


def _steps(state: dict[str, Any]) -> list[dict[str, Any]]:
    return list(state.get("pretokenizers") or state.get("normalizers") or ([state] if state else []))
