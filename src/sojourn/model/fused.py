"""Forwards for the Llama, Qwen2, Qwen3 and Mistral families that do in few passes over memory what transformers does in
many. Modules, names and weights stay transformers' own; only training, where a `Layout` is given, goes this way.

Shapes as in attention.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from sojourn.model.attention import How, attend, can_compile
from sojourn.model.families import FAMILIES


def fuse(model: Any) -> None:
    """Gives the model's norms, attention and feed-forward their fused forwards.

    By classes rather than by instance, so that compiled blocks are alike and share one graph.
    """
    prefix = FAMILIES[model.config.get_text_config().model_type]
    forwards = {f"{prefix}RMSNorm": _norm, f"{prefix}Attention": _attention, f"{prefix}MLP": _feed_forward}
    for module in model.modules():
        kind: Any = type(module)
        forward = forwards.get(kind.__name__)
        if forward is not None:
            module.__class__ = _with_forward(kind, forward)


@cache
def _with_forward(kind: Any, forward: Any) -> Any:
    """The class with another forward, which may fall back on the `plain` one."""
    return type(kind.__name__, (kind,), {"forward": forward, "plain": kind.forward, "__module__": kind.__module__})


def _norm(self: Any, hidden_states: Any) -> Any:
    if self.weight.dtype != hidden_states.dtype:
        return self.plain(hidden_states)
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def _feed_forward(self: Any, x: Any) -> Any:
    if self.config.hidden_act != "silu":
        return self.plain(x)
    gate, up = self.gate_proj(x), self.up_proj(x)
    return self.down_proj(_on(gate.device.type, "gated")(gate, up))


def _attention(self: Any, hidden_states: Any, position_embeddings: Any, **given: Any) -> Any:
    layout = given.get("layout")
    if layout is None or given.get("past_key_values") is not None:
        return self.plain(hidden_states, position_embeddings, **given)
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    query_BTHD = self.q_proj(hidden_states).view(heads)
    key_BTKD = self.k_proj(hidden_states).view(heads)
    value_BTKD = self.v_proj(hidden_states).view(heads)
    if hasattr(self, "q_norm"):
        query_BTHD, key_BTKD = self.q_norm(query_BTHD), self.k_norm(key_BTKD)
    query_BTHD, key_BTKD = _on(hidden_states.device.type, "turned")(query_BTHD, key_BTKD, *position_embeddings)
    # Qwen's layers say it themselves, Mistral has one window for all, Llama none.
    one_for_all = self.config.sliding_window if self.config.model_type == "mistral" else None
    window = getattr(self, "sliding_window", one_for_all)
    dropout = self.attention_dropout if self.training else 0.0
    out_BTHD = attend(query_BTHD, key_BTKD, value_BTKD, layout, How(self.scaling, window, None, dropout))
    return self.o_proj(out_BTHD.flatten(2)), None


def _gated(gate: Any, up: Any) -> Any:
    return F.silu(gate) * up


def _turned(query_BTHD: Any, key_BTKD: Any, cos_BTD: Any, sin_BTD: Any) -> tuple[Any, Any]:
    """Rotary positions."""
    cos, sin = cos_BTD[:, :, None], sin_BTD[:, :, None]

    def turn(x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return turn(query_BTHD), turn(key_BTKD)


def _on(device: str, name: str) -> Any:
    """On a GPU each becomes one kernel, where one can be made; in a compiled block it becomes part of that."""
    function = {"gated": _gated, "turned": _turned}[name]
    return function if device != "cuda" or torch.compiler.is_compiling() else _kernel(function)


@cache
def _kernel(function: Any) -> Any:
    return torch.compile(function, dynamic=True) if can_compile() else function
