"""Data parallel: every process has all the weights, reads its share of the rows, and gradients are summed.

Gradients live in flat buckets, of which each parameter's gradient is a view. In a step's last pass a bucket travels as
soon as it is full, while the rest of the backward goes on; passes before it keep to themselves. torch's own wrapper
does the same, but where one process runs out of memory in its backward, the others would wait for its buckets for ever.
Here it sends them all the same, and what came of it is thrown away by all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from sojourn.train.distributed.engine import Engine

_BUCKET = 32 << 20  # bytes


class _Bucket:
    def __init__(self, parameters: list[Any]) -> None:
        first = parameters[0]
        self.parameters = parameters
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        ends = [*torch.tensor([p.numel() for p in parameters]).cumsum(0).tolist()]
        self.views = [self.flat[end - p.numel() : end].view_as(p) for p, end in zip(parameters, ends, strict=True)]
        self.lacks = 0

    def empty(self) -> None:
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view


class Ddp(Engine):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._buckets = [_Bucket(parameters) for parameters in _grouped(self.optimizer.parameters)]
        self._sent: list[Any] = []
        self._last = False
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, of=bucket: self._filled(of))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        for bucket in self._buckets:
            bucket.empty()
            bucket.lacks = len(bucket.parameters)
        self._sent, self._last = [], False
        with self.ranks.raise_oom_on_all_ranks(self._finish):
            yield

    def backward(self, loss: Any, last: bool) -> None:
        self._last = last
        super().backward(loss, last)

    def _filled(self, bucket: _Bucket) -> None:
        if self._last:
            bucket.lacks -= 1
            self._send(only_full=True)

    def _send(self, only_full: bool) -> None:
        """In the same order everywhere, whichever was full first."""
        while len(self._sent) < len(self._buckets):
            bucket = self._buckets[len(self._sent)]
            if only_full and bucket.lacks > 0:
                return
            self._sent.append(dist.all_reduce(bucket.flat, async_op=True))

    def _finish(self) -> None:
        """Also where there was nothing to learn from, or memory ran out."""
        self._send(only_full=False)
        for work in self._sent:
            work.wait()


def _grouped(parameters: list[Any]) -> list[list[Any]]:
    """From the last to the first, as a backward comes to them."""
    found: list[list[Any]] = []
    size = 0
    for parameter in reversed(parameters):
        bytes_ = parameter.numel() * parameter.element_size()
        if not found or size + bytes_ > _BUCKET or found[-1][0].dtype != parameter.dtype:
            found.append([])
            size = 0
        found[-1].append(parameter)
        size += bytes_
    return found
