"""Frozen linear layers with LoRA adapters as one autograd function: y = x·Wᵀ + scale·(x·Aᵀ)·Bᵀ.

peft computes an adapter's output, scales it and adds it, each a pass over a tensor as large as y. Here matmuls add to y
in place, and in the backward to the gradient of x. Layers with the same input (q, k and v; gate and up) share the
matmuls with A. A whole SwiGLU MLP is one function, too: the gradients of gate and up overwrite them.

A weight may be quantized: then it is dequantized in the forward and again in the backward, unless it is kept
(kept_weights.py).

Shapes: M tokens, K input features, N output features, R ranks of all layers of a group, F MLP width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LoraLayer:
    """`weight` gives the frozen weight (NK) in the compute dtype; `a` (RK) and `b` (NR) are trained."""

    weight: Callable[[], Tensor]
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scale: float


class LoraGroup:
    """Layers that read the same input, with their adapters cast to `dtype`."""

    def __init__(self, layers: Sequence[LoraLayer], dtype: torch.dtype) -> None:
        self.layers = layers
        self.parameters = tuple(chain.from_iterable((layer.a, layer.b) for layer in layers))
        self._a_RK = torch.cat([layer.a.detach().to(dtype) for layer in layers])
        self._b_NR = [layer.b.detach().to(dtype) * layer.scale for layer in layers]
        bounds = accumulate((len(layer.a) for layer in layers), initial=0)
        self._ranks = [slice(*pair) for pair in pairwise(bounds)]

    def forward(self, x_MK: Tensor, outs: Sequence[Tensor] | None = None) -> tuple[list[Tensor], Tensor]:
        """The layers' outputs, written to `outs` if given, and what the backward needs besides x."""
        down_MR = x_MK @ self._a_RK.t()
        results = []
        for i, (layer, b_NR, ranks) in enumerate(zip(self.layers, self._b_NR, self._ranks, strict=True)):
            weight_KN, out = layer.weight().t(), None if outs is None else outs[i]
            if layer.bias is None:
                y_MN = torch.mm(x_MK, weight_KN, out=out)
            else:
                y_MN = torch.addmm(layer.bias.to(x_MK.dtype), x_MK, weight_KN, out=out)
            results.append(y_MN.addmm_(down_MR[:, ranks], b_NR.t()))
        return results, down_MR

    def forward_without_output(self, x_MK: Tensor) -> tuple[list[Tensor], Tensor]:
        """The same with uninitialized outputs, for a backward that does not read them."""
        return [x_MK.new_empty(len(x_MK), len(b_NR)) for b_NR in self._b_NR], x_MK @ self._a_RK.t()

    def backward(
        self, grads: Sequence[Tensor], x_MK: Tensor, down_MR: Tensor, needs_x: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """The gradients of x and of the parameters."""
        grad_down_MR = torch.cat([grad @ b_NR for grad, b_NR in zip(grads, self._b_NR, strict=True)], 1)
        grad_a_RK = grad_down_MR.t() @ x_MK
        grad_x: Tensor | None = None
        found = []
        for layer, grad, ranks in zip(self.layers, grads, self._ranks, strict=True):
            grad_b = (grad.t() @ down_MR[:, ranks]).to(layer.b.dtype).mul_(layer.scale)
            found += [grad_a_RK[ranks].to(layer.a.dtype), grad_b]
            if needs_x:
                grad_x = grad @ layer.weight() if grad_x is None else grad_x.addmm_(grad, layer.weight())
        return (None if grad_x is None else grad_x.addmm_(grad_down_MR, self._a_RK)), found


def lora_linears(x: Tensor, group: LoraGroup) -> list[Tensor]:
    """The outputs of the group's layers."""
    outputs = _LoraLinears.apply(x.flatten(0, -2), group, *group.parameters)
    return [y_MN.view(*x.shape[:-1], -1) for y_MN in outputs]


class _LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, group: LoraGroup, *parameters: Tensor) -> tuple[Tensor, ...]:
        outputs, down_MR = group.forward(x_MK)
        ctx.save_for_backward(x_MK, down_MR)
        ctx.group = group
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        contiguous = [grad.contiguous() for grad in grads]
        grad_x, found = ctx.group.backward(contiguous, *ctx.saved_tensors, ctx.needs_input_grad[0])
        return grad_x, None, *found


def lora_swiglu_mlp(x: Tensor, gate_up: LoraGroup, down: LoraGroup, skips_output: bool) -> Tensor:
    """down(silu(gate(x)) · up(x)). `skips_output`: it is not computed, only its backward will be."""
    parameters = (*gate_up.parameters, *down.parameters)
    y_MK = _LoraSwigluMlp.apply(x.flatten(0, -2), gate_up, down, skips_output, *parameters)
    return y_MK.view_as(x)


class _LoraSwigluMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, gate_up: LoraGroup, down: LoraGroup, skips_output: bool, *parameters: Tensor
    ) -> Tensor:
        width = gate_up.layers[0].b.shape[0]
        both = x_MK.new_empty(len(x_MK), 2 * width)  # the gate's half first
        _, first_MR = gate_up.forward(x_MK, both.split(width, 1))
        activated_MF = _swiglu(both)
        forward = down.forward_without_output if skips_output else down.forward
        (y_MK,), second_MR = forward(activated_MF)
        ctx.save_for_backward(x_MK, first_MR, both, activated_MF, second_MR)
        ctx.gate_up, ctx.down = gate_up, down
        return y_MK

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        x_MK, first_MR, both, activated_MF, second_MR = ctx.saved_tensors
        grad_MF, of_down = ctx.down.backward([upstream[0].contiguous()], activated_MF, second_MR, True)
        grads = _swiglu_backward_(grad_MF, both).split(grad_MF.shape[1], 1)
        grad_x, of_gate_up = ctx.gate_up.backward(grads, x_MK, first_MR, ctx.needs_input_grad[0])
        return grad_x, None, None, None, *of_gate_up, *of_down


def _swiglu(gate_up: Tensor) -> Tensor:
    if gate_up.is_cuda:
        from sojourn.model.kernels.swiglu import swiglu

        return swiglu(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _swiglu_backward_(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Overwrites `gate_up` with its gradient."""
    if gate_up.is_cuda:
        from sojourn.model.kernels.swiglu import swiglu_backward_

        return swiglu_backward_(grad, gate_up)
    gate, up = gate_up.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    grad_up = grad * gate * sigmoid
    gate.copy_(grad * up * sigmoid * (1 + gate * (1 - sigmoid)))
    up.copy_(grad_up)
    return gate_up
