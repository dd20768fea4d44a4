"""Early warnings that memory is getting short, on the GPU and on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sojourn.machine.hardware import memory

if TYPE_CHECKING:
    from sojourn.train.checkpoint.saving import Saver
    from sojourn.train.fault_tolerant_step import FaultTolerantStep

_STORM = 10  # times between two logged steps that the allocator had to start over
_HOST_SHARE = 0.05


class MemoryPressure:
    def __init__(self, device: str) -> None:
        self._device, self._retries, self._told = device, 0, False

    def check(self, careful: FaultTolerantStep, saver: Saver) -> None:
        """Takes a rung early where the allocator fights for every block, which is slow and ends badly."""
        if self._device == "cuda":
            import torch

            retries = int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
            storm, self._retries = retries - self._retries >= _STORM, retries
            if careful.session.stepper.ranks.any(storm):
                careful.ease(f"{retries} allocations had to be tried again")
        seen = memory()
        if seen.available < _HOST_SHARE * seen.limit and not self._told:
            self._told = True
            gib = seen.available / 2**30
            careful.session.run.event("host_memory", available=seen.available, limit=seen.limit)
            careful.say(f"warning: only {gib:.1f} GiB of the host's memory are free; checkpoints are no longer copied "
                        "there first, so training waits for each save")  # fmt: skip
            saver.disable_snapshots()
