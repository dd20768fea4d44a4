"""Whether Triton kernels run on this machine's GPU, and functions that torch.compile makes one kernel of."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


@cache
def supports_triton() -> bool:
    return find_spec("triton") is not None and compute_capability() >= (7, 0)


def compute_capability() -> tuple[int, int]:
    """Of the current GPU; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def fused(function: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    """On a GPU, compiled to one kernel where possible; in a compiled layer it becomes part of that."""
    return function if x.device.type != "cuda" or torch.compiler.is_compiling() else _compiled(function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True) if supports_triton() else function
