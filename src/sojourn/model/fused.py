"""Forwards for the Llama, Qwen2, Qwen3 and Mistral families that do in few passes over memory what transformers does in
many. Modules, names and weights stay transformers' own; only training, where a `Layout` is given, goes this way.

Shapes as in attention.py.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from sojourn.model.attention import How, attend
from sojourn.model.families import FAMILIES


def fuse(model: Any) -> None:
    """Gives the model's norms, attention and feed-forward their fused forwards."""
    prefix = FAMILIES[model.config.model_type]
    forwards: dict[str, Any] = {
        f"{prefix}RMSNorm": _norm,
        f"{prefix}Attention": _attention,
        f"{prefix}MLP": _feed_forward,
    }
    for module in model.modules():
        forward = forwards.get(type(module).__name__)
        if forward is not None:
            module.forward = partial(forward, module, module.forward)


def _norm(module: Any, plain: Any, hidden: Any) -> Any:
    weight = module.weight
    if weight.dtype != hidden.dtype:
        return plain(hidden)
    return F.rms_norm(hidden, weight.shape, weight, module.variance_epsilon)


def _feed_forward(module: Any, plain: Any, hidden: Any) -> Any:
    if module.config.hidden_act != "silu":
        return plain(hidden)
    gate, up = module.gate_proj(hidden), module.up_proj(hidden)
    return module.down_proj(_on(gate.device.type, "gated")(gate, up))


def _attention(module: Any, plain: Any, hidden_states: Any, **given: Any) -> Any:
    layout = given.get("layout")
    if layout is None or given.get("past_key_values") is not None:
        return plain(hidden_states, **given)
    heads = (*hidden_states.shape[:-1], -1, module.head_dim)
    query_BTHD = module.q_proj(hidden_states).view(heads)
    key_BTKD = module.k_proj(hidden_states).view(heads)
    value_BTKD = module.v_proj(hidden_states).view(heads)
    if hasattr(module, "q_norm"):
        query_BTHD, key_BTKD = module.q_norm(query_BTHD), module.k_norm(key_BTKD)
    cos_BTD, sin_BTD = given["position_embeddings"]
    query_BTHD, key_BTKD = _on(hidden_states.device.type, "turned")(query_BTHD, key_BTKD, cos_BTD, sin_BTD)
    # Qwen's layers say it themselves, Mistral has one window for all, Llama none.
    window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    dropout = module.attention_dropout if module.training else 0.0
    out_BTHD = attend(query_BTHD, key_BTKD, value_BTKD, layout, How(module.scaling, window, None, dropout))
    return module.o_proj(out_BTHD.flatten(2)), None


def _gated(gate: Any, up: Any) -> Any:
    return F.silu(gate) * up


def _turned(query_BTHD: Any, key_BTKD: Any, cos_BTD: Any, sin_BTD: Any) -> tuple[Any, Any]:
    """Rotary positions."""
    cos, sin = cos_BTD[:, :, None], sin_BTD[:, :, None]

    def turn(x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return turn(query_BTHD), turn(key_BTKD)


@cache
def _on(device: str, name: str) -> Any:
    """On a GPU each becomes one kernel."""
    function = {"gated": _gated, "turned": _turned}[name]
    return torch.compile(function, dynamic=True) if device == "cuda" else function
