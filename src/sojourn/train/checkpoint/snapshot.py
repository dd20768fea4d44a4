"""A copy of a checkpoint in host memory, so that training continues while it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sojourn.machine.hardware import memory
from sojourn.machine.out_of_memory import is_oom
from sojourn.run.checkpoints import PARTS
from sojourn.train.checkpoint.checkpoint import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor

_FREE_SHARE = 0.1  # of host memory stays free
_PINNED_FACTOR = 1.5  # torch rounds pinned allocations up


class Snapshots:
    """Keeps its buffers between saves: pinned memory is slow to allocate and fast to fill."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """None where host memory is too small: then training waits while the checkpoint is written."""
        new = checkpoint.size - sum(t.numel() * t.element_size() for t in self._buffers.values())
        on_gpu = any(tensor.is_cuda for tensor in checkpoint.model.values())
        seen = memory()
        if seen.available - max(0, new) * (_PINNED_FACTOR if on_gpu else 1) < _FREE_SHARE * seen.limit:
            self._buffers = {}
            return None
        try:
            return self._copy(checkpoint)
        except (RuntimeError, MemoryError) as error:  # pinned memory may run out first
            if not is_oom(error):
                raise
        self._buffers = {}
        return None

    def _copy(self, checkpoint: Checkpoint) -> Checkpoint:
        import torch

        parts: dict[str, dict[str, Tensor]] = {}
        used: dict[str, Tensor] = {}
        for part in PARTS:
            parts[part] = {}
            for name, tensor in getattr(checkpoint, part).items():
                key = f"{part}/{name}"
                buffer = self._buffer(key, tensor)
                buffer.copy_(tensor.detach(), non_blocking=True)
                parts[part][name] = used[key] = buffer
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._buffers = used
        return Checkpoint(**parts, state=checkpoint.state)

    def _buffer(self, key: str, tensor: Tensor) -> Tensor:
        import torch

        buffer = self._buffers.get(key)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
