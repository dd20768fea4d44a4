"""Whether Triton kernels run on this machine's GPU."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def supports_triton() -> bool:
    return find_spec("triton") is not None and compute_capability() >= (7, 0)


def compute_capability() -> tuple[int, int]:
    """Of the current GPU; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
