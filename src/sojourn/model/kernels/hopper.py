"""Decoder layers by other projects' kernels for Hopper GPUs (H100, H200): `pip install 'sojourn[hopper]'`.

quack's GEMMs apply residual, RMSNorm and SwiGLU in their epilogues, and FlashAttention-4 computes attention. Both
packages are young, so each run tests them first (smoke_test.py).

RMSNorm scales each token's row by 1/rms, which commutes with the matmul that follows: the row can be scaled after it.
So the normalized tensor is never written. Everything after attention is one custom op of three GEMMs:

1. o_proj: adds the residual, and sums the squares of each row (for rms).
2. gate_up, with RMSNorm's weight multiplied into its weight: scales its rows by 1/rms and applies SwiGLU.
3. down_proj: adds the residual.

In the backward, the GEMM for the gradient of SwiGLU's output applies SwiGLU's gradient and sums what 1/rms receives,
and the next one adds that and the residual's gradient. No RMSNorm or SwiGLU is a pass over memory of its own. q, k and
v are rotated in place (RoPE), and their gradients are written into one tensor and rotated back there.

Shapes: B rows, T tokens per row, M = B·T tokens, K hidden size, F MLP width, H query heads, G key/value heads, D head
size, P = (H + 2G)·D.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sojourn.model.kernels.custom_op import custom_op, register_autograd


class HopperKernels:
    """Enabled one by one once the smoke test has passed."""

    gemm = False
    attention = False


# -- o_proj and MLP --


def supports_layer(layer: nn.Module) -> bool:
    """quack's GEMMs copy rows in units of 16 bytes, and take no bias."""
    return layer.bias is None and not any(size % 8 for size in layer.weight.shape)


def _empty_mlp(
    hidden: Tensor, attended: Tensor, o_proj: Tensor, gate_up: Tensor, down: Tensor, eps: float
) -> tuple[Tensor, ...]:
    tokens = hidden.shape[0]
    widths = (hidden.shape[1], gate_up.shape[0], down.shape[1])
    residual, projected, activated = (hidden.new_empty(tokens, width) for width in widths)
    rms_inverse = hidden.new_empty(tokens, dtype=torch.float32)
    return torch.empty_like(residual), residual, rms_inverse, projected, activated


@custom_op(
    "o_proj_mlp(Tensor hidden, Tensor attended, Tensor o_proj, Tensor gate_up, Tensor down, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _empty_mlp,
)
def o_proj_mlp(
    hidden_MK: Tensor, attended: Tensor, o_proj: Tensor, gate_up_2FK: Tensor, down_KF: Tensor, eps: float
) -> Any:
    """residual = hidden + o_proj(attended); returns residual + MLP(RMSNorm(residual)), then what the backward needs.

    `gate_up_2FK`: rows of the gate's and up's weights alternate, multiplied by RMSNorm's weight.
    """
    outputs = _empty_mlp(hidden_MK, attended, o_proj, gate_up_2FK, down_KF, eps)
    result, residual, rms_inverse_M, projected, activated = outputs
    gemm = _gemms()
    sums = gemm.add_and_square(
        attended, o_proj.T, hidden_MK, out={"D": residual}, config=gemm.tile_128x128, tuned=False
    )
    torch.rsqrt(sums["squares"].view(-1) / hidden_MK.shape[1] + eps, out=rms_inverse_M)
    gemm.scale_and_swiglu(
        residual, gate_up_2FK.T, out={"D": projected, "activated": activated}, row_scale=rms_inverse_M[None],
        config=gemm.tile_128x192, tuned=False,
    )  # fmt: skip
    gemm.add(activated, down_KF.T, residual, out={"D": result}, config=gemm.tile_128x192, tuned=False)
    return outputs


@custom_op(
    "swiglu_grad_gemm(Tensor grad, Tensor down, Tensor projected, Tensor rms_inverse) -> (Tensor, Tensor)",
    lambda grad, down, projected, rms_inverse: (torch.empty_like(projected), torch.empty_like(rms_inverse)),
)
def _swiglu_grad_gemm(grad_MK: Tensor, down_KF: Tensor, projected: Tensor, rms_inverse_M: Tensor) -> Any:
    """The gradient of the gate_up GEMM's product before its rows were scaled; and, per row, the factor by which
    `residual` adds to its own gradient by way of 1/rms."""
    grad_projected = torch.empty_like(projected)
    gemm = _gemms()
    sums = gemm.swiglu_backward(
        grad_MK, down_KF, projected, out={"D": grad_projected}, row_scale=rms_inverse_M[None],
        config=gemm.tile_128x128, tuned=False,
    )  # fmt: skip
    return grad_projected, sums["dots"].view(-1) * rms_inverse_M.square() / -grad_MK.shape[1]


@custom_op(
    "rms_norm_grad_gemm(Tensor grad, Tensor gate_up, Tensor grad_result, Tensor residual, Tensor factor) -> Tensor",
    lambda grad, gate_up, grad_result, residual, factor: torch.empty_like(residual),
)
def _rms_norm_grad_gemm(
    grad: Tensor, gate_up_2FK: Tensor, grad_result: Tensor, residual: Tensor, factor_M: Tensor
) -> Tensor:
    """The gradient of `residual`: through the MLP, directly (`grad_result`), and through 1/rms (`factor_M`)."""
    grad_residual = torch.empty_like(residual)
    gemm = _gemms()
    gemm.rms_norm_backward(
        grad, gate_up_2FK, grad_result, out={"D": grad_residual}, other=residual, factor=factor_M[None],
        config=gemm.tile_128x256, tuned=False,
    )  # fmt: skip
    return grad_residual


def _setup_mlp_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[1:5], *output[1:])


def _mlp_backward(ctx: Any, grad_MK: Tensor, *_: Any) -> Any:
    attended, o_proj, gate_up_2FK, down_KF, residual, rms_inverse_M, projected, activated = ctx.saved_tensors
    grad_MK = grad_MK.contiguous()
    grad_projected, factor_M = _swiglu_grad_gemm(grad_MK, down_KF, projected, rms_inverse_M)
    grad_residual = _rms_norm_grad_gemm(grad_projected, gate_up_2FK, grad_MK, residual, factor_M)
    grad_weights = (grad_residual.T @ attended, grad_projected.T @ residual, grad_MK.T @ activated)
    return grad_residual, grad_residual @ o_proj, *grad_weights, None


register_autograd("o_proj_mlp", _setup_mlp_context, _mlp_backward)


@cache
def _gemms() -> Any:
    """GEMMs by their epilogue, and the tile sizes that were fastest on an H200."""
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
        total = acc + c
        return {"D": total, "squares": (total, total)}

    @gemm_epilogue(outputs=("activated",), ops={"row_scale": ColVecLoad("row_scale")}, mode="acc_pair")
    def scale_and_swiglu(acc, row_scale):  # type: ignore[no-untyped-def]
        gate, up = unpack(acc * row_scale)
        return {"D": pack(gate, up), "activated": swiglu(gate, up)}

    @gemm_epilogue(
        ops={"row_scale": ColVecLoad("row_scale")}, reduces={"dots": ColVecReduce("dots")}, mode="packed_cd_b16x2"
    )
    def swiglu_backward(acc, c, row_scale):  # type: ignore[no-untyped-def]
        gate, up = unpack(c)
        grad_gate, grad_up, _ = dswiglu(gate, up, acc)
        return {"D": pack(grad_gate * row_scale, grad_up * row_scale), "dots": grad_gate * gate + grad_up * up}

    @gemm_epilogue(ops={"factor": ColVecLoad("factor")})
    def rms_norm_backward(acc, c, other, factor):  # type: ignore[no-untyped-def]
        return {"D": acc + c + other * factor}

    def tile(rows: int, columns: int, pingpong: bool) -> Any:
        return GemmConfig(tile_m=rows, tile_n=columns, pingpong=pingpong, is_dynamic_persistent=False)

    return SimpleNamespace(
        add=add, add_and_square=add_and_square, scale_and_swiglu=scale_and_swiglu, swiglu_backward=swiglu_backward,
        rms_norm_backward=rms_norm_backward, tile_128x128=tile(128, 128, True), tile_128x192=tile(128, 192, True),
        tile_128x256=tile(128, 256, False),
    )  # fmt: skip


# -- Attention --


def _empty_attention(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width, _ = x.shape
    head_dim = weight.shape[0] // (heads + 2 * kv_heads)
    attended = x.new_empty(rows, width, heads * head_dim)
    return attended, x.new_empty(rows, width, weight.shape[0]), x.new_empty(rows, heads, width, dtype=torch.float32)


@custom_op(
    "qkv_rope_attention(Tensor x, Tensor weight, Tensor? bias, Tensor cos, Tensor sin, int heads, int kv_heads,"
    " float scale) -> (Tensor, Tensor, Tensor)",
    _empty_attention,
)
def qkv_rope_attention(
    x_BTK: Tensor, weight_PK: Tensor, bias_P: Tensor | None, cos: Tensor, sin: Tensor, heads: int, kv_heads: int,
    scale: float,
) -> Any:  # fmt: skip
    """Causal attention of rows of one document: q, k and v by one matmul, RoPE in place, FlashAttention-4. Returns the
    heads' outputs side by side (BT, H·D), then what the backward needs: q, k and v (BTP), and the logsumexp."""
    from flash_attn.cute.interface import _flash_attn_fwd

    from sojourn.model.kernels.rope import apply_rope_, split_qkv

    attended, _, logsumexp = _empty_attention(x_BTK, weight_PK, bias_P, cos, sin, heads, kv_heads, scale)
    qkv_BTP = F.linear(x_BTK, weight_PK, bias_P)
    apply_rope_(qkv_BTP, cos, sin, heads, kv_heads)
    query, key, value = split_qkv(qkv_BTP, heads, kv_heads)
    out = attended.view_as(query)
    _flash_attn_fwd(query, key, value, softmax_scale=scale, causal=True, out=out, lse=logsumexp)
    return attended, qkv_BTP, logsumexp


@custom_op(
    "qkv_rope_attention_backward(Tensor grad, Tensor qkv, Tensor out, Tensor logsumexp, Tensor cos, Tensor sin,"
    " int heads, int kv_heads, float scale) -> Tensor",
    lambda grad, qkv, *_: torch.empty_like(qkv),
)
def _qkv_rope_attention_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, logsumexp: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """The gradient of q, k and v before RoPE."""
    from flash_attn.cute.interface import _flash_attn_bwd

    from sojourn.model.kernels.rope import apply_rope_, split_qkv

    grad_qkv = torch.empty_like(qkv)
    dq, dk, dv = split_qkv(grad_qkv, heads, kv_heads)
    query, key, value = split_qkv(qkv, heads, kv_heads)
    _flash_attn_bwd(
        query, key, value, out.view_as(query), grad.contiguous().view_as(query), logsumexp,
        softmax_scale=scale, causal=True, dq=dq, dk=dk, dv=dv,
    )  # fmt: skip
    apply_rope_(grad_qkv, cos, sin, heads, kv_heads, direction=-1)
    return grad_qkv


def _setup_attention_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    x, weight, bias, cos, sin, *ctx.options = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, cos, sin, *output)


def _attention_backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
    x_BTK, weight_PK, cos, sin, attended, qkv, logsumexp = ctx.saved_tensors
    grad_MP = _qkv_rope_attention_backward(grad, qkv, attended, logsumexp, cos, sin, *ctx.options).flatten(0, 1)
    grad_x = (grad_MP @ weight_PK).view_as(x_BTK)
    grad_bias = grad_MP.sum(0) if ctx.has_bias else None
    return grad_x, grad_MP.T @ x_BTK.flatten(0, 1), grad_bias, *(None,) * 5


register_autograd("qkv_rope_attention", _setup_attention_context, _attention_backward)
