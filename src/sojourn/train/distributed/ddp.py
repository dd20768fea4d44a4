"""Distributed data parallel: every rank has all the weights and its shard of the rows; gradients are all-reduced.

Gradients live in flat buckets; each parameter's gradient is a view of one. In the backward of a step's last micro batch
a bucket is all-reduced as soon as it is full, overlapping with the rest of the backward; earlier micro batches only
accumulate. torch's `DistributedDataParallel` does the same, but where one rank runs out of memory in its backward the
others wait for its buckets until they time out. Here that rank sends its buckets anyway, and all discard the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from sojourn.train.distributed.engine import Engine

_BUCKET_BYTES = 32 << 20


class _Bucket:
    def __init__(self, parameters: list[Parameter]) -> None:
        first = parameters[0]
        self.parameters = parameters
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        ends = [*torch.tensor([p.numel() for p in parameters]).cumsum(0).tolist()]
        self.views = [self.flat[end - p.numel() : end].view_as(p) for p, end in zip(parameters, ends, strict=True)]
        self.missing = 0  # gradients of the last micro batch that are not there yet

    def zero(self) -> None:
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view


class Ddp(Engine):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._buckets = [_Bucket(parameters) for parameters in _bucketed(self.optimizer.parameters)]
        self._sent: list[Any] = []
        self._last = False
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, of=bucket: self._gradient_ready(of))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        for bucket in self._buckets:
            bucket.zero()
            bucket.missing = len(bucket.parameters)
        self._sent, self._last = [], False
        with self.ranks.raise_oom_on_all_ranks(self._finish):
            yield

    def backward(self, loss: Tensor, last: bool) -> None:
        self._last = last
        super().backward(loss, last)

    def _gradient_ready(self, bucket: _Bucket) -> None:
        if self._last:
            bucket.missing -= 1
            self._send(only_full=True)

    def _send(self, only_full: bool) -> None:
        """In the same order on all ranks, whichever bucket was full first."""
        while len(self._sent) < len(self._buckets):
            bucket = self._buckets[len(self._sent)]
            if only_full and bucket.missing > 0:
                return
            self._sent.append(dist.all_reduce(bucket.flat, async_op=True))

    def _finish(self) -> None:
        """Also on a rank without targets, or out of memory: the other ranks wait for its buckets."""
        self._send(only_full=False)
        for work in self._sent:
            work.wait()


def _bucketed(parameters: list[Parameter]) -> list[list[Parameter]]:
    """From the last parameter to the first, the order of a backward."""
    buckets: list[list[Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        bytes_ = parameter.numel() * parameter.element_size()
        if not buckets or size + bytes_ > _BUCKET_BYTES or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += bytes_
    return buckets
