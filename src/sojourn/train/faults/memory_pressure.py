"""Reacts before memory runs out, on the GPU and on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sojourn.machine.hardware import memory

if TYPE_CHECKING:
    from sojourn.train.checkpoint.saving import Saver
    from sojourn.train.fault_tolerant_step import FaultTolerantStep

_MANY_RETRIES = 10  # of CUDA's allocator between two logged steps
_LOW_HOST_SHARE = 0.05  # of host memory


class MemoryPressure:
    def __init__(self, device: str) -> None:
        self._device, self._retries, self._warned = device, 0, False

    def check(self, step: FaultTolerantStep, saver: Saver) -> None:
        """Takes a fallback early where the allocator retries often, which is slow and ends in out of memory."""
        if self._device == "cuda":
            import torch

            retries = int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
            many, self._retries = retries - self._retries >= _MANY_RETRIES, retries
            if step.session.stepper.ranks.any(many):
                step.relieve_memory_pressure(f"the CUDA allocator retried {retries} allocations")
        host = memory()
        if host.available < _LOW_HOST_SHARE * host.limit and not self._warned:
            self._warned = True
            gib = host.available / 2**30
            step.session.run.event("low_host_memory", available=host.available, limit=host.limit)
            step.say(f"warning: only {gib:.1f} GiB of host memory are free; checkpoints are no longer copied first, "
                     "so training waits for each save")  # fmt: skip
            saver.disable_snapshots()
