"""Optimizer states in pinned host memory, streamed through buffers on the device.

States travel in chunks of elements. A chunk is copied to the device in one stream, updated in the current one, and
copied back in a third, so that copies in both directions overlap with the backward. The chunks of a step come in the
same order as in the last one; as many as there are buffers for are fetched ahead. The buffers' memory is fixed, however
large a parameter is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Chunk:
    """Elements `start` to `end` of the parameter with this number."""

    number: int
    start: int
    end: int


@dataclass
class _Buffer:
    tensors: Tensors
    filled: Any = None  # CUDA events: its chunk is on the device
    written_back: Any = None  # ... and in host memory again


class HostStates:
    """`on_host`: the states of a chunk, as views of host memory. `buffers`: on the device, each for one chunk."""

    def __init__(self, device: torch.device, on_host: Callable[[Chunk], Tensors], buffers: list[Tensors]) -> None:
        self._device, self._on_host = device, on_host
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else None
        self._free = deque(_Buffer(tensors) for tensors in buffers)
        self._ahead: deque[tuple[Chunk, _Buffer]] = deque()
        self._order: list[Chunk] = []  # of the last step
        self._positions: dict[Chunk, int] = {}
        self._seen: list[Chunk] = []  # in this step
        self._next = 0  # in `_order`: the chunk to fetch next

    def start_step(self) -> None:
        """Fetches the first chunks of a step. Copies from the last step come first."""
        if self._seen:
            self._order, self._seen = self._seen, []
            self._positions = {chunk: position for position, chunk in enumerate(self._order)}
            self.forget()
        if self._streams is not None:
            self._streams[0].wait_stream(self._streams[1])
        self._fetch_ahead()

    def forget(self) -> None:
        """What was fetched ahead: the states on the host have changed, or chunks come in another order."""
        while self._ahead:
            self._free.append(self._ahead.popleft()[1])
        self._next = 0

    def synchronize(self) -> None:
        """Until all states are in host memory."""
        if self._streams is not None:
            self._streams[1].synchronize()

    def update(self, chunk: Chunk, work: Callable[[Tensors], None]) -> None:
        """Calls `work` with the chunk's states on the device, and copies them back."""
        buffer = self._take(chunk)
        self._fetch_ahead()
        on_host = self._on_host(chunk)
        states = {key: buffer.tensors[key][: len(tensor)] for key, tensor in on_host.items()}
        if self._streams is None:
            work(states)
            _copy(states, on_host)
        else:
            current, back = torch.cuda.current_stream(self._device), self._streams[1]
            current.wait_event(buffer.filled)
            work(states)
            back.wait_stream(current)
            with torch.cuda.stream(back):
                _copy(states, on_host)
                buffer.written_back = back.record_event()
        self._seen.append(chunk)
        self._free.append(buffer)

    def _take(self, chunk: Chunk) -> _Buffer:
        if not self._ahead or self._ahead[0][0] != chunk:
            self.forget()
            self._fetch(chunk)
            self._next = self._positions.get(chunk, len(self._order)) + 1
        return self._ahead.popleft()[1]

    def _fetch_ahead(self) -> None:
        while self._free and self._next < len(self._order):
            self._fetch(self._order[self._next])
            self._next += 1

    def _fetch(self, chunk: Chunk) -> None:
        on_host = self._on_host(chunk)
        buffer = self._free.popleft()
        states = {key: buffer.tensors[key][: len(tensor)] for key, tensor in on_host.items()}
        if self._streams is None:
            _copy(on_host, states)
        else:
            there = self._streams[0]
            if buffer.written_back is not None:
                there.wait_event(buffer.written_back)
            with torch.cuda.stream(there):
                _copy(on_host, states)
                buffer.filled = there.record_event()
        self._ahead.append((chunk, buffer))


def _copy(source: Tensors, target: Tensors) -> None:
    for key, tensor in source.items():
        target[key].copy_(tensor, non_blocking=True)
