"""The decoder layers of a transformers model, and compiling them one by one."""

from __future__ import annotations

import torch
from torch import nn


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(model: nn.Module) -> None:
    """Layers of one class share one graph, so compiling 80 takes as long as compiling 2."""
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
    for layer in decoder_layers(model):
        layer.compile()
