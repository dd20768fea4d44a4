"""Multiplying with a base in 4 bits: its weights are widened for each multiplication and forgotten at once.

As one operation, of which a compiler sees only the outside: it would otherwise keep the widened weights of all blocks
for the backward, which is what 4 bits are to avoid.

Shapes: M tokens, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch

from sojourn.model.kernels.triton_support import supports_triton


def multiply(x: Any, packed: Any, state: Any, bias_N: Any) -> Any:
    """Like `F.linear`, with a weight that bitsandbytes quantised to `packed` and `state`."""
    inner = state.state2
    nested = (state.offset, inner.absmax, inner.code, inner.blocksize) if state.nested else (None, None, None, 0)
    described = (packed, state.absmax, state.code, state.blocksize, *nested, *state.shape)
    y = _forward(x.flatten(0, -2), *described).view(*x.shape[:-1], -1)
    return y if bias_N is None else y + bias_N.to(y.dtype)


@torch.library.custom_op("sojourn::nf4_linear", mutates_args=())
def _forward(
    x_MK: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, block: int,
    offset: torch.Tensor | None, absmax2: torch.Tensor | None, code2: torch.Tensor | None, block2: int,
    outputs: int, inputs: int,
) -> torch.Tensor:  # fmt: skip
    described = (packed, absmax, code, block, offset, absmax2, code2, block2, outputs, inputs)
    return x_MK @ _widened(x_MK.dtype, *described).t()


@torch.library.custom_op("sojourn::nf4_grad_input", mutates_args=())
def _back(
    grad_MN: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, block: int,
    offset: torch.Tensor | None, absmax2: torch.Tensor | None, code2: torch.Tensor | None, block2: int,
    outputs: int, inputs: int,
) -> torch.Tensor:  # fmt: skip
    described = (packed, absmax, code, block, offset, absmax2, code2, block2, outputs, inputs)
    return grad_MN @ _widened(grad_MN.dtype, *described)


@_forward.register_fake
def _(x_MK: Any, *described: Any) -> Any:
    return x_MK.new_empty(x_MK.shape[0], described[-2])


@_back.register_fake
def _(grad_MN: Any, *described: Any) -> Any:
    return grad_MN.new_empty(grad_MN.shape[0], described[-1])


def _widened(
    dtype: Any, packed: Any, absmax: Any, code: Any, block: int, offset: Any, absmax2: Any, code2: Any, block2: int,
    outputs: int, inputs: int,
) -> Any:  # fmt: skip
    if packed.is_cuda and supports_triton():
        from sojourn.model.kernels.nf4_dequant import widened

        return widened(dtype, packed, absmax, code, block, offset, absmax2, code2, block2, outputs, inputs)
    from bitsandbytes.functional import QuantState, dequantize_4bit

    inner = None
    if absmax2 is not None:
        inner = QuantState(absmax=absmax2, code=code2, blocksize=block2, dtype=torch.float32)
    state = QuantState(
        absmax=absmax, shape=torch.Size((outputs, inputs)), code=code, blocksize=block, quant_type="nf4", dtype=dtype,
        offset=offset, state2=inner,
    )  # fmt: skip
    return dequantize_4bit(packed, state)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    tensors = [one for one in inputs[1:] if isinstance(one, torch.Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.rest = [None if isinstance(one, torch.Tensor) else (one,) for one in inputs[1:]]


def _backward(ctx: Any, grad_MN: Any) -> Any:
    tensors = iter(ctx.saved_tensors)
    described = [next(tensors) if one is None else one[0] for one in ctx.rest]
    return _back(grad_MN.contiguous(), *described), *(None for _ in described)


_forward.register_autograd(_backward, setup_context=_remember)
