"""Blocks by kernels for Hopper cards (H100, H200), where the packages that make them are installed (`pip install
'sojourn[hopper]'`): quack's products apply residuals, norms and gates as they write, and FlashAttention-4 attends.

A norm is put off: it scales each token's row, which a product may do afterwards as well as before. So what is normed is
never written: the product that makes the sum also makes its squares, the next one scales its rows by their root, and
the norm's weight is multiplied into that one's weights.

Shapes: B rows, T tokens a row, M tokens in all, K model width, F width of a feed-forward, P = (H + 2·G)·D of H heads of
queries and G of keys and values, D numbers each.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from sojourn.model.kernels.custom_op import differentiable, operation


class Kernels:
    """Those that have been tried here, and do what torch does."""

    products = False
    attention = False


# -- What comes after attention --


def takes(layer: Any) -> bool:
    """Whether such a layer may be part of it: rows are copied by 16 bytes."""
    return layer.bias is None and not any(size % 8 for size in layer.weight.shape)


def _made_rest(hidden: Any, attended: Any, out: Any, both: Any, down: Any, eps: float) -> Any:
    tokens = hidden.shape[0]
    widths = (hidden.shape[1], both.shape[0], down.shape[1])
    summed, joined, gated = (hidden.new_empty(tokens, width) for width in widths)
    return torch.empty_like(summed), summed, hidden.new_empty(tokens, dtype=torch.float32), joined, gated


@operation(
    "rest_of_block(Tensor hidden, Tensor attended, Tensor out, Tensor both, Tensor down, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _made_rest,
)
def rest_of_block(hidden_MK: Any, attended: Any, out: Any, both: Any, down: Any, eps: float) -> Any:
    """The sum of `hidden` and what attention puts out, and to that the feed-forward of its norm. `both`: weights of the
    gate and of what it gates, row by row in turn, times the norm's. Also what the backward needs."""
    result, summed, root_M, joined, gated = made = _made_rest(hidden_MK, attended, out, both, down, eps)
    use = _products()
    found = use.add_and_square(attended, out.T, hidden_MK, out={"D": summed}, config=use.square, tuned=False)
    torch.rsqrt(found["squares"].view(-1) / hidden_MK.shape[1] + eps, out=root_M)
    use.gate(summed, both.T, out={"D": joined, "gated": gated}, root=root_M[None], config=use.wide, tuned=False)
    use.add(gated, down.T, summed, out={"D": result}, config=use.wide, tuned=False)
    return made


@operation(
    "gates_back(Tensor grad, Tensor down, Tensor joined, Tensor root) -> (Tensor, Tensor)",
    lambda grad, down, joined, root: (torch.empty_like(joined), torch.empty_like(root)),
)
def _gates_back(grad_MK: Any, down: Any, joined: Any, root_M: Any) -> Any:
    """The gradient of what became `joined` when its rows were scaled by `root`; and how much of each sum is to be added
    to the gradient of that sum, which has made the root."""
    made = torch.empty_like(joined)
    use = _products()
    root = root_M[None]
    found = use.gate_back(grad_MK, down, joined, out={"D": made}, root=root, config=use.square, tuned=False)
    return made, found["dots"].view(-1) * root_M.square() / -grad_MK.shape[1]


@operation(
    "norm_back(Tensor grad, Tensor both, Tensor added, Tensor summed, Tensor by) -> Tensor",
    lambda grad, both, added, summed, by: torch.empty_like(summed),
)
def _norm_back(grad: Any, both: Any, added: Any, summed: Any, by_M: Any) -> Any:
    """The gradient of `summed`, of which `added` is there already."""
    made = torch.empty_like(summed)
    use = _products()
    use.norm_back(grad, both, added, out={"D": made}, other=summed, by=by_M[None], config=use.large, tuned=False)
    return made


def _remember_rest(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[1:5], *output[1:])


def _rest_backward(ctx: Any, grad_MK: Any, *_: Any) -> Any:
    attended, out, both, down, summed, root_M, joined, gated = ctx.saved_tensors
    grad_MK = grad_MK.contiguous()
    of_joined, by_M = _gates_back(grad_MK, down, joined, root_M)
    of_summed = _norm_back(of_joined, both, grad_MK, summed, by_M)
    weights = (of_summed.T @ attended, of_joined.T @ summed, grad_MK.T @ gated)
    return of_summed, of_summed @ out, *weights, None


differentiable("rest_of_block", _remember_rest, _rest_backward)


@cache
def _products() -> Any:
    """What is done to a product as it is written; and tiles, of which those are used that were fastest on an H200."""
    from types import SimpleNamespace

    from quack.activation import dswiglu, swiglu
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.math import pack, unpack
    from quack.epilogue.ops import ColVecLoad, ColVecReduce
    from quack.gemm_config import GemmConfig

    @gemm_epilogue()
    def add(acc, c):  # type: ignore[no-untyped-def]
        return {"D": acc + c}

    @gemm_epilogue(reduces={"squares": ColVecReduce("squares", scaled=True)})
    def add_and_square(acc, c):  # type: ignore[no-untyped-def]
        summed = acc + c
        return {"D": summed, "squares": (summed, summed)}

    @gemm_epilogue(outputs=("gated",), ops={"root": ColVecLoad("root")}, mode="acc_pair")
    def gate(acc, root):  # type: ignore[no-untyped-def]
        one, other = unpack(acc * root)
        return {"D": pack(one, other), "gated": swiglu(one, other)}

    @gemm_epilogue(ops={"root": ColVecLoad("root")}, reduces={"dots": ColVecReduce("dots")}, mode="packed_cd_b16x2")
    def gate_back(acc, c, root):  # type: ignore[no-untyped-def]
        one, other = unpack(c)
        by_one, by_other, _ = dswiglu(one, other, acc)
        return {"D": pack(by_one * root, by_other * root), "dots": by_one * one + by_other * other}

    @gemm_epilogue(ops={"by": ColVecLoad("by")})
    def norm_back(acc, c, other, by):  # type: ignore[no-untyped-def]
        return {"D": acc + c + other * by}

    def tiles(rows: int, columns: int, taking_turns: bool) -> Any:
        return GemmConfig(tile_m=rows, tile_n=columns, pingpong=taking_turns, is_dynamic_persistent=False)

    return SimpleNamespace(
        add=add, add_and_square=add_and_square, gate=gate, gate_back=gate_back, norm_back=norm_back,
        square=tiles(128, 128, True), wide=tiles(128, 192, True), large=tiles(128, 256, False),
    )  # fmt: skip


# -- Attention --


def _made_heads(x: Any, weight: Any, bias: Any, cos: Any, sin: Any, heads: int, kv_heads: int, scale: float) -> Any:
    rows, width, _ = x.shape
    size = weight.shape[0] // (heads + 2 * kv_heads)
    attended = x.new_empty(rows, width, heads * size)
    return attended, x.new_empty(rows, width, weight.shape[0]), x.new_empty(rows, heads, width, dtype=torch.float32)


@operation(
    "attention_of_heads(Tensor x, Tensor weight, Tensor? bias, Tensor cos, Tensor sin, int heads, int kv_heads,"
    " float scale) -> (Tensor, Tensor, Tensor)",
    _made_heads,
)
def attention_of_heads(
    x_BTK: Any, weight_PK: Any, bias_P: Any, cos: Any, sin: Any, heads: int, kv_heads: int, scale: float
) -> Any:
    """Queries, keys and values, made in one product and turned to their positions, and what each token finds in those
    before it. Also what the backward needs."""
    from flash_attn.cute.interface import _flash_attn_fwd

    from sojourn.model.kernels.rope import parts, turn_in_place

    attended, _, sums = _made_heads(x_BTK, weight_PK, bias_P, cos, sin, heads, kv_heads, scale)
    joined_BTP = F.linear(x_BTK, weight_PK, bias_P)
    turn_in_place(joined_BTP, cos, sin, heads, kv_heads)
    query, key, value = parts(joined_BTP, heads, kv_heads)
    room = attended.view_as(query)
    _flash_attn_fwd(query, key, value, softmax_scale=scale, causal=True, out=room, lse=sums)
    return attended, joined_BTP, sums


@operation(
    "attention_of_heads_back(Tensor grad, Tensor joined, Tensor out, Tensor sums, Tensor cos, Tensor sin, int heads,"
    " int kv_heads, float scale) -> Tensor",
    lambda grad, joined, *_: torch.empty_like(joined),
)
def _attention_of_heads_back(
    grad: Any, joined: Any, out: Any, sums: Any, cos: Any, sin: Any, heads: int, kv_heads: int, scale: float
) -> Any:
    """The gradient of queries, keys and values, before they were turned."""
    from flash_attn.cute.interface import _flash_attn_bwd

    from sojourn.model.kernels.rope import parts, turn_in_place

    made = torch.empty_like(joined)
    dq, dk, dv = parts(made, heads, kv_heads)
    query, key, value = parts(joined, heads, kv_heads)
    _flash_attn_bwd(
        query, key, value, out.view_as(query), grad.contiguous().view_as(query), sums,
        softmax_scale=scale, causal=True, dq=dq, dk=dk, dv=dv,
    )  # fmt: skip
    turn_in_place(made, cos, sin, heads, kv_heads, -1)
    return made


def _remember_heads(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    x, weight, bias, cos, sin, *ctx.how = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight, cos, sin, *output)


def _heads_backward(ctx: Any, grad: Any, *_: Any) -> Any:
    x_BTK, weight_PK, cos, sin, attended, joined, sums = ctx.saved_tensors
    made = _attention_of_heads_back(grad, joined, attended, sums, cos, sin, *ctx.how).flatten(0, 1)
    of_x = (made @ weight_PK).view_as(x_BTK)
    of_bias = made.sum(0) if ctx.biased else None
    return of_x, made.T @ x_BTK.flatten(0, 1), of_bias, *(None,) * 5


differentiable("attention_of_heads", _remember_heads, _heads_backward)
