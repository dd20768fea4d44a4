"""The decoder layers of a transformers model, compiling them one by one, and other forwards for modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

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


def swap_forward(module: nn.Module, forward: Callable[..., Any], **attributes: Any) -> None:
    module_class: Any = type(module)
    module.__class__ = _class_with_forward(module_class, forward, **attributes)


@cache
def _class_with_forward(module_class: Any, forward: Callable[..., Any], **attributes: Any) -> Any:
    """A subclass with another forward, which may call `original_forward`, and with class attributes for it."""
    members = {name: staticmethod(value) if callable(value) else value for name, value in attributes.items()}
    members |= {"forward": forward, "original_forward": module_class.forward, "__module__": module_class.__module__}
    return type(module_class.__name__, (module_class,), members)
