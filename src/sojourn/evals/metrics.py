"""Metrics of a text against its reference answers, each from 0 to 1; with several answers the best counts.

- `exact_match`, `f1`: SQuAD's. Case, ASCII punctuation, English articles and spaces do not count; F1 is over words. A
  Chinese character is a word of its own, and Chinese punctuation does not count.
- `equal`: the same text, but for spaces at both ends.
- `rouge_l`: the F-measure of ROUGE-L over lower-case words, without stemming.
- `regex`: whether the pattern is found.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CHINESE = "\u2e80-\u2fdf\u3005\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_CHINESE_CHARACTER = re.compile(f"([{_CHINESE}])")
_CHINESE_PUNCTUATION = "\u3001-\u3004\u3006\u3008-\u303f\uff01-\uff0f\uff1a-\uff20"
_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}{_CHINESE_PUNCTUATION}]")
_ROUGE_WORD = re.compile(f"[{_CHINESE}]|[^\\W_{_CHINESE}]+")


def normalize(text: str) -> str:
    """As SQuAD does; Chinese characters apart."""
    bare = _PUNCTUATION.sub("", text.lower())
    return " ".join(_CHINESE_CHARACTER.sub(r" \1 ", _ARTICLES.sub(" ", bare)).split())


def exact_match(text: str, answers: Sequence[str]) -> float:
    found = normalize(text)
    return float(any(found == normalize(answer) for answer in answers))


def equal(text: str, answers: Sequence[str]) -> float:
    return float(text.strip() in {answer.strip() for answer in answers})


def f1(text: str, answers: Sequence[str]) -> float:
    return max((_word_f1(normalize(text).split(), normalize(answer).split()) for answer in answers), default=0.0)


def _word_f1(found: list[str], wanted: list[str]) -> float:
    if not found or not wanted:
        return float(found == wanted)
    return _f_measure(sum((Counter(found) & Counter(wanted)).values()), len(found), len(wanted))


def rouge_l(text: str, answers: Sequence[str]) -> float:
    found = _ROUGE_WORD.findall(text.lower())
    return max((_rouge_l(found, _ROUGE_WORD.findall(answer.lower())) for answer in answers), default=0.0)


def _rouge_l(found: list[str], wanted: list[str]) -> float:
    return _f_measure(_longest_common_subsequence(found, wanted), len(found), len(wanted))


def _longest_common_subsequence(one: list[str], other: list[str]) -> int:
    """Bit-parallel (Hyyrö, 2004): a step a word of `one`."""
    places: dict[str, int] = {}
    for at, word in enumerate(other):
        places[word] = places.get(word, 0) | 1 << at
    whole = (1 << len(other)) - 1
    row = whole
    for word in one:
        common = row & places.get(word, 0)
        row = ((row + common) | (row - common)) & whole
    return len(other) - row.bit_count()


def _f_measure(common: int, found: int, wanted: int) -> float:
    return 2 * common / (found + wanted) if common else 0.0


def regex(text: str, pattern: str) -> float:
    return float(re.search(pattern, text) is not None)


OF_ANSWERS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "exact_match": exact_match,
    "f1": f1,
    "rouge_l": rouge_l,
    "equal": equal,
}
