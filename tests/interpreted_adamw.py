"""The Triton kernel of low_memory_adamw.py in Triton's interpreter, on a CPU: a program that test_low_memory_adamw.py
runs."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from sojourn.train.optim.low_memory_adamw import _example, update_by_torch
from sojourn.train.optim.low_memory_kernel import update_by_kernel

for rounding in ("fp32", "bf16", "bf16_kahan"):
    for eight_bit in (False, True):
        found, expected = (
            _example(apply, torch.device("cpu"), rounding, eight_bit) for apply in (update_by_kernel, update_by_torch)
        )
        error = float((found - expected).norm() / expected.norm())
        assert error < 2e-3, f"{rounding}, eight_bit={eight_bit}: relative error {error}"
