"""How many tokens a text has, where its tokenizer is not at hand: by counting words, digits, characters and signs.

Tokens per word, digit and so on are least-squares fits to the real tokenizers of each size on Alpaca (English and
Chinese), tool calls, C4, WikiText-2 and Python code (2026-11): within 5 % on each of them for the vocabularies below.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from sojourn.config.data import DataConfig

_UNITS = re.compile(
    r"(?P<special><\|[^|<>\s]{1,40}\|>)|(?P<word>[A-Za-zÀ-ÿ]+)|(?P<digit>\d)|(?P<cjk>[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff])"
    r"|(?P<cjk_sign>[\u3000-\u303f\uff00-\uffef])|(?P<line>\n[ \t]*)|(?P<sign>[!-/:-@\[-`{-~])|(?P<other>\S)"
)
_WORD, _DIGIT, _CJK, _CJK_SIGN, _LINE, _SIGN, _OTHER = "word", "digit", "cjk", "cjk_sign", "line", "sign", "other"
# By vocabulary size: Llama 2, SmolLM2, DeepSeek, Llama 3, Qwen2.
_TOKENS_PER_UNIT: dict[int, dict[str, float]] = {
    32_000: {_WORD: 1.24, _DIGIT: 1.09, _CJK: 1.41, _CJK_SIGN: 1.69, _LINE: 2.13, _SIGN: 0.69, _OTHER: 1.75},
    49_152: {_WORD: 1.13, _DIGIT: 1.12, _CJK: 1.77, _CJK_SIGN: 1.78, _LINE: 1.35, _SIGN: 0.71, _OTHER: 1.47},
    102_400: {_WORD: 1.11, _DIGIT: 1.13, _CJK: 0.48, _CJK_SIGN: 1.76, _LINE: 1.74, _SIGN: 0.72, _OTHER: 1.92},
    128_256: {_WORD: 1.13, _DIGIT: 0.42, _CJK: 0.70, _CJK_SIGN: 1.87, _LINE: 0.58, _SIGN: 0.64, _OTHER: 1.23},
    151_936: {_WORD: 1.12, _DIGIT: 1.15, _CJK: 0.49, _CJK_SIGN: 1.77, _LINE: 0.56, _SIGN: 0.62, _OTHER: 1.21},
}
# Of a BPE that is trained on the run's own text, by its size: tokens over those of Qwen2's vocabulary.
_TRAINED = {256: 4.2, 1024: 1.65, 2048: 1.36, 4096: 1.2, 8192: 1.09, 16_384: 1.02, 32_768: 0.97, 65_536: 0.94}
_TRAINED_ON_BUILTIN = {1024: 1.61, 4096: 0.95, 8192: 0.77, 16_384: 0.72}  # the same, on `builtin:text`


_SAMPLES = {
    "en": "The museum was founded in 1962. It opens at nine, and most visitors come in the afternoon. The "
    "exhibition of old maps, which was planned for six months, stayed open for two years because people kept asking.",
    "zh": "博物馆上午九点开放，大多数参观者下午才来。2019年大约有四万五千人参观；"
    "原计划展出六个月的古地图展览，因为大家一再要求，"
    "一直开放了两年。",
}


@dataclass(frozen=True)
class TokenEstimate:
    """Estimates for a vocabulary of a size; `trained`: it is to be trained on the text itself, which `builtin` says is
    our own; `by_character`: it has a token for each character."""

    vocab_size: int
    trained: bool = False
    by_character: bool = False
    builtin: bool = False

    @cached_property
    def _per_unit(self) -> dict[str, float]:
        nearest = min(_TOKENS_PER_UNIT, key=lambda size: abs(math.log(size / max(1, self.vocab_size))))
        return _TOKENS_PER_UNIT[151_936 if self.trained else nearest]

    @cached_property
    def _factor(self) -> float:
        if not self.trained:
            return 1.0
        return _between(_TRAINED_ON_BUILTIN if self.builtin else _TRAINED, self.vocab_size)

    def __call__(self, text: str) -> int:
        if self.by_character:
            return len(text)
        counts = Counter(unit.lastgroup for unit in _UNITS.finditer(text))
        special = counts.pop("special", 0)
        return max(1, special + round(self._factor * sum(self._per_unit[str(name)] * n for name, n in counts.items())))


def tokens_per_byte(estimate: TokenEstimate, language: str) -> float:
    """Of usual prose."""
    text = _SAMPLES[language]
    return estimate(text) / len(text.encode())


def piece_lengths(length: int, data: DataConfig, is_chat: bool) -> list[int]:
    """The lengths of what `truncate` makes of a document of so many tokens."""
    most, choice = data.max_length, data.long_chats if is_chat else data.long_texts
    if length <= most:
        return [length]
    if choice == "split":
        whole, rest = divmod(length, most)
        return [most] * whole + ([rest] if rest > 1 else [])
    return [most] if choice == "truncate" else []


def _between(table: dict[int, float], size: int) -> float:
    """Interpolated over the logarithm of the size."""
    below = max((known for known in table if known <= size), default=min(table))
    above = min((known for known in table if known >= size), default=max(table))
    if below >= above:
        return table[below]
    share = math.log(size / below) / math.log(above / below)
    return table[below] + share * (table[above] - table[below])
