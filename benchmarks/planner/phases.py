"""What torch counts in each phase of a step: which term of a plan is off, when its peak is."""

from __future__ import annotations

from typing import Any


def phases(stepper: Any, batches: list[Any], opened: int) -> dict[str, int]:
    """One more step, in pieces. Bytes: once opened, between steps, kept by the forward; and the peaks of the forward
    with its loss, of forward and backward together, and of the update."""
    import torch

    found = {"opened": opened, "between": int(torch.cuda.memory_allocated())}
    torch.cuda.reset_peak_memory_stats()
    part = stepper.speculative_forward(batches)
    found |= {"kept": int(torch.cuda.memory_allocated()), "forward": int(torch.cuda.max_memory_allocated())}
    del part
    torch.cuda.reset_peak_memory_stats()
    stepper.gradients(batches)
    found["gradients"] = int(torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    stepper.update()
    torch.cuda.synchronize()
    return {**found, "update": int(torch.cuda.max_memory_allocated())}
