"""Which documents were seen before: the same to the letter, or nearly so, in memory that stays small.

Both classes keep sorted arrays that double in size and merge, so a batch of documents is looked up with a handful of
binary searches, and the cost in memory is a fixed number of bytes per document that stays.
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
SHINGLE = 5
MIN_SHINGLES = 5
SEED = 0x50F0
MOST_PER_BUCKET = 64
LOW = np.uint64(32)

# Thai and Lao, Burmese, Khmer, kana, Han: written without spaces, so each character counts as a word.
_UNSPACED = ((0x0E00, 0x0F00), (0x1000, 0x10A0), (0x1780, 0x1800), (0x3041, 0x3100), (0x3400, 0xA000), (0xF900, 0xFB00))
_GAP, _LETTER, _ALONE = 0, 1, 2
_PLANE = 0x20000


class SortedRuns:
    """A growing set of 64-bit numbers as sorted arrays, each at least twice the next: few of them, 8 bytes a number."""

    def __init__(self) -> None:
        self.runs: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(len(run) for run in self.runs)

    def add(self, numbers: np.ndarray) -> None:
        """`numbers` in ascending order."""
        if not len(numbers):
            return
        while self.runs and len(self.runs[-1]) < 2 * len(numbers):
            # Stable: numpy then merges two sorted halves in one pass.
            numbers = np.sort(np.concatenate((self.runs.pop(), numbers)), kind="stable")
        self.runs.append(numbers)

    def has(self, numbers: np.ndarray) -> np.ndarray:
        found = np.zeros(len(numbers), dtype=bool)
        for run in self.runs:
            found |= run[np.minimum(np.searchsorted(run, numbers), len(run) - 1)] == numbers
        return found


class ExactDuplicates:
    """Exact duplicates by fingerprint: 8 bytes a document."""

    def __init__(self) -> None:
        self._runs = SortedRuns()

    def __len__(self) -> int:
        return len(self._runs)

    def new(self, fingerprints: np.ndarray) -> np.ndarray:
        """For each, whether it is the first of its kind, in this batch and all before it."""
        distinct, first = np.unique(np.asarray(fingerprints, dtype=np.uint64), return_index=True)
        fresh = ~self._runs.has(distinct)
        self._runs.add(distinct[fresh])
        mask = np.zeros(len(fingerprints), dtype=bool)
        mask[first[fresh]] = True
        return mask


def minhash_signature(text: str) -> np.ndarray:
    """What `NearDuplicates` compares: 128 minima over runs of five words (or characters, where there are no spaces).

    The same in every process and on every machine. Empty for a text too short to be compared.
    """
    words = _words(text)
    count = len(words) - SHINGLE + 1
    if count < MIN_SHINGLES:
        return np.empty(0, dtype=np.uint32)
    shingles = words[:count].copy()
    for start in range(1, SHINGLE):
        shingles *= np.uint64(0x9E3779B97F4A7C15)
        shingles += words[start : start + count]
    rows = _minhash().digest_matrix_from_flat_token_hashes(shingles, [0, count], HASHES, SEED).to_rows()
    return np.array(rows[0], dtype=np.uint32)


def _words(text: str) -> np.ndarray:
    """64 bits for each word; case and punctuation do not matter."""
    codes = np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    kinds = _kinds()[np.minimum(codes, _PLANE)]
    begins = kinds != _GAP
    begins[1:] &= (kinds[1:] == _ALONE) | (kinds[:-1] != _LETTER)
    starts = np.flatnonzero(begins)
    if not len(starts):
        return np.empty(0, dtype=np.uint64)
    places = np.arange(len(codes)) - starts[np.maximum(np.cumsum(begins) - 1, 0)]
    letters = splitmix64((places.astype(np.uint64) << LOW) + codes, SEED) * (kinds != _GAP)
    return np.add.reduceat(letters, starts)


@lru_cache(maxsize=1)
def _kinds() -> np.ndarray:
    """What each character is to a word; all beyond the first two planes is Han."""
    kinds = np.full(_PLANE + 1, _GAP, dtype=np.uint8)
    for code in range(_PLANE):
        if (character := chr(code)).isalnum() or unicodedata.category(character) in ("Mn", "Mc"):
            kinds[code] = _LETTER
    for first, stop in _UNSPACED:
        part = kinds[first:stop]
        part[part == _LETTER] = _ALONE
    kinds[_PLANE] = _ALONE
    return kinds


class NearDuplicates:
    """Near duplicates: MinHash signatures, looked up by bands, then compared.

    A document that stays costs 128 bytes (8 bits of each minimum) and 8 bytes a band; at 0.8, 256 bytes in all.
    """

    def __init__(self, similarity: float) -> None:
        _minhash()
        self.bands, self.rows = _bands(similarity)
        self.needed = math.ceil(HASHES * (similarity + (1 - similarity) / 256) - 1e-9)
        self._buckets = SortedRuns()
        self._kept = _Rows()

    def __len__(self) -> int:
        return len(self._kept)

    def new(self, signatures: Sequence[np.ndarray]) -> np.ndarray:
        """For each, whether it stays: the first of its kind does, and so does a text too short to be compared."""
        mask = np.ones(len(signatures), dtype=bool)
        places = np.array([place for place, one in enumerate(signatures) if len(one)], dtype=np.int64)
        if not len(places):
            return mask
        minima = np.stack([signatures[place] for place in places])
        keys, short = self._keys(minima), _short(minima)
        kept = ~self._known(keys, short)
        for earlier, later in self._alike(keys, short, kept):
            kept[later] &= ~kept[earlier]
        self._keep(keys[kept], short[kept])
        mask[places] = kept
        return mask

    def _keys(self, minima: np.ndarray) -> np.ndarray:
        """A 32-bit key for each band, in the upper half of 64 bits; the lower half is for who has it."""
        parts = minima[:, : self.bands * self.rows].reshape(len(minima), self.bands, self.rows)
        keys = np.broadcast_to(np.arange(self.bands, dtype=np.uint64), parts.shape[:2])
        for row in range(self.rows):
            keys = splitmix64(keys ^ parts[:, :, row], row)
        upper: np.ndarray = keys >> LOW << LOW
        return upper

    def _known(self, keys: np.ndarray, short: np.ndarray) -> np.ndarray:
        """Which of them are like one kept in an earlier batch."""
        known = np.zeros(len(keys), dtype=bool)
        entries, owners = _sorted_entries(keys, len(self._kept))
        for run in self._buckets.runs:
            for kept, asking in _sharing(run, entries, owners):
                alike = (self._kept[kept] == short[asking]).sum(axis=1) >= self.needed
                known[asking[alike]] = True
        return known

    def _alike(self, keys: np.ndarray, short: np.ndarray, among: np.ndarray) -> list[tuple[int, int]]:
        """Pairs (earlier, later) within the batch, in the order of the later."""
        rows = np.flatnonzero(among)
        entries, owners = _sorted_entries(keys[rows], 0)
        pairs: set[tuple[int, int]] = set()
        for earlier, later in _sharing(entries, entries, owners):
            alike = (short[rows[earlier]] == short[rows[later]]).sum(axis=1) >= self.needed
            pairs.update(zip(rows[earlier[alike]].tolist(), rows[later[alike]].tolist(), strict=True))
        return sorted(pairs, key=lambda pair: pair[::-1])

    def _keep(self, keys: np.ndarray, short: np.ndarray) -> None:
        entries, _ = _sorted_entries(keys, len(self._kept))
        self._kept.extend(short)
        self._buckets.add(entries)


class _Rows:
    """Short signatures by number, in blocks, so that growing never copies."""

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
        found = np.empty((len(numbers), HASHES), dtype=np.uint8)
        blocks = numbers // self.BLOCK
        for block in np.unique(blocks):
            here = blocks == block
            found[here] = self._blocks[int(block)][numbers[here] % self.BLOCK]
        return found


def _bands(similarity: float) -> tuple[int, int]:
    """The longest bands, which meet the fewest strangers, that find nine of ten pairs of just that similarity."""
    for rows in range(HASHES, 0, -1):
        bands = HASHES // rows
        if 1 - (1 - similarity**rows) ** bands >= 0.9:
            return bands, rows
    return HASHES, 1


def _short(minima: np.ndarray) -> np.ndarray:
    """8 well-mixed bits of each: two different minima agree in one of 256."""
    bits: np.ndarray = minima * np.uint32(0x9E3779B1) >> np.uint32(24)
    return bits.astype(np.uint8)


def _sorted_entries(keys: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Key and number of its document as one integer, ascending, and the row in `keys` that each came from."""
    entries = (keys | np.arange(first, first + len(keys), dtype=np.uint64)[:, None]).ravel()
    order = np.argsort(entries, kind="stable")
    return entries[order], order // keys.shape[1]


def _sharing(run: np.ndarray, entries: np.ndarray, owners: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For entries that share a key with smaller numbers in `run`: those numbers and the owners, in arrays to compare.

    Of a full bucket only the newest are looked at: a crowd of texts from one template would take quadratic time.
    """
    starts = np.searchsorted(run, entries >> LOW << LOW)
    met = np.flatnonzero(run[np.minimum(starts, len(run) - 1)] >> LOW == entries >> LOW)
    stops = np.searchsorted(run, entries[met])
    starts = np.maximum(starts[met], stops - MOST_PER_BUCKET)
    for back in range(int((stops - starts).max(initial=0))):
        there = stops - starts > back
        numbers = run[stops[there] - back - 1] & np.uint64(0xFFFFFFFF)
        yield numbers.astype(np.int64), owners[met[there]]


def _minhash() -> Any:
    try:
        from rensa import RMinHash
    except ImportError:
        raise UserError("near duplicates need rensa: pip install 'sojourn[clean]'") from None
    return RMinHash
