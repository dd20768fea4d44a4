"""The last decoder layer computes its MLP for target tokens only.

After attention no token reads another, so the hidden states of the target tokens, the loss and all gradients stay the
same, and the MLP of tokens without a label is saved. For families with fused forwards. Shapes as in network.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from sojourn.model.kernels.fused_forwards import MOST_PRUNED, attention_block, mlp_block, uses_cpu_layer
from sojourn.model.network import Network


def prune_last_layer(network: Network) -> Network:
    """Not for compiled layers: the number of target tokens changes from batch to batch."""
    layer = network.decoder.layers[-1]
    layer_class: Any = type(layer)
    layer.__class__ = _pruned_class(layer_class)
    layer.blocks = None  # it is more than these two
    return replace(network, last_layer_pruned=True)


@cache
def _pruned_class(layer_class: Any) -> Any:
    original_forward = layer_class.forward

    def forward(self: Any, hidden_states: Tensor, target_indices_N: Tensor | None = None, **kwargs: Any) -> Tensor:
        if target_indices_N is None:
            return original_forward(self, hidden_states, **kwargs)
        tokens = hidden_states.shape[0] * hidden_states.shape[1]
        if len(target_indices_N) > MOST_PRUNED * tokens and uses_cpu_layer(self, hidden_states, kwargs):
            return original_forward(self, hidden_states, **kwargs).flatten(0, 1).index_select(0, target_indices_N)[None]
        attended_BTD = attention_block(self, hidden_states, **kwargs)
        return mlp_block(self, attended_BTD.flatten(0, 1).index_select(0, target_indices_N)[None])

    members = {"forward": forward, "__module__": layer_class.__module__}
    return type(layer_class.__name__, (layer_class,), members)
