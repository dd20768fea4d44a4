"""Triton kernels that start while the one before ends (programmatic dependent launch), on Hopper and later GPUs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@cache
def early_launch() -> dict[str, Any]:
    """Options of a launch. On Hopper a kernel starts while the one before ends (programmatic dependent launch), and
    waits for what that one writes in `wait_for_inputs`."""
    early = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    early = early and hasattr(tl.extra.cuda, "gdc_wait")
    return {"EARLY": early, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
