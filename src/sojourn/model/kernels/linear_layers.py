"""Linear layers for fused_forwards.py: plain, in NF4, with LoRA as one function, several as one matmul."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sojourn.model.kernels.kept_weights import KEEPS_WEIGHT
from sojourn.model.kernels.lora_linear import LoraGroup, LoraLayer, lora_linears
from sojourn.model.kernels.nf4 import nf4_linear, nf4_weight, quant_state
from sojourn.model.layers import decoder_layers, swap_forward


def linear(self: Any, x: Tensor) -> Tensor:
    return self.linear_fn(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def linear_nf4(self: Any, x: Tensor) -> Tensor:
    state = quant_state(self)
    if x.device.type != "cuda" or state is None:
        return self.original_forward(x)
    compute_dtype = self.compute_dtype or x.dtype
    return nf4_linear(x.to(compute_dtype), self.weight, state, self.bias).to(x.dtype)


def linear_with_adapter(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """peft's, or one function where the adapter is plain LoRA."""
    if args or kwargs or not are_plain_lora((self,), x):
        return self.original_forward(x, *args, **kwargs)
    return lora_linears(x, lora_group((self,), x.dtype))[0]


def lora_group(layers: Sequence[Any], dtype: torch.dtype) -> LoraGroup:
    return LoraGroup([_lora_layer(layer, dtype) for layer in layers], dtype)


def _lora_layer(layer: Any, dtype: torch.dtype) -> LoraLayer:
    name, base = layer.active_adapters[0], layer.base_layer
    weight = partial(nf4_weight, base, dtype) if hasattr(base, "kept_weight") else lambda: base.weight
    return LoraLayer(weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])


def are_plain_lora(layers: Sequence[Any], x: Tensor) -> bool:
    """Not in compiled layers: torch.compile fuses peft's own operations."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return False
    return all(hasattr(layer, "lora_A") and _is_plain_lora(layer, x) for layer in layers)


def _is_plain_lora(self: Any, x: Tensor) -> bool:
    names, base = self.active_adapters, self.base_layer
    if len(names) != 1 or names[0] not in self.lora_A or self.disable_adapters or self.merged:
        return False
    if getattr(self, "selective_checkpointing", False):  # it stores outputs of matmuls that would be added to
        return False
    layers = (self.lora_A[names[0]], self.lora_B[names[0]])
    is_nf4 = hasattr(base, "kept_weight") and x.is_cuda and quant_state(base) is not None
    is_dense = getattr(base, "linear_fn", None) is F.linear and base.weight.dtype == x.dtype
    return (
        (is_nf4 or is_dense)
        and not base.weight.requires_grad
        and names[0] not in self.lora_variant  # such as DoRA
        and type(self.lora_dropout[names[0]]) is nn.Identity
        and all(getattr(layer, "linear_fn", None) is F.linear and layer.bias is None for layer in layers)
    )


def can_concatenate(layers: Sequence[nn.Module], linear_fn: Any = None) -> bool:
    """Whether one matmul can replace theirs: not where each has an adapter, and not worth it for frozen weights."""
    linear_fn = linear_fn or getattr(layers[0], "linear_fn", None)
    alike = all(getattr(layer, "linear_fn", None) is linear_fn for layer in layers)
    return linear_fn is not None and alike and all(bool(layer.weight.requires_grad) for layer in layers)


def concatenate(layers: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weights and biases as of one layer. Concatenating costs less than separate matmuls."""
    if len(layers) == 1:
        bias = layers[0].bias
        return layers[0].weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    weight = torch.cat([layer.weight.to(x.dtype) for layer in layers])
    return weight, None if layers[0].bias is None else torch.cat([layer.bias.to(x.dtype) for layer in layers])


def apply_nf4_linear(model: nn.Module) -> None:
    """For any family: torch.compile cannot look into bitsandbytes' own layers, and around what it cannot look into,
    activation checkpointing stores everything."""
    for decoder_layer in decoder_layers(model):
        for layer in decoder_layer.modules():
            if type(layer).__name__ == "Linear4bit" and hasattr(layer, "quant_state"):  # of bitsandbytes
                swap_forward(layer, linear_nf4, **KEEPS_WEIGHT)
