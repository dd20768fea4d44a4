"""Tests the kernels of hopper.py against torch before they are used: the packages are young and change."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sojourn.machine.probe_software import importable
from sojourn.model.kernels.hopper import HopperKernels, o_proj_mlp, qkv_rope_attention

_MAX_ERROR = 0.02  # relative, in bf16
_TOKENS = 160  # per row


def disable_hopper_kernels() -> None:
    HopperKernels.gemm = HopperKernels.attention = False


def smoke_test_hopper_kernels(model: nn.Module) -> None:
    """Enables the kernels that compute what torch computes, but for rounding, with this model's head size."""
    warnings.filterwarnings("ignore", category=UserWarning, module="cutlass")  # about its own internals
    device, config = next(model.parameters()).device, model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = AttentionCase(head_dim, config.num_attention_heads // config.num_key_value_heads)
    HopperKernels.gemm = _passes("quack", "GEMMs", device, _mlp, _mlp_by_torch, _mlp_inputs)
    HopperKernels.attention = _passes(
        "flash_attn.cute", "attention", device, attention.ours, attention.by_torch, attention.inputs
    )


def _passes(
    package: str,
    kernels: str,
    device: torch.device,
    ours: Callable[..., Tensor],
    by_torch: Callable[..., Tensor],
    make_inputs: Callable[[], list[Tensor]],
) -> bool:
    """Compares outputs and gradients. A failure is a note, not an error."""
    if not importable(package):
        return False
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            torch.manual_seed(0)
            inputs = [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in make_inputs()]
            outputs, expected = (_output_and_gradients(function, inputs) for function in (ours, by_torch))
        reason = None if all(map(_is_close, outputs, expected)) else "wrong results"
    except Exception as error:  # whatever a missing kernel raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if reason is not None:
        print(f"note: {package}'s {kernels} failed their smoke test ({reason}); using torch's, slower", flush=True)
    return reason is None


def _output_and_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    output = function(*inputs)
    upstream = torch.linspace(-1, 1, output.numel()).to(output).view_as(output)
    return [output, *torch.autograd.grad(output, inputs, upstream)]


def _is_close(value: Tensor, expected: Tensor) -> bool:
    error = torch.linalg.vector_norm(value.float() - expected.float()) / torch.linalg.vector_norm(expected.float())
    return bool(error < _MAX_ERROR)


def _mlp_inputs() -> list[Tensor]:
    tokens = 2 * _TOKENS
    shapes = ((tokens, 256), (tokens, 128), (256, 128), (768, 256), (256, 384))
    return [torch.randn(shape) * (1.0 if shape[0] == tokens else 0.1) for shape in shapes]


def _mlp(*inputs: Tensor) -> Tensor:
    return o_proj_mlp(*inputs, 1e-5)[0]


def _mlp_by_torch(*inputs: Tensor) -> Tensor:
    hidden, attended, o_proj, gate_up, down = (tensor.float() for tensor in inputs)
    residual = hidden + attended @ o_proj.T
    normed = F.rms_norm(residual, residual.shape[-1:], eps=1e-5)
    gate, up = (normed @ gate_up.T).unflatten(-1, (-1, 2)).unbind(-1)
    return residual + (F.silu(gate) * up) @ down.T


@dataclass(frozen=True)
class AttentionCase:
    """Attention with two key/value heads, and `group` query heads per key/value head."""

    head_dim: int
    group: int

    def inputs(self) -> list[Tensor]:
        width = (2 * self.group + 4) * self.head_dim
        return [torch.randn(2, _TOKENS, 128), 0.1 * torch.randn(width, 128), torch.randn(width)]

    def cos_sin(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        angles = torch.linspace(0, 6, _TOKENS * self.head_dim, device=device).view(2, _TOKENS, -1).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    def ours(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        options = (*self.cos_sin(x.device), 2 * self.group, 2, self.head_dim**-0.5)
        return qkv_rope_attention(x, weight, bias, *options)[0]

    def by_torch(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        cos, sin = (angle[:, :, None, : self.head_dim // 2] for angle in self.cos_sin(x.device))
        qkv = F.linear(x.float(), weight.float(), bias.float()).unflatten(-1, (-1, self.head_dim))

        def rotate(heads: Tensor) -> Tensor:
            first, second = heads.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        query, key, value = qkv.split([2 * self.group, 2, 2], 2)
        key, value = (heads.repeat_interleave(self.group, 2) for heads in (rotate(key), value))
        query, key, value = (heads.transpose(1, 2) for heads in (rotate(query), key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
