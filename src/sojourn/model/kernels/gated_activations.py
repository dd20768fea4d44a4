"""SwiGLU and GeGLU for fused_forwards.py: activation(gate) · up, of two tensors or of the halves of one."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from sojourn.model.kernels.triton_support import fused


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _swiglu_halves(gate_up: Tensor) -> Tensor:
    return swiglu(*gate_up.chunk(2, -1))


def _geglu_halves(gate_up: Tensor) -> Tensor:
    return _geglu(*gate_up.chunk(2, -1))


GATED = {"silu": swiglu, "gelu_pytorch_tanh": _geglu}
_GATED_HALVES = {swiglu: _swiglu_halves, _geglu: _geglu_halves}


def gated_halves(gated: Callable[..., Tensor], gate_up: Tensor, on_gpu: bool) -> Tensor:
    """Gate and up came from one matmul."""
    if gated is swiglu and on_gpu:
        from sojourn.model.kernels.swiglu import swiglu as kernel

        return kernel(gate_up)
    return fused(_GATED_HALVES[gated], gate_up)(gate_up)
