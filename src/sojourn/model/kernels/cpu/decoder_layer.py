"""A whole decoder layer as one autograd function on a CPU: few passes over memory, few calls.

For layers as fused_forwards.py describes them, whose weights are all trained, without biases and q/k norms, in fp32.
Attention is ours in place of SDPA (`replaced_by` in its record); of any other backend the autograd graph is kept
inside. The backward overwrites what the forward has saved, so it runs once.

Shapes: B rows, T tokens per row, N = B·T, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sojourn.config.attention_backends import ATTENTION_BACKENDS
from sojourn.model.attention import AttentionParams, attend
from sojourn.model.kernels.cpu.blocked_layer import BlockedLayer, fits_blocked_layer
from sojourn.model.kernels.cpu.library import (
    attention_backward,
    attention_forward,
    rms_norm_backward,
    rms_norm_forward,
    rope,
    swiglu_backward_,
    swiglu_forward,
)
from sojourn.model.layout import Layout


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = _RmsNorm.apply(x, weight, eps)
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_ND = x.view(-1, x.shape[-1])
        out_ND, scale_N = rms_norm_forward(x_ND, weight, eps)
        ctx.save_for_backward(x_ND, weight, scale_N)
        return out_ND.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_ND, weight, scale_N = ctx.saved_tensors
        grad_x, grad_weight = rms_norm_backward(grads[0].reshape(x_ND.shape).contiguous(), x_ND, weight, scale_N)
        return grad_x.view_as(grads[0]), grad_weight, None


def layer_on_cpu(
    x_BTD: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    layout: Layout,
    params: AttentionParams,
    head_dim: int,
    eps: tuple[float, float],
    weights: tuple[Tensor, ...],
) -> Tensor:
    """`weights`: input norm, q, k, v, o, post-attention norm, gate, up, down; `eps`: of the norms."""
    cos_BTD, sin_BTD = (angles.expand(*x_BTD.shape[:2], -1).contiguous() for angles in cos_sin)
    if fits_attention_kernel(layout, params) and fits_blocked_layer(weights):
        blocked: Tensor = BlockedLayer.apply(x_BTD, cos_BTD, sin_BTD, layout, params.scale, head_dim, eps, *weights)
        return blocked
    keeps_graph = torch.is_grad_enabled()
    out: Tensor = _DecoderLayer.apply(x_BTD, cos_BTD, sin_BTD, layout, params, head_dim, eps, keeps_graph, *weights)
    return out


class _DecoderLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, layout: Layout, params: AttentionParams,
        head_dim: int, eps: tuple[float, float], keeps_graph: bool, *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        norm_1, w_q, w_k, w_v, w_o, norm_2, w_gate, w_up, w_down = weights
        x_ND = x_BTD.view(-1, x_BTD.shape[-1])
        normed_1, scale_1 = rms_norm_forward(x_ND, norm_1, eps[0])
        query, key, value = ((normed_1 @ weight.t()).view(*x_BTD.shape[:2], -1, head_dim) for weight in (w_q, w_k, w_v))
        rope(query, cos_BTD, sin_BTD, query)
        rope(key, cos_BTD, sin_BTD, key)
        heads, ctx.attention_backward = _attention(query, key, value, layout, params, keeps_graph)
        attended = heads.detach().reshape(len(x_ND), -1)
        x2_ND = torch.addmm(x_ND, attended, w_o.t())
        normed_2, scale_2 = rms_norm_forward(x2_ND, norm_2, eps[1])
        gate, up = normed_2 @ w_gate.t(), normed_2 @ w_up.t()
        if keeps_graph:
            saved = (x_ND, normed_1, scale_1, attended, x2_ND, normed_2, scale_2, gate, up)
            ctx.save_for_backward(cos_BTD, sin_BTD, *weights, *saved)
        return torch.addmm(x2_ND, swiglu_forward(gate, up), w_down.t()).view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos_BTD, sin_BTD, norm_1, w_q, w_k, w_v, w_o, norm_2, w_gate, w_up, w_down, *saved = ctx.saved_tensors
        x_ND, normed_1, scale_1, attended, x2_ND, normed_2, scale_2, gate, up = saved
        grad = grads[0].reshape(x_ND.shape).contiguous()
        activated = grad @ w_down
        swiglu_backward_(activated, gate, up)  # `activated` is its gradient until here
        grad_down = grad.t() @ activated
        grad_normed = (gate @ w_gate).addmm_(up, w_up)
        grad_gate, grad_up = gate.t() @ normed_2, up.t() @ normed_2
        grad_x2, grad_norm_2 = rms_norm_backward(grad_normed, x2_ND, norm_2, scale_2, grad)
        grad_o = grad_x2.t() @ attended
        head_grads = ctx.attention_backward(grad_x2 @ w_o)
        ctx.attention_backward = None
        for rotated in head_grads[:2]:
            rope(rotated, cos_BTD, sin_BTD, rotated, -1.0)
        projected = [one.view(len(x_ND), -1) for one in head_grads]
        grad_query, grad_key, grad_value = projected
        grad_normed = (grad_query @ w_q).addmm_(grad_key, w_k).addmm_(grad_value, w_v)
        grad_q, grad_k, grad_v = (projection.t() @ normed_1 for projection in projected)
        grad_x, grad_norm_1 = rms_norm_backward(grad_normed, x_ND, norm_1, scale_1, grad_x2)
        grad_weights = (grad_norm_1, grad_q, grad_k, grad_v, grad_o, grad_norm_2, grad_gate, grad_up, grad_down)
        return grad_x.view_as(grads[0]), *(None,) * 7, *grad_weights


def _attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, params: AttentionParams, keeps_graph: bool
) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor]]]:
    """The outputs of all heads, and a function from their gradients to those of query, key and value, contiguous."""
    if fits_attention_kernel(layout, params):
        heads, lse = attention_forward(query, key, value, layout, params.scale)
        return heads, lambda grad: attention_backward(grad, query, key, value, lse, layout, params.scale)
    inputs = (query, key, value)
    with torch.set_grad_enabled(keeps_graph):
        for tensor in inputs:
            tensor.requires_grad_(keeps_graph)
        out = attend(query, key, value, layout, params)

    def backward(grad: Tensor) -> list[Tensor]:
        return [one.contiguous() for one in torch.autograd.grad(out, inputs, grad.view_as(out))]

    return out, backward


def fits_attention_kernel(layout: Layout, params: AttentionParams) -> bool:
    plain = params.softcap is None and not params.dropout and layout.effective_window(params.window) is None
    return plain and "cpu_kernels" in ATTENTION_BACKENDS[layout.backend].replaced_by
