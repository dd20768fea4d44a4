"""Activation checkpointing (gradient checkpointing): store less in the forward, recompute it in the backward.

`full` stores each decoder layer's input only. `selective` also stores the outputs of matmuls and attention, so that
only cheap elementwise operations are recomputed. `offload` is in offloaded_layers.py. It replaces the forward of a
layer's class, inside what torch.compile sees, so layers still share one compiled graph.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sojourn.model.layers import decoder_layers
from sojourn.model.offloaded_layers import offload_layer_inputs

_EXPENSIVE_OPS = ("mm", "linear", "attention", "attn", "flash")  # parts of the names of ops whose outputs are stored


def apply_activation_checkpointing(model: nn.Module, mode: str, preserve_rng_state: bool = True) -> None:
    """`mode`: selective, full or offload. Without dropout set `preserve_rng_state` to False: saving the RNG state costs
    CPU time and cannot be captured in a CUDA graph."""
    for module in model.modules():
        if hasattr(module, "cpu_decoder"):
            module.cpu_decoder = False  # it would not call the layers
    if mode == "offload":
        offload_layer_inputs(model, preserve_rng_state)
        return
    for layer in decoder_layers(model):
        layer_class: Any = type(layer)
        layer.__class__ = _checkpointed_class(layer_class, mode == "selective", preserve_rng_state)
        for module in layer.modules() if mode == "selective" else ():
            module.selective_checkpointing = True  # fused forwards must not overwrite what it stores


@cache
def _checkpointed_class(layer_class: Any, selective: bool, preserve_rng_state: bool) -> Any:
    original_forward = layer_class.forward
    options: dict[str, Any] = {"context_fn": _selective_contexts} if selective else {}
    options |= {"use_reentrant": False, "preserve_rng_state": preserve_rng_state, "determinism_check": "none"}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original_forward(self, *args, **kwargs)
        return checkpoint(original_forward, self, *args, **options, **kwargs)

    members = {"forward": forward, "__module__": layer_class.__module__}
    return type(layer_class.__name__, (layer_class,), members)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _policy_of_op(op)


@cache
def _policy_of_op(op: Any) -> CheckpointPolicy:
    expensive = any(part in str(op) for part in _EXPENSIVE_OPS)
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE
