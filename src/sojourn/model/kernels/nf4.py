"""Linear layers with NF4 weights (QLoRA): weights are dequantized for each matmul and discarded right after.

It is one custom op, opaque to torch.compile: otherwise the compiler would keep the dequantized weights of all layers
for the backward, which is the memory that NF4 saves.

Shapes: M tokens, K input features, N output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sojourn.model.kernels.kept_weights import keep
from sojourn.model.kernels.triton_support import supports_triton

MXFP4_BLOCK = 32  # weights with one scale; bitsandbytes has 64


def quant_state(layer: Any) -> Any:
    """Of an NF4 layer of bitsandbytes; None if it is quantized otherwise."""
    state = getattr(layer.weight, "quant_state", None) or layer.quant_state  # FSDP's parameters lose it
    return state if state is not None and state.quant_type == "nf4" else None


def nf4_weight(layer: Any, dtype: torch.dtype) -> Tensor:
    """The dequantized weight of an NF4 layer."""
    state = quant_state(layer)
    return keep(layer, lambda: dequantize(dtype, layer.weight, *quantized_args(state), *state.shape))


def nf4_linear(x: Tensor, packed: Tensor, state: Any, bias_N: Tensor | None) -> Tensor:
    """Like `F.linear`, with a weight that bitsandbytes quantized to `packed` and the QuantState `state`."""
    y = _nf4_linear(x.flatten(0, -2), packed, *quantized_args(state), *state.shape).view(*x.shape[:-1], -1)
    return y if bias_N is None else y + bias_N.to(y.dtype)


def quantized_args(state: Any) -> tuple[Any, ...]:
    """What `dequantize` needs of a QuantState, in its order."""
    state2 = state.state2
    nested = (state.offset, state2.absmax, state2.code, state2.blocksize) if state.nested else (None, None, None, 0)
    return (state.absmax, state.code, state.blocksize, *nested)


@torch.library.custom_op("sojourn::nf4_linear", mutates_args=())
def _nf4_linear(
    x_MK: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, block_size: int,
    offset: torch.Tensor | None, absmax2: torch.Tensor | None, code2: torch.Tensor | None, block_size2: int,
    out_features: int, in_features: int,
) -> torch.Tensor:  # fmt: skip
    quantized = (packed, absmax, code, block_size, offset, absmax2, code2, block_size2, out_features, in_features)
    return x_MK @ dequantize(x_MK.dtype, *quantized).t()


@torch.library.custom_op("sojourn::nf4_grad_input", mutates_args=())
def _nf4_grad_input(
    grad_MN: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, block_size: int,
    offset: torch.Tensor | None, absmax2: torch.Tensor | None, code2: torch.Tensor | None, block_size2: int,
    out_features: int, in_features: int,
) -> torch.Tensor:  # fmt: skip
    quantized = (packed, absmax, code, block_size, offset, absmax2, code2, block_size2, out_features, in_features)
    return grad_MN @ dequantize(grad_MN.dtype, *quantized)


@_nf4_linear.register_fake
def _(x_MK: Tensor, *quantized: Any) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], quantized[-2])


@_nf4_grad_input.register_fake
def _(grad_MN: Tensor, *quantized: Any) -> Tensor:
    return grad_MN.new_empty(grad_MN.shape[0], quantized[-1])


def dequantize(
    dtype: torch.dtype, packed: Tensor, absmax: Tensor, code: Tensor, block_size: int, offset: Tensor | None,
    absmax2: Tensor | None, code2: Tensor | None, block_size2: int, out_features: int, in_features: int,
) -> Tensor:  # fmt: skip
    if packed.is_cuda and supports_triton():
        from sojourn.model.kernels.nf4_dequant import dequantize_nf4

        return dequantize_nf4(
            dtype, packed, absmax, code, block_size, offset, absmax2, code2, block_size2, out_features, in_features
        )
    if block_size == MXFP4_BLOCK and code2 is not None and absmax2 is not None:
        scales = code2[absmax.long()] * absmax2[torch.arange(len(absmax), device=absmax.device) // block_size2] + offset
        halves = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1)
        values = code[halves.long()].view(-1, block_size) * scales[:, None]
        return values.to(dtype).view(out_features, in_features)
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state2 = None
    if absmax2 is not None:
        state2 = QuantState(absmax=absmax2, code=code2, blocksize=block_size2, dtype=torch.float32)
    state = QuantState(
        absmax=absmax, shape=torch.Size((out_features, in_features)), code=code, blocksize=block_size,
        quant_type="nf4", dtype=dtype, offset=offset, state2=state2,
    )  # fmt: skip
    return dequantize_4bit(packed, state)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*(value for value in inputs[1:] if isinstance(value, torch.Tensor)))
    ctx.non_tensors = [None if isinstance(value, torch.Tensor) else (value,) for value in inputs[1:]]


def _backward(ctx: Any, grad_MN: Tensor) -> Any:
    tensors = iter(ctx.saved_tensors)
    quantized = [next(tensors) if value is None else value[0] for value in ctx.non_tensors]
    return _nf4_grad_input(grad_MN.contiguous(), *quantized), *(None for _ in quantized)


_nf4_linear.register_autograd(_backward, setup_context=_setup_context)
