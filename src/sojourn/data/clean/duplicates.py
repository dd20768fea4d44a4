"""Exact and near-duplicate detection in little memory: a fixed number of bytes per document that is kept.

MinHash signatures are computed by rensa. Its LSH index takes about 1,700 bytes a document (rensa 0.5, 20,000
documents); these sorted arrays, which double in size and merge, take 256 and look up a batch with a few binary
searches.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sojourn.data.order import splitmix64
from sojourn.errors import UserError

HASHES = 128
SHINGLE_WORDS = 5
MIN_SHINGLES = 5
SEED = 0x50F0
MAX_PER_BUCKET = 64
_LOW_BITS = np.uint64(32)

# Thai and Lao, Burmese, Khmer, kana, Han: written without spaces, so each character is a word.
_UNSPACED = ((0x0E00, 0x0F00), (0x1000, 0x10A0), (0x1780, 0x1800), (0x3041, 0x3100), (0x3400, 0xA000), (0xF900, 0xFB00))
_SEPARATOR, _LETTER, _WORD = 0, 1, 2  # what a character is to a word
_PLANES_END = 0x20000  # all beyond is Han


class SortedRuns:
    """A growing set of 64-bit integers as sorted arrays, each at least twice as long as the next: 8 bytes a number."""

    def __init__(self) -> None:
        self.runs: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(len(run) for run in self.runs)

    def add(self, numbers: np.ndarray) -> None:
        """`numbers` must be sorted."""
        if not len(numbers):
            return
        while self.runs and len(self.runs[-1]) < 2 * len(numbers):
            # Stable: numpy then merges two sorted halves in one pass.
            numbers = np.sort(np.concatenate((self.runs.pop(), numbers)), kind="stable")
        self.runs.append(numbers)

    def contains(self, numbers: np.ndarray) -> np.ndarray:
        contained = np.zeros(len(numbers), dtype=bool)
        for run in self.runs:
            contained |= run[np.minimum(np.searchsorted(run, numbers), len(run) - 1)] == numbers
        return contained


class ExactDuplicates:
    """Exact duplicates by 64-bit fingerprint: 8 bytes a document."""

    def __init__(self) -> None:
        self._runs = SortedRuns()

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, fingerprints: np.ndarray) -> np.ndarray:
        """For each, whether it is new: the first with this value in this batch and all earlier ones."""
        distinct, first = np.unique(np.asarray(fingerprints, dtype=np.uint64), return_index=True)
        fresh = ~self._runs.contains(distinct)
        self._runs.add(distinct[fresh])
        mask = np.zeros(len(fingerprints), dtype=bool)
        mask[first[fresh]] = True
        return mask


def minhash_signature(text: str) -> np.ndarray:
    """The MinHash signature of a text: 128 minima over shingles of five words (characters, where there are no spaces).

    The same on every machine. Empty for a text that is too short.
    """
    words = _word_hashes(text)
    count = len(words) - SHINGLE_WORDS + 1
    if count < MIN_SHINGLES:
        return np.empty(0, dtype=np.uint32)
    shingles = words[:count].copy()
    for start in range(1, SHINGLE_WORDS):
        shingles *= np.uint64(0x9E3779B97F4A7C15)
        shingles += words[start : start + count]
    rows = _minhash().digest_matrix_from_flat_token_hashes(shingles, [0, count], HASHES, SEED).to_rows()
    return np.array(rows[0], dtype=np.uint32)


def _word_hashes(text: str) -> np.ndarray:
    """A 64-bit hash of each word; case and punctuation do not matter."""
    codes = np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    kinds = _character_kinds()[np.minimum(codes, _PLANES_END)]
    begins = kinds != _SEPARATOR
    begins[1:] &= (kinds[1:] == _WORD) | (kinds[:-1] != _LETTER)
    starts = np.flatnonzero(begins)
    if not len(starts):
        return np.empty(0, dtype=np.uint64)
    positions = np.arange(len(codes)) - starts[np.maximum(np.cumsum(begins) - 1, 0)]
    letters = splitmix64((positions.astype(np.uint64) << _LOW_BITS) + codes, SEED) * (kinds != _SEPARATOR)
    return np.add.reduceat(letters, starts)


@lru_cache(maxsize=1)
def _character_kinds() -> np.ndarray:
    kinds = np.full(_PLANES_END + 1, _SEPARATOR, dtype=np.uint8)
    for code in range(_PLANES_END):
        if (character := chr(code)).isalnum() or unicodedata.category(character) in ("Mn", "Mc"):
            kinds[code] = _LETTER
    for first, stop in _UNSPACED:
        part = kinds[first:stop]
        part[part == _LETTER] = _WORD
    kinds[_PLANES_END] = _WORD
    return kinds


class NearDuplicates:
    """Near duplicates: MinHash signatures, looked up by LSH bands, then compared.

    A kept document takes 128 bytes (8 bits of each minimum) and 8 bytes a band; at a similarity of 0.8, 256 bytes.
    """

    def __init__(self, similarity: float) -> None:
        _minhash()
        self.bands, self.rows = _choose_bands(similarity)
        self.min_equal = math.ceil(HASHES * (similarity + (1 - similarity) / 256) - 1e-9)
        self._buckets = SortedRuns()
        self._signatures = _SignatureStore()

    def __len__(self) -> int:
        return len(self._signatures)

    def add(self, signatures: Sequence[np.ndarray]) -> np.ndarray:
        """For each, whether it is new: like no earlier one, or too short to be compared."""
        mask = np.ones(len(signatures), dtype=bool)
        indices = np.array([index for index, one in enumerate(signatures) if len(one)], dtype=np.int64)
        if not len(indices):
            return mask
        minima = np.stack([signatures[index] for index in indices])
        keys, short = self._band_keys(minima), _to_8_bits(minima)
        kept = ~self._is_like_earlier(keys, short)
        for earlier, later in self._similar_pairs(keys, short, kept):
            kept[later] &= ~kept[earlier]
        self._store(keys[kept], short[kept])
        mask[indices] = kept
        return mask

    def _band_keys(self, minima: np.ndarray) -> np.ndarray:
        """A 32-bit key for each band, in the upper half of 64 bits; the lower half is for the document's index."""
        parts = minima[:, : self.bands * self.rows].reshape(len(minima), self.bands, self.rows)
        keys = np.broadcast_to(np.arange(self.bands, dtype=np.uint64), parts.shape[:2])
        for row in range(self.rows):
            keys = splitmix64(keys ^ parts[:, :, row], row)
        upper: np.ndarray = keys >> _LOW_BITS << _LOW_BITS
        return upper

    def _is_like_earlier(self, keys: np.ndarray, short: np.ndarray) -> np.ndarray:
        """Which of them are like one that an earlier batch added."""
        like_earlier = np.zeros(len(keys), dtype=bool)
        entries, owners = _sorted_entries(keys, len(self._signatures))
        for run in self._buckets.runs:
            for earlier, asking in _candidates(run, entries, owners):
                alike = (self._signatures[earlier] == short[asking]).sum(axis=1) >= self.min_equal
                like_earlier[asking[alike]] = True
        return like_earlier

    def _similar_pairs(self, keys: np.ndarray, short: np.ndarray, among: np.ndarray) -> list[tuple[int, int]]:
        """Pairs (earlier, later) within the batch, in the order of the later."""
        rows = np.flatnonzero(among)
        entries, owners = _sorted_entries(keys[rows], 0)
        pairs: set[tuple[int, int]] = set()
        for earlier, later in _candidates(entries, entries, owners):
            alike = (short[rows[earlier]] == short[rows[later]]).sum(axis=1) >= self.min_equal
            pairs.update(zip(rows[earlier[alike]].tolist(), rows[later[alike]].tolist(), strict=True))
        return sorted(pairs, key=lambda pair: pair[::-1])

    def _store(self, keys: np.ndarray, short: np.ndarray) -> None:
        entries, _ = _sorted_entries(keys, len(self._signatures))
        self._signatures.extend(short)
        self._buckets.add(entries)


class _SignatureStore:
    """8-bit signatures by index, in blocks, so that growing never copies."""

    BLOCK = 1 << 14

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, rows: np.ndarray) -> None:
        while len(rows):
            used = self._count % self.BLOCK
            if not used:
                self._blocks.append(np.empty((self.BLOCK, HASHES), dtype=np.uint8))
            part = rows[: self.BLOCK - used]
            self._blocks[-1][used : used + len(part)] = part
            self._count += len(part)
            rows = rows[len(part) :]

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        rows = np.empty((len(numbers), HASHES), dtype=np.uint8)
        blocks = numbers // self.BLOCK
        for block in np.unique(blocks):
            here = blocks == block
            rows[here] = self._blocks[int(block)][numbers[here] % self.BLOCK]
        return rows


def _choose_bands(similarity: float) -> tuple[int, int]:
    """The longest bands, which give the fewest false candidates, that find 90 % of pairs of this similarity."""
    for rows in range(HASHES, 0, -1):
        bands = HASHES // rows
        if 1 - (1 - similarity**rows) ** bands >= 0.9:
            return bands, rows
    return HASHES, 1


def _to_8_bits(minima: np.ndarray) -> np.ndarray:
    """8 hashed bits of each: two different minima agree in one of 256."""
    bits: np.ndarray = minima * np.uint32(0x9E3779B1) >> np.uint32(24)
    return bits.astype(np.uint8)


def _sorted_entries(keys: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Key and document index as one integer, sorted, and the row of `keys` that each came from."""
    entries = (keys | np.arange(first, first + len(keys), dtype=np.uint64)[:, None]).ravel()
    order = np.argsort(entries, kind="stable")
    return entries[order], order // keys.shape[1]


def _candidates(run: np.ndarray, entries: np.ndarray, owners: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For entries that share a key with earlier documents in `run`: arrays of those documents and of the owners.

    Only the newest documents of a full bucket are compared: many texts of one template would take quadratic time.
    """
    starts = np.searchsorted(run, entries >> _LOW_BITS << _LOW_BITS)
    met = np.flatnonzero(run[np.minimum(starts, len(run) - 1)] >> _LOW_BITS == entries >> _LOW_BITS)
    stops = np.searchsorted(run, entries[met])
    starts = np.maximum(starts[met], stops - MAX_PER_BUCKET)
    for back in range(int((stops - starts).max(initial=0))):
        there = stops - starts > back
        numbers = run[stops[there] - back - 1] & np.uint64(0xFFFFFFFF)
        yield numbers.astype(np.int64), owners[met[there]]


def _minhash() -> Any:
    try:
        from rensa import RMinHash
    except ImportError:
        raise UserError("data.clean.duplicates=near needs rensa: pip install 'sojourn[clean]'") from None
    return RMinHash
