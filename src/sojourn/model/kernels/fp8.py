"""Layers that multiply in 8 bits: what is multiplied is scaled to the range of 8-bit floats, tensor by tensor.

Weights keep the numbers that they are trained in. Forward operands are e4m3, which is finer; gradients e5m2, which
reaches further. Products are summed and handed on wide.

A layer may multiply so in its backward alone. That is two thirds of its products, and the loss is computed in 16 bits:
nearly all that 8 bits do to gradients they do by way of the forward.

What a multiplication wins is soon lost again by making its operands, so that is done with few passes over memory: the
largest number is found by what computes them, where that is ours or the compiler's, and one pass narrows both ways.

Shapes: M tokens, K inputs, N outputs, F width of a feed-forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sojourn.model.kernels.triton_support import supports_triton

_FINE, _FAR = torch.float8_e4m3fn, torch.float8_e5m2
STEP = 16  # what the hardware multiplies is so many wide


class Kernels:
    """Of our own, which are used once they have been tried."""

    work = False


def try_kernels(device: Any) -> None:
    """They are used where they make what torch makes; 8 bits are young on every card and in every compiler."""
    Kernels.work = False
    if device.type != "cuda" or not supports_triton():
        return
    x = torch.linspace(-3, 3, 96 * 160, device=device).view(160, 96).bfloat16()
    plain = _made_of(x)
    try:
        Kernels.work = True
        ours, fault = _made_of(x), "they make other numbers"
        Kernels.work = all(_alike(one, other) for one, other in zip(ours, plain, strict=True))
    except Exception as error:
        Kernels.work, fault = False, " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if not Kernels.work:
        print(f"note: 8-bit kernels cannot be used here ({fault}); training goes on without them, slower", flush=True)


def _made_of(x: Any) -> list[Any]:
    largest = _largest(x)
    made = [y for kind in (_FINE, _FAR) for y in _both(x, _scale(largest, kind), kind)]
    made.append(_narrowed_turned(x, _scale(largest, _FINE), _FINE))
    query, key, value = x.view(10, 16, 6, 16).split(2, 2)
    angles = x.view(10, 16, 96)[..., :16]
    _, most = _turned_back(query, key, value, angles.cos(), angles.sin())
    backs = _gated_back(x[:, :48], x, _scale(10 * largest, _FAR))
    return [y.float() for y in (*made, *_gated(x)[1:], *backs, most)]


def _alike(one: Any, other: Any) -> bool:
    """But for the last place, which may be rounded otherwise now and then, and is up to a quarter in 8 bits."""
    apart = (one - other).abs()
    return bool((apart > 0.01 * other.abs()).float().mean() < 0.01 and (apart <= 0.26 * other.abs() + 0.01).all())


def fits(layer: Any) -> bool:
    return all(size % STEP == 0 for size in layer.weight.shape)


def multiply(x: Any, weight_NK: Any, bias_N: Any, forward: bool = True) -> Any:
    """Like `F.linear`."""
    x_MK = x.flatten(0, -2)
    if x_MK.shape[0] % STEP:  # only rows that nobody packed have such lengths
        return torch.nn.functional.linear(x, weight_NK.to(x.dtype), bias_N)
    y = _Multiplied.apply(x_MK, weight_NK, forward).view(*x.shape[:-1], -1)
    return y if bias_N is None else y + bias_N


def multiply_back(x: Any, weight_NK: Any, bias_N: Any) -> Any:
    """In 8 bits only backwards."""
    return multiply(x, weight_NK, bias_N, forward=False)


def feed_forward(x: Any, joined_2FK: Any, down_KF: Any, forward: bool = True) -> Any:
    """A gated one without biases, all of it trained; None where 8 bits cannot multiply so many rows."""
    x_MK = x.flatten(0, -2)
    return None if x_MK.shape[0] % STEP else _FeedForward.apply(x_MK, joined_2FK, down_KF, forward).view(x.shape)


def heads(x: Any, joined_PK: Any, cos: Any, sin: Any, heads: Sequence[int], forward: bool = True) -> Any:
    """Queries, keys and values by one multiplication, turned to their positions, all of it trained; None likewise."""
    rows, width, _ = x.shape
    return None if rows * width % STEP else _Heads.apply(x, joined_PK, cos, sin, *heads, forward)


class _Operand(NamedTuple):
    """Of a forward product, in 16 bits and, where that is to be in 8, as it lies; turned, for the backward."""

    wide: Any
    scale: Any
    lying: Any
    turned: Any


def _operand(tensor: Any, forward: bool, largest: Any = None) -> _Operand:
    scale = _scale(_largest(tensor) if largest is None else largest, _FINE)
    lying, turned = _both(tensor, scale, _FINE) if forward else (None, _narrowed_turned(tensor, scale, _FINE))
    return _Operand(tensor, scale, lying, turned)


def _product(one: _Operand, other: _Operand) -> Any:
    if one.lying is None:
        return one.wide @ other.wide.t()
    return _scaled(one.lying, one.scale, other.lying, other.scale, one.wide.dtype)


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Any, weight_NK: Any, forward: bool) -> Any:
        ctx.numbers = x_MK.dtype
        if ctx.needs_input_grad[1]:
            x, weight = _operand(x_MK, forward), _operand(weight_NK, forward)
            ctx.save_for_backward(x.turned, x.scale, weight.turned, weight.scale)
            return _product(x, weight)
        w_scale = _scale(_largest(weight_NK), _FINE)
        ctx.save_for_backward(None, None, weight_NK, w_scale)  # frozen, so narrowed again rather than kept twice
        if not forward:
            return x_MK @ weight_NK.t()
        x_scale = _scale(_largest(x_MK), _FINE)
        x8, w8 = _narrowed(x_MK, x_scale, _FINE), _narrowed(weight_NK, w_scale, _FINE)
        return _scaled(x8, x_scale, w8, w_scale, ctx.numbers)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        x8_KM, x_scale, kept, w_scale = ctx.saved_tensors
        grad, numbers = upstream[0], ctx.numbers
        scale = _scale(_largest(grad), _FAR)
        if not ctx.needs_input_grad[1]:
            w8_KN = _narrowed(kept, w_scale, _FINE).t().contiguous()
            return _scaled(_narrowed(grad, scale, _FAR), scale, w8_KN, w_scale, numbers), None, None
        g8, g8_NM = _both(grad, scale, _FAR)
        of_weight = _scaled(g8_NM, scale, x8_KM, x_scale, numbers)
        return _scaled(g8, scale, kept, w_scale, numbers), of_weight, None


class _Heads(torch.autograd.Function):
    """One function, since the kernel that turns gradients back knows the largest of them. P: all heads' numbers."""

    @staticmethod
    def forward(ctx: Any, x: Any, joined_PK: Any, cos: Any, sin: Any, heads: int, kv_heads: int, forward: bool) -> Any:
        x_MK, joined = _operand(x.flatten(0, 1), forward), _operand(joined_PK, forward)
        ctx.save_for_backward(x_MK.turned, x_MK.scale, joined.turned, joined.scale, cos, sin)
        return _turned(_product(x_MK, joined).view(*x.shape[:2], -1), cos, sin, heads, kv_heads)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        x8_KM, x_scale, w8_KP, w_scale, cos, sin = ctx.saved_tensors
        query, key, value = upstream
        grad_BTP, largest = _turned_back(query, key, value, cos, sin)
        numbers, scale = grad_BTP.dtype, _scale(largest, _FAR)
        g8, g8_PM = _both(grad_BTP.flatten(0, 1), scale, _FAR)
        of_joined = _scaled(g8_PM, scale, x8_KM, x_scale, numbers)
        of_x = _scaled(g8, scale, w8_KP, w_scale, numbers).view(*grad_BTP.shape[:2], -1)
        return of_x, of_joined, None, None, None, None, None


class _FeedForward(torch.autograd.Function):
    """One function, since the gate's kernels know the largest numbers of what they make."""

    @staticmethod
    def forward(ctx: Any, x_MK: Any, joined_2FK: Any, down_KF: Any, forward: bool) -> Any:
        ctx.numbers = x_MK.dtype
        x, joined, down = (_operand(one, forward) for one in (x_MK, joined_2FK, down_KF))
        wide = _product(x, joined)
        made, largest, widest = _gated(wide)
        inner = _operand(made, forward, largest)
        turned, scales = zip(*((one.turned, one.scale) for one in (x, joined, down, inner)), strict=True)
        ctx.save_for_backward(wide, widest, *turned, *scales)
        return _product(inner, down)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        wide, widest, x8_KM, j8_K2F, d8_FK, i8_FM, x_scale, j_scale, d_scale, i_scale = ctx.saved_tensors
        grad, numbers = upstream[0], ctx.numbers
        scale = _scale(_largest(grad), _FAR)
        g8, g8_KM = _both(grad, scale, _FAR)
        of_down = _scaled(g8_KM, scale, i8_FM, i_scale, numbers)
        of_inner = _scaled(g8, scale, d8_FK, d_scale, numbers)
        scale = _scale(_bound(grad, d_scale * torch.finfo(_FINE).max, widest), _FAR)
        g8, g8_2FM = _gated_back(of_inner, wide, scale)
        of_joined = _scaled(g8_2FM, scale, x8_KM, x_scale, numbers)
        return _scaled(g8, scale, j8_K2F, j_scale, numbers), of_joined, of_down, None


class Head:
    """The layer that makes logits, for a chunk of tokens at a time: C of them, V words, D width."""

    def __init__(self, weight_VD: Any) -> None:
        self.scale = _scale(_largest(weight_VD), _FINE)
        self.weight_VD, self.weight_DV = _both(weight_VD, self.scale, _FINE)
        # A gradient of cross-entropy is a probability, or one less.
        self.grad_scale = torch.full((), 1 / torch.finfo(_FAR).max, device=weight_VD.device)

    def logits(self, hidden_CD: Any) -> Any:
        self.hidden_scale = _scale(_largest(hidden_CD), _FINE)
        narrow, self.hidden_DC = _both(hidden_CD, self.hidden_scale, _FINE)
        return _scaled(narrow, self.hidden_scale, self.weight_VD, self.scale, hidden_CD.dtype)

    def back(self, grad_CV: Any) -> tuple[Any, Any]:
        """Of the hidden states of the last chunk, and of the weight."""
        narrow, turned = _both(grad_CV, self.grad_scale, _FAR)
        of_hidden = _scaled(narrow, self.grad_scale, self.weight_DV, self.scale, grad_CV.dtype)
        return of_hidden, _scaled(turned, self.grad_scale, self.hidden_DC, self.hidden_scale, grad_CV.dtype)


def _gated(wide: Any) -> tuple[Any, Any, Any]:
    """silu(first half) · second half, its largest number, and that of both halves."""
    if Kernels.work:
        from sojourn.model.kernels.swiglu import gated_measured

        made, most = gated_measured(wide)
        return made, *most.flatten(1).amax(1).unbind()
    gate, other = wide.float().chunk(2, -1)
    made = (torch.nn.functional.silu(gate) * other).to(wide.dtype)
    return made, _largest(made), _largest(wide)


def _bound(grad_MK: Any, down: Any, widest: Any) -> Any:
    """What no number of `_gated_back` is beyond, of the largest numbers of the weight and of what was gated: sums of
    products by their larger factors, times the slope of silu, 1.1 at most, and room for rounding. It is often hundreds
    of times too large; e5m2, which reaches over nine decimal places, takes no notice of that."""
    return 1.5 * grad_MK.abs().sum(-1, dtype=torch.float32).amax() * down * widest


def _gated_back(grad: Any, wide: Any, scale: Any) -> tuple[Any, Any]:
    """The gradient of both halves, narrowed."""
    if Kernels.work:
        from sojourn.model.kernels.swiglu import gated_back_narrowed

        made: tuple[Any, Any] = gated_back_narrowed(grad, wide, scale)
        return made
    gate, other = wide.float().chunk(2, -1)
    share, upstream = gate.sigmoid(), grad.float()
    by_gate = upstream * other * share * (1 + gate * (1 - share))
    return _both(torch.cat((by_gate, upstream * gate * share), -1), scale, _FAR)


def _turned(joined: Any, cos: Any, sin: Any, heads: int, kv_heads: int) -> tuple[Any, Any, Any]:
    if Kernels.work:
        from sojourn.model.kernels.rope import turned_apart

        made: tuple[Any, Any, Any] = turned_apart(joined, cos, sin, heads, kv_heads)
        return made
    parts = joined.unflatten(-1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], 2)
    return _turn(parts[0], cos, sin), _turn(parts[1], cos, sin), parts[2].clone()


def _turned_back(query: Any, key: Any, value: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """The gradient of what was turned, and its largest number."""
    if Kernels.work:
        from sojourn.model.kernels.rope import turned_together_measured

        made, most = turned_together_measured(query, key, value, cos, sin)
        return made, most.amax()
    made = torch.cat((_turn(query, cos, -sin), _turn(key, cos, -sin), value), 2).flatten(2)
    return made, _largest(made)


def _turn(x_BTHD: Any, cos_BTD: Any, sin_BTD: Any) -> Any:
    first, second = x_BTHD.float().chunk(2, -1)
    other = torch.cat((-second, first), -1)
    return (x_BTHD * cos_BTD[:, :, None] + other * sin_BTD[:, :, None]).to(x_BTHD.dtype)


def _largest(tensor: Any) -> Any:
    """Row by row first: a compiler makes that part of the kernel that makes the rows."""
    return tensor.abs().amax(-1).amax()


def _scale(largest: Any, kind: Any) -> Any:
    """What the narrowed tensor is to be multiplied with."""
    return largest.float().clamp(min=1e-12) / torch.finfo(kind).max


def _narrowed(tensor: Any, scale: Any, kind: Any) -> Any:
    most = torch.finfo(kind).max
    return (tensor.float() * (1.0 / scale)).clamp(-most, most).to(kind)


def _both(tensor: Any, scale: Any, kind: Any) -> tuple[Any, Any]:
    """As it lies, and turned."""
    if Kernels.work:
        from sojourn.model.kernels.fp8_cast import narrowed_both

        made: tuple[Any, Any] = narrowed_both(tensor, scale, kind)
        return made
    narrow = _narrowed(tensor, scale, kind)
    return narrow, narrow.t().contiguous()


def _narrowed_turned(tensor: Any, scale: Any, kind: Any) -> Any:
    """Only turned."""
    if Kernels.work:
        from sojourn.model.kernels.fp8_cast import narrowed_turned

        return narrowed_turned(tensor, scale, kind)
    return _narrowed(tensor, scale, kind).t().contiguous()


def _scaled(one: Any, one_scale: Any, other: Any, other_scale: Any, numbers: Any) -> Any:
    """one · otherᵀ: both lie along what is summed over. Summed in 32 bits: the hardware's faster way wins little."""
    return torch._scaled_mm(one, other.t(), one_scale, other_scale, out_dtype=numbers, use_fast_accum=False)
