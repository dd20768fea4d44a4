"""Tokenises texts piece by piece and remembers every piece, which is several times as fast as tokenising whole texts.

Byte-level tokenizers first cut a text into pre-tokens, and no token reaches across them. For plain (ASCII) text Python
can make the same cuts, and a pre-token that was seen before need not be tokenised again. Other text is cut only at
single spaces between two other characters, where every cut made like those of GPT-2, Qwen2 and Llama 3 has a boundary:
nothing before the space can be in one pre-token with it, and what follows does not change how the text before is cut.
A SentencePiece BPE does not cut, but where no piece has a space behind another character its merges stop there too.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REMEMBERED = 200_000
_LONGEST = 24
_SPACE = "▁"

# How a text is cut: GPT-2 (also built into ByteLevel), Qwen2, Llama 3.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_NEWER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN_CUTS = {_GPT2, _NEWER.replace("DIGITS", r"\p{N}"), _NEWER.replace("DIGITS", r"\p{N}{1,3}")}

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
    """Whether pieces of this tokenizer's texts can be tokenised one by one."""
    if not (_cuts_at_spaces(tokenizer) or _stops_at_spaces(tokenizer)):
        return False
    if any(re.search(r"\S \S", token.content) for token in tokenizer.get_added_tokens_decoder().values()):
        return False
    whole = tokenizer.encode_batch(list(_PROBES), add_special_tokens=False)
    return TokenCache(tokenizer)(_PROBES) == [as_bytes(one.ids) for one in whole]


class TokenCache:
    """Texts to their tokens, as the bytes of 32-bit numbers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, bytes] = {}
        self._cut = _ascii_cut(tokenizer)
        added = [re.escape(token.content) for token in tokenizer.get_added_tokens_decoder().values()]
        # White space to Python but not to everyone, and tokens that are looked for before a text is cut.
        self._not_plain = re.compile("|".join([r"[\x1c-\x1f]", *added]))

    def __call__(self, texts: Sequence[str]) -> list[bytes]:
        known = self._known
        cut_up = [self._pieces(text) for text in texts]
        new = list(set(chain.from_iterable(cut_up)) - known.keys())
        encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        known.update((piece, as_bytes(one.ids)) for piece, one in zip(new, encodings, strict=True))
        tokens = known.__getitem__
        found = [b"".join(map(tokens, pieces)) for pieces in cut_up]
        self._forget(new)
        return found

    def _pieces(self, text: str) -> list[str]:
        if self._cut is None:
            return _WORDS.findall(text)
        if text.isascii() and not self._not_plain.search(text):
            return self._cut.findall(text)
        pieces: list[str] = []
        for word in _WORDS.findall(text):
            if word.isascii() and not self._not_plain.search(word):
                pieces += self._cut.findall(word)
            else:
                pieces.append(word)
        return pieces

    def _forget(self, new: list[str]) -> None:
        """What is long and will not come again; and of too many the later half, for what is frequent came first."""
        for piece in new:
            if len(piece) > _LONGEST:
                del self._known[piece]
        if len(self._known) > _REMEMBERED:
            for piece in list(self._known)[_REMEMBERED // 2 :]:
                del self._known[piece]


def as_bytes(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def _cuts_at_spaces(tokenizer: Tokenizer) -> bool:
    normalizer, steps = _state(tokenizer.normalizer), _steps(_state(tokenizer.pre_tokenizer))
    return (
        normalizer.get("type") in (None, "NFC")
        and bool(_cuts(steps))
        and all(step["type"] in ("Split", "ByteLevel", "Digits") for step in steps)
        and not any(step.get("add_prefix_space") or step.get("invert") for step in steps)
        and all(cut in _KNOWN_CUTS for cut in _cuts(steps))
    )


def _stops_at_spaces(tokenizer: Tokenizer) -> bool:
    steps = _steps(_state(tokenizer.normalizer))
    if tokenizer.pre_tokenizer is not None or type(tokenizer.model).__name__ != "BPE" or len(steps) != 1:
        return False
    makes_visible = steps[0].get("pattern") == {"String": " "} and steps[0].get("content") == _SPACE
    return makes_visible and not any(re.search(f"[^{_SPACE}]{_SPACE}", piece) for piece in tokenizer.get_vocab())


def _ascii_cut(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """The cut as Python has it, which for ASCII is the same; None where there is not just one."""
    steps = _steps(_state(tokenizer.pre_tokenizer))
    cuts = _cuts(steps)
    if not _cuts_at_spaces(tokenizer) or len(cuts) != 1 or any(step["type"] == "Digits" for step in steps):
        return None
    plain = cuts[0].replace(r"\p{L}\p{N}", "A-Za-z0-9").replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
    return re.compile(plain)


def _cuts(steps: list[dict[str, Any]]) -> list[str]:
    cutting = [step for step in steps if step["type"] == "Split" or step.get("use_regex")]
    return [str(step["pattern"].get("Regex")) if step["type"] == "Split" else _GPT2 for step in cutting]


def _state(part: Any) -> dict[str, Any]:
    return dict(json.loads(part.__getstate__())) if part is not None else {}


def _steps(state: dict[str, Any]) -> list[dict[str, Any]]:
    return list(state.get("pretokenizers") or state.get("normalizers") or ([state] if state else []))
