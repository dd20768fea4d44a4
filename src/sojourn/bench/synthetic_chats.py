"""Writes synthetic chats of a given size, with the word statistics of real instruction data.

A tokenizer caches words, so its speed depends on how many different words a text has and how often each occurs. Here
they follow Zipf's law over a large vocabulary, as in real text. Contents are written as escaped JSON directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.random import Generator

_CHATS_PER_BLOCK = 4096
_TYPES = 80_000
_NUMBERS = 3_000
_CHINESE_TYPES, _CHARACTERS = 30_000, 3_000
_DRAWS = 1 << 22  # length of the table that words are drawn from; a word fills entries in proportion to its frequency
_SYSTEM_PROMPTS = 200
_SHIFT, _STEEPNESS = 8.0, 1.15  # of Zipf's law with Mandelbrot's shift; so that words repeat as in Alpaca and C4

_FIRST, _PLAIN, _COMMA, _END, _START, _PARAGRAPH, _ITEM, _ASIDE = range(8)
_ENGLISH = (
    ("{W}",), (" {w}",), (" {w},",), (*[" {w}."] * 8, " {w}?", " {w}!"), (" {W}",), (r"\n\n{W}",),
    (r"\n- {W}", r"\n1. {W}", r"\n2. {W}", r"\n3. {W}", r"\n* **{W}**:"), (" ({w})", r" \"{w}\"", " {w}'s", " *{w}*"),
)  # fmt: skip
_CODE = (
    ("def {w}(",), ("{w} ", "{w}.", "{w} + ", "{w}_"), ("{w}, ", "{w}="), ("{w})", "{w}()", "{w}]", "{w}"),
    (r"\n    {w} = ", r"\n    return {w}(", r"\n        {w}("), (r"\n\ndef {w}(", r"\n\nclass {w}:"),
    (r"\n    for {w} in ", r"\n    if {w} == "), (r"\"{w}\"", "{w}[0]", "[{w}"),
)  # fmt: skip
_CHINESE = (
    ("{w}",), ("{w}",), ("{w}，",), (*["{w}。"] * 8, "{w}？", "{w}！"), ("{w}",), (r"\n\n{w}",),
    (r"\n1. {w}", r"\n2. {w}", r"\n3. {w}"), ("“{w}”", "（{w}）", "《{w}》"),
)  # fmt: skip

_COMMON = (
    "the of and to a in is for that with as are on be it by or can this an from your you have their which not at will "
    "has more also was they such it's help make one use other these people its time up like we may used some new than "
    "there between been how all into what when should each while but our about them who most many if different way "
    "through could out using any so based provide example first data his would including create he only work then"
)
_ONSETS = "b c d f g h j k l m n p r s t v w y z br ch cl cr dr fl gr pl pr sh sl sp st str th tr"
_VOWELS = "a e i o u a e i o ai ea ee io ou"
_CODAS = "- - - - - - - - n r s t l m d ng nt ck st"


@dataclass(frozen=True)
class _Language:
    """All forms of all words of one language: form f of word w is `strings[f * types + w]`."""

    strings: np.ndarray
    types: int
    draws: np.ndarray


def write_synthetic_chats(path: Path, size: int, seed: int = 0) -> int:
    """Writes JSON Lines of up to `size` bytes, the same bytes for the same seed. Returns the number of chats."""
    chats = 0
    with path.open("wb") as file:
        for block in _blocks(np.random.default_rng(seed)):
            left = size - file.tell()
            whole = len(block) < left
            part = block if whole else block[: block.rfind(b"\n", 0, left) + 1]
            file.write(part)
            chats += part.count(b"\n")
            if not whole:
                break
    return chats


def _blocks(rng: Generator) -> Iterator[bytes]:
    words = _words(rng)
    english = _language(words, _ENGLISH)
    code = _language([word for word in words[:12_000] if word.isalpha()], _CODE)
    chinese = _language(_chinese_words(rng), _CHINESE)
    languages, shares = (english, code, chinese), (0.8, 0.1, 0.1)
    prompts = _contents(english, np.full(_SYSTEM_PROMPTS, 16), rng)
    while True:
        kinds = rng.choice(len(languages), _CHATS_PER_BLOCK, p=shares)
        rounds = rng.choice([1, 2, 3], _CHATS_PER_BLOCK, p=[0.85, 0.1, 0.05])
        made = [
            iter(_contents(language, _lengths(int(rounds[kinds == kind].sum()), rng), rng))
            for kind, language in enumerate(languages)
        ]
        systems = np.where(
            rng.random(_CHATS_PER_BLOCK) < 0.15, rng.integers(_SYSTEM_PROMPTS, size=_CHATS_PER_BLOCK), -1
        )
        lines = [
            _line(list(islice(made[kind], 2 * count)), prompts[system] if system >= 0 else None)
            for kind, count, system in zip(kinds.tolist(), rounds.tolist(), systems.tolist(), strict=True)
        ]
        yield "".join(lines).encode()


def _line(contents: list[str], system: str | None) -> str:
    turns = [f'{{"role": "system", "content": "{system}"}}'] if system else []
    for question, answer in zip(contents[::2], contents[1::2], strict=True):
        turns.append(f'{{"role": "user", "content": "{question}"}}, {{"role": "assistant", "content": "{answer}"}}')
    return f'{{"messages": [{", ".join(turns)}]}}\n'


def _lengths(rounds: int, rng: Generator) -> np.ndarray:
    """Words of each question and answer, alternating; log-normal as in Alpaca."""
    questions = rng.lognormal(2.6, 0.6, rounds)
    answers = rng.lognormal(4.2, 0.85, rounds)
    return np.clip(np.stack([questions, answers], axis=1).reshape(-1), 5, 1500).astype(np.int64)


def _contents(language: _Language, lengths: np.ndarray, rng: Generator) -> list[str]:
    """One message per length (in words), of sentences, paragraphs and lists."""
    ends = np.cumsum(lengths)
    firsts, total = ends - lengths, int(ends[-1]) if len(ends) else 0
    words = language.draws[rng.integers(_DRAWS, size=total, dtype=np.int32)]
    noise = rng.random(total, np.float32)
    stops = noise > 1 - 1 / 14
    stops[ends - 1] = True
    forms = np.full(total, _PLAIN, np.int32)
    forms[noise < 0.08] = _ASIDE
    forms[noise < 0.06] = _COMMA
    starts = np.flatnonzero(stops[:-1]) + 1
    forms[starts] = rng.choice([_START, _PARAGRAPH, _ITEM], len(starts), p=[0.7, 0.12, 0.18])
    forms[stops] = _END
    forms[firsts] = _FIRST
    strings = language.strings[forms * language.types + words].tolist()
    return ["".join(strings[first:end]) for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]


def _language(words: list[str], forms: tuple[tuple[str, ...], ...]) -> _Language:
    capitals = [word[0].upper() + word[1:] for word in words]
    strings: list[str] = []
    for choices in forms:
        around = [form.replace("W", "w").split("{w}") for form in choices]
        shown = capitals if "{W}" in choices[0] else words
        strings += [before + word + after for (before, after), word in zip(cycle(around), shown, strict=False)]
    weights = (np.arange(len(words)) + _SHIFT) ** -_STEEPNESS
    bounds = np.round(np.cumsum(weights) / weights.sum() * _DRAWS).astype(np.int64)
    draws = np.repeat(np.arange(len(words), dtype=np.int32), np.diff(bounds, prepend=0))
    return _Language(np.array(strings, object), len(words), draws)


def _words(rng: Generator) -> list[str]:
    """Real function words, then made-up ones, the short ones mostly first; every twenty-fifth is a number."""
    onsets, vowels = (np.array(parts.split(), object) for parts in (_ONSETS, _VOWELS))
    codas = np.array([part.strip("-") for part in _CODAS.split()], object)
    common, count = _COMMON.split(), _TYPES * 3 // 2
    syllables = [rng.choice(onsets, count) + rng.choice(vowels, count) + rng.choice(codas, count) for _ in range(4)]
    many = 1 + rng.choice(4, count, p=[0.1, 0.4, 0.35, 0.15])
    made = ["".join(parts[:number]) for *parts, number in zip(*syllables, many.tolist(), strict=True)]
    made = [word for word in dict.fromkeys(made) if word not in common][:_TYPES]
    ranks = np.argsort(np.array([len(word) for word in made]) + rng.normal(0, 2.5, len(made)), kind="stable")
    numbers = iter(_numbers(rng))
    vocabulary = common
    for position, rank in enumerate(ranks.tolist()):
        if position % 25 == 0:
            vocabulary += islice(numbers, 1)
        vocabulary.append(made[rank])
    return vocabulary


def _numbers(rng: Generator) -> list[str]:
    values = np.floor(10 ** rng.uniform(0, 4.3, _NUMBERS)).astype(int).tolist()
    shapes = ("{}", "{}", "{:,}", "{}%", "{}.5", "${:,}")
    return [shapes[number % len(shapes)].format(value) for number, value in enumerate(values)]


def _chinese_words(rng: Generator) -> list[str]:
    characters = [chr(code) for code in rng.permutation(np.arange(0x4E00, 0x9FA5))[:_CHARACTERS].tolist()]
    weights = 1 / (np.arange(_CHARACTERS) + 30.0)
    drawn = rng.choice(_CHARACTERS, (2 * _CHINESE_TYPES, 4), p=weights / weights.sum()).tolist()
    many = 1 + rng.choice(4, 2 * _CHINESE_TYPES, p=[0.1, 0.7, 0.1, 0.1])
    made = ["".join(characters[one] for one in row[:count]) for row, count in zip(drawn, many.tolist(), strict=True)]
    return list(dict.fromkeys(made))[:_CHINESE_TYPES]
