"""Duplicates are found, exact and near, and nothing else is taken for one."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import get_context

import numpy as np
import pytest

from sojourn.data.clean.duplicates import ExactDuplicates, NearDuplicates, minhash_signature
from sojourn.errors import UserError

PINNED = [3324112349, 3296497129, 3300519080]
WORDS = [f"{a}{b}{c}" for a in ("ka", "lo", "mi", "ne", "po") for b in ("ra", "si", "tu", "ve") for c in "dgklmnrst"]


def words(rng: np.random.Generator, count: int) -> list[str]:
    return [WORDS[number] for number in rng.integers(0, len(WORDS), count)]


def jaccard(first: str, second: str, size: int = 5) -> float:
    a, b = (
        {tuple(part[i : i + size]) for i in range(len(part) - size + 1)}
        for part in (first.split() if " " in first else first, second.split() if " " in second else second)
    )
    return len(a & b) / len(a | b)


def changed(rng: np.random.Generator, text: list[str], changes: int) -> list[str]:
    """With words at its ends replaced, so that each change costs few shingles."""
    return [*words(rng, changes), *text[changes:]]


def test_the_first_of_each_kind_stays() -> None:
    seen = ExactDuplicates()
    assert seen.add(np.array([5, 7, 5, 2**64 - 1, 0, 7], dtype=np.uint64)).tolist() == [
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    assert seen.add(np.array([0, 1, 1, 5], dtype=np.uint64)).tolist() == [False, True, False, False]
    assert seen.add(np.array([], dtype=np.uint64)).tolist() == []
    assert len(seen) == 5


def test_batches_of_any_size_agree_with_a_plain_set() -> None:
    rng = np.random.default_rng(1)
    seen, plain = ExactDuplicates(), set[int]()
    for size in [*rng.integers(0, 400, 200).tolist(), 5000, 1]:
        batch = rng.integers(0, 40_000, size, dtype=np.uint64)
        expected = []
        for number in batch.tolist():
            expected.append(number not in plain)
            plain.add(number)
        assert seen.add(batch).tolist() == expected
    assert len(seen) == len(plain)


def test_a_fingerprint_costs_eight_bytes() -> None:
    seen = ExactDuplicates()
    for start in range(0, 200_000, 1000):
        assert seen.add(np.arange(start, start + 1000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).all()
    assert sum(run.nbytes for run in seen._runs.runs) == 8 * 200_000
    assert len(seen._runs.runs) <= 18


def pairs(rng: np.random.Generator, count: int, changes: int, chinese: bool) -> list[tuple[str, str]]:
    found = []
    for _ in range(count):
        first = [chr(number) for number in rng.integers(0x4E00, 0x5E00, 200)] if chinese else words(rng, 200)
        swap = [chr(number) for number in rng.integers(0x4E00, 0x5E00, changes)] if chinese else words(rng, changes)
        joint = "" if chinese else " "
        found.append((joint.join(first), joint.join([*swap, *first[changes:]])))
    return found


@pytest.mark.parametrize("chinese", [False, True])
@pytest.mark.parametrize("batch", [7, 1000])
def test_nearly_equal_texts_are_found(chinese: bool, batch: int) -> None:
    alike = pairs(np.random.default_rng(2), 200, 4, chinese)
    assert min(jaccard(*pair) for pair in alike) >= 0.95
    texts = [first for first, _ in alike] + [second for _, second in alike]
    near = NearDuplicates(0.8)
    kept = np.concatenate(
        [near.add([minhash_signature(t) for t in texts[i : i + batch]]) for i in range(0, len(texts), batch)]
    )
    assert kept[:200].all()
    assert kept[200:].mean() <= 0.05


@pytest.mark.parametrize("chinese", [False, True])
def test_texts_half_alike_stay(chinese: bool) -> None:
    half = pairs(np.random.default_rng(3), 200, 60, chinese)
    assert max(jaccard(*pair) for pair in half) < 0.6
    assert NearDuplicates(0.8).add([minhash_signature(text) for pair in half for text in pair]).all()


def test_unrelated_texts_are_never_removed() -> None:
    rng = np.random.default_rng(4)
    near = NearDuplicates(0.5)
    for _ in range(3):
        texts = [" ".join(words(rng, int(size))) for size in rng.integers(9, 300, 1000)]
        assert near.add([minhash_signature(text) for text in texts]).all()
    assert len(near) == 3000


def test_the_first_stays_and_what_is_like_a_removed_one_only_may_stay_too() -> None:
    rng = np.random.default_rng(5)
    text = words(rng, 300)
    chain = [text, changed(rng, text, 10), changed(rng, text, 20), text]
    assert NearDuplicates(0.8).add([minhash_signature(" ".join(one)) for one in chain]).tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_case_and_punctuation_do_not_matter() -> None:
    text = "One day the ferry came late, and nobody on the pier could say why it did. So we waited."
    assert (minhash_signature(text) == minhash_signature(text.upper().replace(",", " -- "))).all()


@pytest.mark.parametrize(
    "text", ["", "...", "too short to be compared with others", "太短了不能比", "\ud800\udfff" * 20]
)
def test_short_texts_are_left_to_the_exact_comparison(text: str) -> None:
    one = minhash_signature(text)
    assert len(one) == 0
    assert NearDuplicates(0.8).add([one, one]).tolist() == [True, True]


def test_a_signature_is_the_same_in_every_process() -> None:
    text = " ".join(words(np.random.default_rng(6), 100)) + "水在山上沸腾的温度比较低"
    script = f"from sojourn.data.clean.duplicates import minhash_signature; print(minhash_signature({text!r}).tolist())"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert told.strip() == str(minhash_signature(text).tolist())
    assert minhash_signature("a b c d e f g h i j k l m")[:3].tolist() == PINNED
    with get_context("spawn").Pool(1) as pool:
        assert (pool.map(minhash_signature, [text])[0] == minhash_signature(text)).all()


def test_many_texts_of_one_template_take_no_quadratic_time() -> None:
    rng = np.random.default_rng(7)
    frame = words(rng, 100)
    near = NearDuplicates(0.9)
    texts = [" ".join([*frame, *words(rng, 30)]) for _ in range(2000)]
    assert near.add([minhash_signature(text) for text in texts]).mean() > 0.9


def test_memory_is_what_the_docstring_says() -> None:
    near = NearDuplicates(0.8)
    near.add(list(np.random.default_rng(8).integers(0, 2**32, (1000, 128), dtype=np.uint32)))
    assert near.bands * 8 + 128 == 256
    assert sum(run.nbytes for run in near._buckets.runs) == 1000 * near.bands * 8


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(UserError, match=r"pip install 'sojourn\[clean\]'"):
        NearDuplicates(0.8)
