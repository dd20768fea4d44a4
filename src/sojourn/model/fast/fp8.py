"""Linear layers that multiply in 8 bits: what is multiplied is scaled to the range of 8-bit floats, tensor by tensor.

Weights keep the numbers that they are trained in. Forward operands are e4m3, which is finer; gradients e5m2, which
reaches further. Products are summed and handed on wide.

Shapes: M tokens, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch

_FINE, _FAR = torch.float8_e4m3fn, torch.float8_e5m2
_STEP = 16  # what the hardware multiplies is so many wide


def fits(layer: Any) -> bool:
    return all(size % _STEP == 0 for size in layer.weight.shape)


def multiply(x: Any, weight_NK: Any, bias_N: Any) -> Any:
    """Like `F.linear`."""
    x_MK = x.flatten(0, -2)
    if x_MK.shape[0] % _STEP:  # only rows that nobody packed have such lengths
        return torch.nn.functional.linear(x, weight_NK.to(x.dtype), bias_N)
    y = _Multiplied.apply(x_MK, weight_NK).view(*x.shape[:-1], -1)
    return y if bias_N is None else y + bias_N


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Any, weight_NK: Any) -> Any:
        x8, x_scale = _narrowed(x_MK, _FINE)
        w8, w_scale = _narrowed(weight_NK, _FINE)
        ctx.save_for_backward(x8, x_scale, weight_NK)
        ctx.numbers = x_MK.dtype
        return torch._scaled_mm(x8, w8.t(), x_scale, w_scale, out_dtype=x_MK.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        x8, x_scale, weight_NK = ctx.saved_tensors
        g8, g_scale = _narrowed(upstream[0], _FAR)
        w8, w_scale = _narrowed(weight_NK, _FINE)
        out = {"out_dtype": ctx.numbers}
        # The second operand has to lie in memory column by column.
        grad_MK = torch._scaled_mm(g8, w8.t().contiguous().t(), g_scale, w_scale, use_fast_accum=True, **out)
        if not ctx.needs_input_grad[1]:
            return grad_MK, None
        grad_NK = torch._scaled_mm(g8.t().contiguous(), x8.t().contiguous().t(), g_scale, x_scale, **out)
        return grad_MK, grad_NK.to(weight_NK.dtype)


def _narrowed(tensor: Any, kind: Any) -> tuple[Any, Any]:
    """In 8 bits, and what to multiply that with."""
    most = torch.finfo(kind).max
    scale = tensor.abs().amax().float().clamp(min=1e-12) / most
    return (tensor.float() / scale).clamp(-most, most).to(kind), scale
