"""From rows to device batches: split into micro batches, padded, copied to the device; the next step's are prefetched.

Shapes: B rows, T tokens a row, N target tokens.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from sojourn.config.attention_backends import ATTENTION_BACKENDS
from sojourn.data.artefact import Batch, Split, read_batch
from sojourn.model.layout import Layout, compute_cu_seqlens, make_layout, pad_cu_seqlens
from sojourn.model.length_buckets import make_length_buckets
from sojourn.model.neftune import EmbeddingNoise, token_keys
from sojourn.train.faults.guard import wait_for

if TYPE_CHECKING:
    from torch import Tensor

    from sojourn.model.network import Network


@dataclass(frozen=True)
class DeviceBatch:
    """A micro batch on its device. `target_indices_N`: of the target tokens in the flattened batch, in order.

    `target_documents_N`: the document of each target token, counted over all rows; None unless the objective needs it.
    `is_real_BT`: which tokens are not padding; None unless the objective needs it.
    """

    ids_BT: Tensor
    positions_BT: Tensor
    target_indices_N: Tensor
    labels_N: Tensor
    layout: Layout | None
    target_documents_N: Tensor | None = None
    noise: EmbeddingNoise | None = None
    is_real_BT: Tensor | None = None

    def target_hidden(self, network: Network, router_logits: list[Tensor] | None = None) -> Tensor:
        """Hidden states of the target tokens, shape (N, D). `router_logits`: see Network.hidden_states."""
        hidden: Tensor = network.hidden_states(
            self.ids_BT, self.positions_BT, self.layout, self.target_indices_N, self.noise, router_logits
        )
        return hidden


@dataclass
class Batcher:
    micro_batch: int
    row_length: int
    pad_id: int
    device: str
    precision: str = "fp32"
    pad_to_longest: bool = False  # only as wide as the longest row of the micro batch: for rows of one document each
    backend: str | None = "sdpa"
    windows: tuple[int, ...] = ()
    unpad: bool = False  # all real tokens in one row, where that saves computing: see length_buckets.py
    needs_documents: bool = False  # of target tokens: see Objective
    needs_padding: bool = False  # which tokens are padding: see Objective
    neftune_alpha: float = 0.0  # 0: no noise
    seed: int = 0  # of the noise

    def batches(self, split: Split, rows: np.ndarray, step: int | None = None) -> Iterator[Batch]:
        """The rows in micro batches. `step`: that trains on them; without one NEFTune adds no noise."""
        for start in range(0, len(rows), self.micro_batch):
            chosen = rows[start : start + self.micro_batch]
            longest = (
                int((split.rows[chosen + 1] - split.rows[chosen]).max()) if self.pad_to_longest else self.row_length
            )
            batch = read_batch(split, chosen, min(self.row_length, -(-longest // 8) * 8), self.pad_id)
            if self.neftune_alpha and step is not None:
                batch = replace(batch, noise_keys=token_keys(chosen, batch.ids.shape[1], self.seed, step))
            yield batch

    def to_device(self, batch: Batch) -> DeviceBatch:
        buckets = None
        reads_buckets = self.backend is not None and ATTENTION_BACKENDS[self.backend].length_buckets
        if self.unpad and reads_buckets and not has_full_rows(batch):
            batch = unpad_rows(batch)
            buckets = make_length_buckets(batch.documents[0])
        target_indices = np.flatnonzero(batch.labels >= 0)
        layout = None
        if self.backend is not None:
            cu_seqlens = self._copy(pad_cu_seqlens(compute_cu_seqlens(batch.documents)))
            documents = self._copy(batch.documents)
            layout = make_layout(self.backend, batch.documents, documents, cu_seqlens, self.windows, buckets)
        return DeviceBatch(
            self._copy(batch.ids),
            self._copy(batch.positions),
            self._copy(target_indices),
            self._copy(batch.labels.reshape(-1)[target_indices]),
            layout,
            self._copy(number_documents(batch)[target_indices]) if self.needs_documents else None,
            None if batch.noise_keys is None else self._noise(batch, batch.noise_keys),
            self._copy(batch.documents >= 0) if self.needs_padding else None,
        )

    def _noise(self, batch: Batch, keys: np.ndarray) -> EmbeddingNoise:
        numbers, scales = number_documents(batch), np.zeros(batch.ids.size, np.float32)
        is_real = numbers >= 0
        scales[is_real] = self.neftune_alpha / np.sqrt(np.bincount(numbers[is_real])[numbers[is_real]])
        return EmbeddingNoise(self._copy(keys), self._copy(scales.reshape(keys.shape)))

    def _copy(self, array: np.ndarray) -> Tensor:
        import torch

        tensor = torch.from_numpy(array)
        if self.device == "cuda":  # pinned memory makes the copy asynchronous
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def autocast(self) -> AbstractContextManager[object]:
        import torch

        if self.precision == "fp32":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        autocast: AbstractContextManager[object] = torch.autocast(self.device, dtype=dtype)
        return autocast


def has_full_rows(batch: Batch) -> bool:
    """Whether every row is one document without padding."""
    return bool((batch.documents == 0).all())


def number_documents(batch: Batch) -> np.ndarray:
    """The document of each token of the flattened batch, counted over all rows without gaps; -1 for padding."""
    is_real, (rows, width) = batch.documents >= 0, batch.documents.shape
    numbers = np.full(batch.documents.shape, -1)
    distinct = (batch.documents + width * np.arange(rows)[:, None])[is_real]
    numbers[is_real] = np.unique(distinct, return_inverse=True)[1]
    return numbers.reshape(-1)


def unpad_rows(batch: Batch) -> Batch:
    """All real tokens in a single row, their documents numbered throughout."""
    is_real = batch.documents >= 0
    documents = number_documents(batch)[is_real.reshape(-1)]
    keys = None if batch.noise_keys is None else batch.noise_keys[is_real][None]
    ids, labels, positions = (array[is_real][None] for array in (batch.ids, batch.labels, batch.positions))
    return Batch(ids, labels, positions, documents[None], keys)


class Prefetcher:
    """Reads the next step's micro batches in a thread while this step computes. A read that hangs blocks no exit."""

    def __init__(self, read: Callable[[int], list[Batch]], total_steps: int) -> None:
        self._read, self._total_steps = read, total_steps
        self._requests: queue.SimpleQueue[tuple[int, Future[list[Batch]]] | None] = queue.SimpleQueue()
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def __enter__(self) -> Prefetcher:
        threading.Thread(target=self._serve, name="prefetch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests.put(None)

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            step, future = request
            try:
                future.set_result(self._read(step))
            except BaseException as error:
                future.set_exception(error)

    def discard(self) -> None:
        """Drops what was prefetched: the micro batch has changed, or the run has gone back to a checkpoint."""
        self._next = None

    def has(self, step: int) -> bool:
        """Whether the micro batches of `step` have been read already."""
        return self._next is not None and self._next[0] == step and self._next[1].done()

    def take(self, step: int) -> tuple[list[Batch], float]:
        """The micro batches of `step`, and the seconds that we waited for them. Requests those of the step after."""
        began = time.monotonic()
        prefetched = self._next[1] if self._next is not None and self._next[0] == step else None
        batches = self._read(step) if prefetched is None else wait_for(prefetched)
        data_wait = time.monotonic() - began
        self._next = None
        if step + 1 < self._total_steps:
            self._next = step + 1, Future()
            self._requests.put(self._next)
        return batches, data_wait
