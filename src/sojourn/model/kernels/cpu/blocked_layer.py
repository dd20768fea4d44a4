"""A narrow decoder layer in two calls of decoder_layer.c: blocks of rows go through norms, matrices and SwiGLU while
they are in the caches of one core.

For what layer_on_cpu takes, with attention of ours. Norms and SwiGLU are computed again in the backward, which
overwrites what the forward has saved, so it runs once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sojourn.model.kernels.cpu.library import decoder_layer_backward, decoder_layer_forward
from sojourn.model.layout import Layout

_MAX_SIZE, _MAX_OUTPUTS = 128, 512  # of wider layers, torch's matmuls are faster than ours


def fits_blocked_layer(weights: Sequence[Tensor]) -> bool:
    """`weights`: as layer_on_cpu has them."""
    return len(weights[0]) <= _MAX_SIZE and all(max(weight.shape) <= _MAX_OUTPUTS for weight in weights)


class BlockedLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, layout: Layout, scale: float, head_dim: int,
        eps: tuple[float, float], *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        out, saved = decoder_layer_forward(x_BTD, cos_BTD, sin_BTD, weights, layout, scale, head_dim, eps)
        ctx.save_for_backward(x_BTD, cos_BTD, sin_BTD, *weights, saved)
        ctx.arguments = (layout, scale, head_dim)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_BTD, cos_BTD, sin_BTD, *weights, saved = ctx.saved_tensors
        grad_x, grad_weights = decoder_layer_backward(
            grads[0].contiguous(), x_BTD, cos_BTD, sin_BTD, weights, saved, *ctx.arguments
        )
        return grad_x, *(None,) * 6, *grad_weights
