"""The update of low_memory_adamw.py as one Triton kernel: each tensor is read and written once, without temporaries.

A sum of two products is written with tl.fma: a compiler chooses which of the two is rounded, and it chose otherwise for
another number of elements, so that chunks of host memory had other last bits than whole tensors on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sojourn.train.optim.blockwise_8bit import BLOCK
from sojourn.train.optim.low_memory_update import Update

_ROWS = 8  # blocks of one program


def update_by_kernel(
    update: Update, weight: Tensor, grad: Tensor, states: dict[str, Tensor], start: int, norm: Tensor | None
) -> None:
    """As `update_by_torch`. `norm`: of the parameter's whole gradient; nothing changes where it is not finite."""
    codes = update.codes
    _kernel[(triton.cdiv(weight.numel(), BLOCK * _ROWS),)](
        weight, states.get("compensation"), grad, states["first"], states["second"],
        states.get("absmax1"), states.get("absmax2"), codes if "absmax1" in states else None,
        update.midpoints if "absmax1" in states else None, update.grad_scale, norm,
        weight.numel(), start, update.seed, update.decay, update.rate, update.root,
        update.beta1, update.beta2, update.eps,
        STOCHASTIC=update.rounding == "bf16", ROWS=_ROWS, WIDTH=BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["seed"])
def _kernel(  # type: ignore[no-untyped-def]
    weights, compensations, grads, firsts, seconds, absmaxes1, absmaxes2, codes, midpoints, scale, norm,
    size, start, seed, decay, rate, root,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
    STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    if norm is not None:  # noqa: SIM102  the first is known at compile time, the second is not
        if tl.where(tl.load(norm) < float("inf"), 0, 1) != 0:
            return
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside, row_inside = offsets < size, rows * WIDTH < size
    grad = tl.load(grads + offsets, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        grad = grad / tl.load(scale)
    if codes is not None:
        absmax1 = tl.load(absmaxes1 + rows, mask=row_inside, other=0.0)
        absmax2 = tl.load(absmaxes2 + rows, mask=row_inside, other=0.0)
        number1 = tl.load(firsts + offsets, mask=inside, other=0).to(tl.int32)
        number2 = tl.load(seconds + offsets, mask=inside, other=0).to(tl.int32)
        first = tl.where(inside, tl.load(codes + number1) * absmax1[:, None], 0.0)
        second = tl.where(inside, tl.load(codes + WIDTH + number2) * absmax2[:, None], 0.0)
    else:
        first = tl.load(firsts + offsets, mask=inside, other=0.0)
        second = tl.load(seconds + offsets, mask=inside, other=0.0)
    first = tl.fma(first, BETA1, grad * (1 - BETA1))
    second = tl.fma(second, BETA2, grad * grad * (1 - BETA2))
    if codes is not None:
        absmax1, absmax2 = tl.max(tl.abs(first), 1), tl.max(second, 1)
        tl.store(absmaxes1 + rows, absmax1, mask=row_inside)
        tl.store(absmaxes2 + rows, absmax2, mask=row_inside)
        tl.store(firsts + offsets, _quantize(first, absmax1, midpoints, ROWS, WIDTH), mask=inside)
        tl.store(seconds + offsets, _quantize(second, absmax2, midpoints + WIDTH, ROWS, WIDTH), mask=inside)
    else:
        tl.store(firsts + offsets, first, mask=inside)
        tl.store(seconds + offsets, second, mask=inside)
    weight = tl.load(weights + offsets, mask=inside, other=0.0).to(tl.float32)
    if compensations is not None:
        weight += tl.load(compensations + offsets, mask=inside, other=0.0).to(tl.float32)
    weight = tl.fma(weight, decay, -rate * (first / tl.fma(tl.sqrt(second), root, EPS)))
    if compensations is not None:
        rounded = weight.to(tl.bfloat16)
        tl.store(weights + offsets, rounded, mask=inside)
        lost = _stochastic_round(weight - rounded.to(tl.float32), offsets + start, seed)
        tl.store(compensations + offsets, lost, mask=inside)
    elif STOCHASTIC:
        tl.store(weights + offsets, _stochastic_round(weight, offsets + start, seed), mask=inside)
    else:
        tl.store(weights + offsets, weight, mask=inside)


@triton.jit
def _quantize(values, absmax, midpoints, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nearest of 256 code values, by binary search."""
    scaled = values / tl.where(absmax > 0, absmax, 1.0)[:, None]
    number = tl.zeros((ROWS, WIDTH), dtype=tl.int32)
    for bit in tl.static_range(8):
        higher = number + (128 >> bit)
        number = tl.where(scaled > tl.load(midpoints + higher - 1), higher, number)
    return number.to(tl.uint8)


@triton.jit
def _stochastic_round(values, offsets, seed):  # type: ignore[no-untyped-def]
    """As stochastic_rounding.py."""
    x = offsets.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    bits = (values.to(tl.uint32, bitcast=True) + (x >> 16)) & 0xFFFF0000
    return tl.where(values == values, bits.to(tl.float32, bitcast=True), values).to(tl.bfloat16)  # noqa: PLR0124  NaN
