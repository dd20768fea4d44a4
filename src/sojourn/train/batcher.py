"""How rows reach the model: how many at once, how wide, on which device, in which numbers, read one step ahead.

Shapes: B rows, T tokens a row, N target tokens.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from sojourn.data.artefact import Batch, Split, read_batch
from sojourn.model.layout import Layout, compute_cu_seqlens, make_layout, pad_cu_seqlens
from sojourn.model.length_buckets import make_length_buckets


@dataclass(frozen=True)
class DeviceBatch:
    """A batch on its device. `places_N` are the target tokens' places in the flattened batch."""

    ids_BT: Any
    positions_BT: Any
    places_N: Any
    labels_N: Any
    layout: Layout | None


@dataclass
class Batcher:
    micro_batch: int
    width: int
    pad_id: int
    device: str
    precision: str = "fp32"
    fit: bool = False  # rows hold one document each, and a batch is only as wide as its longest
    backend: str | None = "sdpa"
    windows: tuple[int, ...] = ()
    joined: bool = False  # real tokens end to end where that saves anything: see model/length_buckets.py

    def batches(self, split: Split, rows: np.ndarray) -> Iterator[Batch]:
        for start in range(0, len(rows), self.micro_batch):
            chosen = rows[start : start + self.micro_batch]
            width = int((split.rows[chosen + 1] - split.rows[chosen]).max()) if self.fit else self.width
            yield read_batch(split, chosen, min(self.width, -(-width // 8) * 8), self.pad_id)

    def ready(self, batch: Batch) -> DeviceBatch:
        grids = None
        if self.joined and self.backend == "sdpa" and not has_full_rows(batch):
            batch = join_rows(batch)
            grids = make_length_buckets(batch.documents[0])
        places = np.flatnonzero(batch.labels >= 0)
        layout = None
        if self.backend is not None:
            starts = self._to(pad_cu_seqlens(compute_cu_seqlens(batch.documents)))
            layout = make_layout(self.backend, batch.documents, self._to(batch.documents), starts, self.windows, grids)
        labels = batch.labels.reshape(-1)[places]
        return DeviceBatch(self._to(batch.ids), self._to(batch.positions), self._to(places), self._to(labels), layout)

    def _to(self, array: np.ndarray) -> Any:
        import torch

        tensor = torch.from_numpy(array)
        if self.device == "cuda":  # from pinned memory, so that the copy need not be waited for
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def autocast(self) -> Any:
        import torch

        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16 if self.precision == "bf16" else torch.float16)


def has_full_rows(batch: Batch) -> bool:
    """Whether every row is one document without padding."""
    return bool((batch.documents == 0).all())


def join_rows(batch: Batch) -> Batch:
    """Its real tokens in a single row, their documents numbered throughout."""
    real, (rows, width) = batch.documents >= 0, batch.documents.shape
    _, documents = np.unique((batch.documents + width * np.arange(rows)[:, None])[real], return_inverse=True)
    return Batch(batch.ids[real][None], batch.labels[real][None], batch.positions[real][None], documents[None])


class Prefetcher:
    """Reads the next step's batches in a thread while the present step computes. One that hangs holds nobody up."""

    def __init__(self, read: Callable[[int], list[Batch]], last: int) -> None:
        self._read, self._last = read, last
        self._asked: queue.SimpleQueue[tuple[int, Future[list[Batch]]] | None] = queue.SimpleQueue()
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def __enter__(self) -> Prefetcher:
        threading.Thread(target=self._work, name="rows", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._asked.put(None)

    def _work(self) -> None:
        while (wanted := self._asked.get()) is not None:
            step, answer = wanted
            try:
                answer.set_result(self._read(step))
            except BaseException as error:
                answer.set_exception(error)

    def forget(self) -> None:
        """What was read ahead is no longer wanted: batches are cut differently now, or the run has gone back."""
        self._next = None

    def has(self, step: int) -> bool:
        """Whether the batches of `step` have been read already."""
        return self._next is not None and self._next[0] == step and self._next[1].done()

    def take(self, step: int) -> tuple[list[Batch], float]:
        """The batches of `step`, and how long they kept us waiting."""
        began = time.monotonic()
        ahead = self._next is not None and self._next[0] == step
        batches = self._next[1].result() if self._next is not None and ahead else self._read(step)
        waited = time.monotonic() - began
        self._next = None
        if step + 1 < self._last:
            self._next = step + 1, Future()
            self._asked.put(self._next)
        return batches, waited
