"""A copy of a checkpoint in the host's memory, so that training goes on while it is written."""

from __future__ import annotations

from typing import Any

from sojourn.machine.hardware import memory
from sojourn.train.checkpoint.checkpoint import PARTS, Checkpoint
from sojourn.train.faults.oom_fallback import is_oom

_SPARE = 0.1  # of the host's memory stays free
_PINNED = 1.5  # torch rounds pinned pieces up


class Snapshots:
    """The places for the copy are made once and used again: pinned memory is slow to get and fast to fill."""

    def __init__(self) -> None:
        self._places: dict[str, Any] = {}

    def take(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """None where the host has no memory for it: such a checkpoint is written while training waits."""
        new = checkpoint.size - sum(t.numel() * t.element_size() for t in self._places.values())
        on_gpu = any(tensor.is_cuda for tensor in checkpoint.model.values())
        seen = memory()
        if seen.available - max(0, new) * (_PINNED if on_gpu else 1) < _SPARE * seen.limit:
            self._places = {}
            return None
        try:
            return self._copied(checkpoint)
        except (RuntimeError, MemoryError) as error:  # pinned memory may be shorter than the host's
            if not is_oom(error):
                raise
        self._places = {}
        return None

    def _copied(self, checkpoint: Checkpoint) -> Checkpoint:
        import torch

        parts: dict[str, dict[str, Any]] = {}
        used: dict[str, Any] = {}
        for part in PARTS:
            parts[part] = {}
            for name, tensor in getattr(checkpoint, part).items():
                key = f"{part}/{name}"
                place = self._place(key, tensor)
                place.copy_(tensor.detach(), non_blocking=True)
                parts[part][name] = used[key] = place
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._places = used
        return Checkpoint(**parts, state=checkpoint.state)

    def _place(self, key: str, tensor: Any) -> Any:
        import torch

        kept = self._places.get(key)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
