"""A last block that goes on, after its attention, with the tokens that are asked for alone.

No token looks at another from there on, so the hidden states that a loss is taken of stay what they are, and so do all
gradients. For the families that have fused forwards: their blocks are built alike. Shapes as in network.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from sojourn.model.network import Network


def shorten(network: Network) -> Network:
    """Not for compiled blocks: how many tokens are asked for changes from batch to batch."""
    last = network.body.layers[-1]
    kind: Any = type(last)
    last.__class__ = _short(kind)
    return replace(network, short=True)


@cache
def _short(kind: Any) -> Any:
    plain = kind.forward

    def forward(self: Any, hidden_states: Any, places_N: Any = None, **given: Any) -> Any:
        if places_N is None:
            return plain(self, hidden_states, **given)
        attended_BTD, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)
        hidden_1ND = (hidden_states + attended_BTD).flatten(0, 1).index_select(0, places_N)[None]
        return hidden_1ND + self.mlp(self.post_attention_layernorm(hidden_1ND))

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
