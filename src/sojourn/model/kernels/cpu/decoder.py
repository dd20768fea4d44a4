"""A narrow decoder, from token ids to hidden states, as one autograd function of decoder_layer.c.

At four layers of 128, what lay around the layers (transformers' own forward, an autograd function for every layer,
embedding, RoPE's angles, final norm) took a fifth of a step. The backward overwrites what the forward has saved, so it
runs once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sojourn.model.kernels.cpu.library import DecoderInputs, DecoderSettings, decoder_backward, decoder_forward


def decoder_on_cpu(given: DecoderInputs, settings: DecoderSettings, weights: Sequence[Tensor]) -> Tensor:
    """The target tokens' hidden states, shape (N, D). `weights`: as decoder_forward has them."""
    out: Tensor = _Decoder.apply(given, settings, torch.is_grad_enabled(), *weights)
    return out


class _Decoder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, given: DecoderInputs, settings: DecoderSettings, keep: bool, *weights: Tensor
    ) -> Tensor:  # fmt: skip
        out, saved = decoder_forward(given, settings, weights, keep)
        if keep:  # all but the weights at once: each saved tensor takes time
            ctx.save_for_backward(*weights)
            ctx.arguments = (given, settings, saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (given, settings, saved), ctx.arguments = ctx.arguments, None
        weights = ctx.saved_tensors
        return None, None, None, *decoder_backward(grads[0].contiguous(), given, settings, weights, saved)
