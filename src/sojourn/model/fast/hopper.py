"""Blocks by kernels for Hopper cards (H100, H200), where the packages that make them are installed (`pip install
'sojourn[hopper]'`): quack's products apply residuals, norms and gates as they write, and FlashAttention-4 attends.

A norm is put off: it scales each token's row, which a product may do afterwards as well as before. So what is normed is
never written: the product that makes the sum also makes its squares, the next one scales its rows by their root, and
the norm's weight is multiplied into that one's weights.

Shapes: B rows, T tokens a row, M tokens in all, K model width, F width of a feed-forward, P = (H + 2·G)·D of H heads of
queries and G of keys and values, D numbers each.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from sojourn.model.fast.operation import differentiable, operation


class Kernels:
    """Those that have been tried here, and do what torch does."""

    products = False
    attention = False


def forget_kernels() -> None:
    Kernels.products = Kernels.attention = False


def try_kernels(model: Any) -> None:
    """For its blocks: they are used where they make what torch makes, but for rounding."""
    device, config = next(model.parameters()).device, model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    Kernels.products = _tried("quack", "products", device, _rest, _rest_by_torch, _rest_given)
    given = partial(_heads_given, head_size)
    Kernels.attention = _tried("flash_attn.cute", "attention", device, _heads, _heads_by_torch, given)


def _tried(package: str, name: str, device: Any, ours: Any, plain: Any, given: Any) -> bool:
    if not installed(package):
        return False
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            torch.manual_seed(0)
            tensors = [one.to(device, torch.bfloat16).requires_grad_() for one in given()]
            found, wanted = (_with_gradients(function, tensors) for function in (ours, plain))
        fault = None if all(map(_alike, found, wanted)) else "they make other numbers"
    except Exception as error:  # whatever a missing kernel raises
        fault = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if fault is not None:
        print(f"note: {package}'s {name} cannot be used here ({fault}); training goes on without, slower", flush=True)
    return fault is None


def installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # nor what it would be in
        return False


def _with_gradients(function: Any, given: list[Any]) -> list[Any]:
    made = function(*given)
    return [made, *torch.autograd.grad(made, given, torch.linspace(-1, 1, made.numel()).to(made).view_as(made))]


def _alike(one: Any, other: Any) -> bool:
    apart = torch.linalg.vector_norm(one.float() - other.float()) / torch.linalg.vector_norm(other.float())
    return bool(apart < 0.02)


def _rest_given() -> list[Any]:
    shapes = ((320, 256), (320, 128), (256, 128), (768, 256), (256, 384))
    return [torch.randn(shape) * (1.0 if shape[0] == 320 else 0.1) for shape in shapes]


def _rest(*given: Any) -> Any:
    return rest_of_block(*given, 1e-5)[0]


def _rest_by_torch(hidden: Any, attended: Any, out: Any, both: Any, down: Any) -> Any:
    hidden, attended, out, both, down = (one.float() for one in (hidden, attended, out, both, down))
    summed = hidden + attended @ out.T
    one, other = (F.rms_norm(summed, summed.shape[-1:], eps=1e-5) @ both.T).unflatten(-1, (-1, 2)).unbind(-1)
    return summed + (F.silu(one) * other) @ down.T


def _heads_given(head_size: int) -> list[Any]:
    return [torch.randn(2, 160, 128), 0.1 * torch.randn(8 * head_size, 128), torch.randn(8 * head_size)]


def _angles(size: int, device: Any) -> Any:
    angles = torch.linspace(0, 6, 320 * size, device=device).view(2, 160, size)
    return angles.cos(), angles.sin()


def _heads(x: Any, weight: Any, bias: Any) -> Any:
    size = len(bias) // 8
    return attend_heads(x, weight, bias, *_angles(size, x.device), 4, 2, size**-0.5)[0]


def _heads_by_torch(x: Any, weight: Any, bias: Any) -> Any:
    size = len(bias) // 8
    cos, sin = (one[:, :, None, : size // 2].float() for one in _angles(size, x.device))
    joined = F.linear(x.float(), weight.float(), bias.float()).unflatten(-1, (8, size))

    def turned(heads: Any) -> Any:
        first, second = heads.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    query, key, value = joined.split([4, 2, 2], 2)
    heads = (turned(query), turned(key).repeat_interleave(2, 2), value.repeat_interleave(2, 2))
    made = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in heads), is_causal=True)
    return made.transpose(1, 2).flatten(2)


# -- What comes after attention --


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
    squares = use.add_and_square(attended, out.T, hidden_MK, out={"D": summed}, config=use.square, tuned=False)[
        "squares"
    ]
    torch.rsqrt(squares.view(-1) / hidden_MK.shape[1] + eps, out=root_M)
    use.gate(summed, both.T, out={"D": joined, "gated": gated}, root=root_M[None], config=use.wide, tuned=False)
    use.add(gated, down.T, summed, out={"D": result}, config=use.wide, tuned=False)
    return made


@operation(
    "gates_back(Tensor grad, Tensor down, Tensor joined, Tensor root) -> (Tensor, Tensor)",
    lambda grad, down, joined, root: (torch.empty_like(joined), torch.empty_like(root)),
)
def _gates_back(grad_MK: Any, down: Any, joined: Any, root_M: Any) -> Any:
    """The gradient of what became `joined` when its rows were scaled by `root`; and by what of each row the gradient of
    the row that was to be normed is to be larger, for its root."""
    made = torch.empty_like(joined)
    use = _products()
    dots = use.gate_back(grad_MK, down, joined, out={"D": made}, root=root_M[None], config=use.square, tuned=False)[
        "dots"
    ]
    return made, dots.view(-1) * root_M.square() / -grad_MK.shape[1]


@operation(
    "norm_back(Tensor grad, Tensor both, Tensor added, Tensor summed, Tensor by) -> Tensor",
    lambda grad, both, added, summed, by: torch.empty_like(summed),
)
def _norm_back(grad: Any, both: Any, added: Any, summed: Any, by_M: Any) -> Any:
    made = torch.empty_like(summed)
    use = _products()
    use.norm_back(grad, both, added, out={"D": made}, other=summed, by=by_M[None], config=use.large, tuned=False)
    return made


def _remember_rest(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[1:5], *output[1:])


def _rest_backward(ctx: Any, grad_MK: Any, *_: Any) -> Any:
    attended, out, both, down, summed, root_M, joined, gated = ctx.saved_tensors
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
    "attend_heads(Tensor x, Tensor weight, Tensor? bias, Tensor cos, Tensor sin, int heads, int kv_heads, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    _made_heads,
)
def attend_heads(
    x_BTK: Any, weight_PK: Any, bias_P: Any, cos: Any, sin: Any, heads: int, kv_heads: int, scale: float
) -> Any:
    """Queries, keys and values, made in one product and turned to their positions, and what each token finds in those
    before it. Also what the backward needs."""
    from flash_attn.cute.interface import _flash_attn_fwd

    from sojourn.model.fast.rotary import parts, turn_in_place

    attended, _, sums = _made_heads(x_BTK, weight_PK, bias_P, cos, sin, heads, kv_heads, scale)
    joined_BTP = F.linear(x_BTK, weight_PK, bias_P)
    turn_in_place(joined_BTP, cos, sin, heads, kv_heads)
    query, key, value = parts(joined_BTP, heads, kv_heads)
    room = attended.view_as(query)
    _flash_attn_fwd(query, key, value, softmax_scale=scale, causal=True, out=room, lse=sums)
    return attended, joined_BTP, sums


@operation(
    "attend_heads_back(Tensor grad, Tensor joined, Tensor out, Tensor sums, Tensor cos, Tensor sin, int heads,"
    " int kv_heads, float scale) -> Tensor",
    lambda grad, joined, *_: torch.empty_like(joined),
)
def _attend_heads_back(
    grad: Any, joined: Any, out: Any, sums: Any, cos: Any, sin: Any, heads: int, kv_heads: int, scale: float
) -> Any:
    """The gradient of queries, keys and values, before they were turned."""
    from flash_attn.cute.interface import _flash_attn_bwd

    from sojourn.model.fast.rotary import parts, turn_in_place

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
    made = _attend_heads_back(grad, joined, attended, sums, cos, sin, *ctx.how).flatten(0, 1)
    of_x = (made @ weight_PK).view_as(x_BTK)
    of_bias = made.sum(0) if ctx.biased else None
    return of_x, made.T @ x_BTK.flatten(0, 1), of_bias, *(None,) * 5


differentiable("attend_heads", _remember_heads, _heads_backward)
