"""Whether the kernels of hopper.py do here what torch does: they are young, and made by packages that change."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sojourn.machine.probe_software import importable
from sojourn.model.kernels.hopper import Kernels, attention_of_heads, rest_of_block


def forget_kernels() -> None:
    Kernels.products = Kernels.attention = False


def try_kernels(model: Any) -> None:
    """For its blocks: they are used where they make what torch makes, but for rounding."""
    warnings.filterwarnings("ignore", category=UserWarning, module="cutlass")  # about its own insides
    device, config = next(model.parameters()).device, model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = Heads(size, config.num_attention_heads // config.num_key_value_heads)
    Kernels.products = _tried("quack", "products", device, _rest, _rest_by_torch, _rest_given)
    Kernels.attention = _tried("flash_attn.cute", "attention", device, heads.ours, heads.by_torch, heads.given)


def _tried(package: str, name: str, device: Any, ours: Any, plain: Any, given: Any) -> bool:
    if not importable(package):
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


@dataclass(frozen=True)
class Heads:
    """Attention with so many heads of queries to each of keys and values as the model has."""

    size: int
    group: int

    def given(self) -> list[Any]:
        width = (2 * self.group + 4) * self.size
        return [torch.randn(2, 160, 128), 0.1 * torch.randn(width, 128), torch.randn(width)]

    def angles(self, device: Any) -> Any:
        angles = torch.linspace(0, 6, 160 * self.size, device=device).view(2, 160, -1).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    def ours(self, x: Any, weight: Any, bias: Any) -> Any:
        how = (*self.angles(x.device), 2 * self.group, 2, self.size**-0.5)
        return attention_of_heads(x, weight, bias, *how)[0]

    def by_torch(self, x: Any, weight: Any, bias: Any) -> Any:
        cos, sin = (one[:, :, None, : self.size // 2] for one in self.angles(x.device))
        joined = F.linear(x.float(), weight.float(), bias.float()).unflatten(-1, (-1, self.size))

        def turned(heads: Any) -> Any:
            first, second = heads.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        query, key, value = joined.split([2 * self.group, 2, 2], 2)
        heads = (turned(query), *(one.repeat_interleave(self.group, 2) for one in (turned(key), value)))
        query, key, value = (one.transpose(1, 2) for one in heads)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
