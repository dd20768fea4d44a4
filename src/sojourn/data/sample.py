"""What `take` and `size` keep: a seeded sample of the documents, found in a first pass that tokenizes nothing.

Every document has a priority, a hash of its content and `data.seed`; those with the smallest are kept, in the order of
the file. So the sample depends on no order, chunk or worker. Memory is 16 bytes for each document that is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from sojourn.config.data import CleanConfig, Source
from sojourn.data.clean.duplicates import ExactDuplicates
from sojourn.data.encode import filter_reason
from sojourn.data.inputs import Inputs
from sojourn.data.sources.chunks import Chunk, Sample, copies_by_weight, parse_chunk, priorities
from sojourn.data.sources.source import OpenedSource
from sojourn.data.worker_pool import map_in_workers
from sojourn.errors import UserError

_PRUNE_ABOVE = 1 << 16


@dataclass
class _Kept:
    """The documents of one source with the smallest priorities: as many as `take` or as large as `size` allows."""

    source: Source
    most: int | None  # data.take
    total: int = 0
    priorities: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    copies: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, fingerprints: np.ndarray, sizes: np.ndarray, seed: int) -> None:
        self.total += len(fingerprints)
        self.priorities = np.concatenate([self.priorities, priorities(fingerprints, seed)])
        self.sizes = np.concatenate([self.sizes, sizes])
        self.copies = np.concatenate([self.copies, copies_by_weight(fingerprints, self.source.weight)])
        if len(self.priorities) > _PRUNE_ABOVE:
            self.prune()

    def prune(self) -> None:
        order = np.argsort(self.priorities, kind="stable")
        fits = np.ones(len(order), bool)
        if self.source.take is not None:
            fits[int(self.source.take) :] = False
        if self.source.size is not None:
            fits &= np.cumsum(self.sizes[order]) <= int(self.source.size)
        if self.most is not None:
            fits &= np.cumsum(self.copies[order]) - self.copies[order] < self.most
        order = order[fits]
        self.priorities, self.sizes, self.copies = self.priorities[order], self.sizes[order], self.copies[order]


class _Scanner:
    """Fingerprints and sizes of the documents that `data.clean` does not leave out."""

    def __init__(self, clean: CleanConfig) -> None:
        self._clean = clean

    def __call__(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        documents = [d for d in parse_chunk(chunk).documents if not filter_reason(d, self._clean)]
        fingerprints = np.array([d.fingerprint() for d in documents], np.uint64)
        return fingerprints, np.array([d.size for d in documents], np.int64)


def take_sample(inputs: Inputs, say: Callable[[str], None]) -> Inputs:
    """The inputs with each source limited to its sample, and `samples`, which says of how many documents it is."""
    data = inputs.data
    most = None if data.take is None else int(data.take)
    groups = [(opened, most) for opened in inputs.sources if most is not None or opened.is_limited]
    groups += [(opened, None) for opened in inputs.eval_sources if opened.is_limited]
    if not groups:
        return inputs
    say("counting documents for a sample of them")
    kept = _scan(inputs, groups)
    trained = [one for opened, one in zip((o for o, _ in groups), kept, strict=True) if opened in inputs.sources]
    threshold = _threshold(trained, most) if most is not None else None
    samples: dict[int, Sample] = {}
    for (opened, limit), one in zip(groups, kept, strict=True):
        inside = one.priorities if limit is None or threshold is None else one.priorities[one.priorities <= threshold]
        last = int(inside.max()) if len(inside) else -1
        samples[id(opened)] = Sample(data.seed, last, len(inside), one.total)
    limited = [
        [replace(opened, sample=samples.get(id(opened))) for opened in group]
        for group in (inputs.sources, inputs.eval_sources)
    ]
    return replace(inputs, sources=limited[0], eval_sources=limited[1])


def hold_out(inputs: Inputs, say: Callable[[str], None]) -> Inputs:
    """The inputs with the documents that are held out, where `data.eval_fraction` is a number of them."""
    wanted, seed = inputs.data.eval_documents, inputs.data.seed
    if wanted is None:
        return inputs
    say(f"counting documents to hold out {wanted:,} of them")
    smallest, total = np.zeros(0, np.uint64), 0
    for index, fingerprints, _ in _documents(inputs, inputs.sources):
        taken = fingerprints[copies_by_weight(fingerprints, inputs.sources[index].limits.weight) > 0]
        total += len(taken)
        smallest = np.sort(np.concatenate([smallest, priorities(taken, seed)]))[:wanted]
    if wanted >= total:
        raise UserError(
            f"data.eval_fraction: {wanted:,} documents to hold out, but there are {total:,}; give fewer, or a share "
            "such as 0.1"
        )
    return replace(inputs, held_out=Sample(seed, int(smallest[-1]), wanted, total))


def _scan(inputs: Inputs, groups: list[tuple[OpenedSource, int | None]]) -> list[_Kept]:
    kept = [_Kept(opened.limits, most) for opened, most in groups]
    for index, fingerprints, sizes in _documents(inputs, [opened for opened, _ in groups]):
        kept[index].add(fingerprints, sizes, inputs.data.seed)
    for one in kept:
        one.prune()
    return kept


def _documents(inputs: Inputs, sources: list[OpenedSource]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Of each chunk: the index of its source; fingerprints and sizes of the documents that `data.clean` keeps."""
    origins: deque[int] = deque()

    def chunks() -> Iterator[Chunk]:
        for index, opened in enumerate(sources):
            for chunk in opened.chunks():
                origins.append(index)
                yield chunk

    clean, exact = inputs.data.clean, ExactDuplicates()
    for fingerprints, sizes in map_in_workers(_Scanner, clean, chunks(), inputs.workers):
        new = np.ones(len(sizes), bool) if clean.duplicates == "keep" else exact.add(fingerprints)
        yield origins.popleft(), fingerprints[new], sizes[new]


def _threshold(kept: list[_Kept], most: int) -> int | None:
    """The largest priority that `data.take` keeps of all sources together; None if it keeps everything."""
    everything = np.concatenate([one.priorities for one in kept])
    copies = np.concatenate([one.copies for one in kept])
    order = np.argsort(everything, kind="stable")
    before = np.cumsum(copies[order]) - copies[order]
    inside = everything[order][before < most]
    return int(inside[-1]) if len(inside) else None
