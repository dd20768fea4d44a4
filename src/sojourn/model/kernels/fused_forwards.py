"""Forwards for the Llama, Qwen2, Qwen3 and Mistral families that do in few passes over memory what transformers does in
many. Modules, names and weights stay transformers' own; only training, where a `Layout` is given, goes this way.

Everything is computed in the numbers of the hidden states: weights that are kept wider are cast where they are used.

Shapes as in attention.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from sojourn.catalog.fused_families import FUSED_FAMILIES
from sojourn.model.attention import AttentionParams, attend, takes_hopper
from sojourn.model.kernels import fp8, hopper
from sojourn.model.kernels.nf4 import multiply as nf4_multiply
from sojourn.model.kernels.triton_support import supports_triton
from sojourn.model.layers import decoder_layers

_LEAST_FP8 = 256


def apply_fused_forwards(model: Any) -> None:
    """Gives the model's norms, attention, feed-forward and the linear layers of its blocks their fused forwards.

    By classes rather than by instance, so that compiled blocks are alike and share one graph.
    """
    prefix = FUSED_FAMILIES[model.config.get_text_config().model_type]
    forwards = {f"{prefix}RMSNorm": _norm, f"{prefix}Attention": _attention, f"{prefix}MLP": _feed_forward}
    forwards[f"{prefix}DecoderLayer"] = _block
    for module in model.modules():
        _change(module, forwards.get(type(module).__name__), kernels=supports_triton())
    for block in decoder_layers(model):
        for layer in block.modules():
            if type(layer) is torch.nn.Linear:
                _change(layer, _linear, multiply=F.linear)
            elif type(layer).__name__ == "Linear4bit" and hasattr(layer, "quant_state"):  # bitsandbytes' own
                _change(layer, _linear_nf4)


def apply_fp8(model: Any, where: str) -> None:
    """The linear layers of fused blocks from now on, except adapters, which are too small to win anything, and a head
    that is trained; with `except_last_layer`, all blocks but the last and not the head, which are half of what it
    costs the loss; or only in the `backward` of blocks."""
    fp8.try_kernels(next(model.parameters()).device)
    multiply = fp8.multiply_back if where == "backward" else fp8.multiply
    for block in decoder_layers(model)[: -1 if where == "except_last_layer" else None]:
        for layer in block.modules():
            large = getattr(layer, "multiply", None) is F.linear and min(layer.weight.shape) >= _LEAST_FP8
            if large and fp8.fits(layer):
                _change(layer, _linear, multiply=multiply)
    head = model.get_output_embeddings()
    trained = type(head) is torch.nn.Linear and head.weight.requires_grad and head.bias is None
    if where == "on" and trained and fp8.fits(head):
        head.in_8_bits = True


def _change(module: Any, forward: Any, **facts: Any) -> None:
    if forward is not None:
        kind: Any = type(module)
        module.__class__ = _with_forward(kind, forward, **facts)


@cache
def _with_forward(kind: Any, forward: Any, **facts: Any) -> Any:
    """The class with another forward, which may fall back on the `plain` one, and what that forward is to know."""
    known = {name: staticmethod(fact) if callable(fact) else fact for name, fact in facts.items()}
    new = {"forward": forward, "plain": kind.forward, **known, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), new)


def _linear(self: Any, x: Any) -> Any:
    return self.multiply(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def _linear_nf4(self: Any, x: Any) -> Any:
    state = getattr(self.weight, "quant_state", None) or self.quant_state  # FSDP's own parameters forget it
    if x.device.type != "cuda" or state is None or state.quant_type != "nf4":
        return self.plain(x)
    return nf4_multiply(x, self.weight, state, self.bias)


def _norm(self: Any, hidden_states: Any) -> Any:
    weight = self.weight.to(hidden_states.dtype)
    return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


def _feed_forward(self: Any, x: Any) -> Any:
    if self.config.hidden_act != "silu":
        return self.plain(x)
    layers = (self.gate_proj, self.up_proj)
    if self.kernels and x.device.type == "cuda" and _join(layers):
        from sojourn.model.kernels.swiglu import gated

        weight, bias = _side_by_side(layers, x)
        narrow = layers[0].multiply is not F.linear and _join((*layers, self.down_proj))
        if narrow and bias is None and self.down_proj.bias is None:
            forward = layers[0].multiply is fp8.multiply
            made = fp8.feed_forward(x, weight, self.down_proj.weight.to(x.dtype), forward)
            if made is not None:
                return made
        return self.down_proj(gated(layers[0].multiply(x, weight, bias)))
    gate, up = self.gate_proj(x), self.up_proj(x)
    return self.down_proj(_on(gate.device.type, "gated")(gate, up))


def _attention(self: Any, hidden_states: Any, position_embeddings: Any, **given: Any) -> Any:
    layout = given.get("layout")
    if layout is None or given.get("past_key_values") is not None:
        return self.plain(hidden_states, position_embeddings, **given)
    return self.o_proj(_attended(self, hidden_states, position_embeddings, layout)), None


def _attended(self: Any, x: Any, position_embeddings: Any, layout: Any) -> Any:
    """What the heads of each token find, side by side."""
    # Qwen's layers say it themselves, Mistral has one window for all, Llama none.
    one_for_all = self.config.sliding_window if self.config.model_type == "mistral" else None
    how = AttentionParams(
        self.scaling,
        getattr(self, "sliding_window", one_for_all),
        None,
        self.attention_dropout if self.training else 0.0,
    )
    layers = (self.q_proj, self.k_proj, self.v_proj)
    if takes_hopper(x, layout, how) and _join(layers, F.linear) and not hasattr(self, "q_norm"):
        heads = [layer.out_features // self.head_dim for layer in layers[:2]]
        return hopper.attention_of_heads(x, *_side_by_side(layers, x), *position_embeddings, *heads, self.scaling)[0]
    return attend(*_heads(self, x, position_embeddings), layout, how).flatten(2)


def _block(self: Any, hidden_states: Any, **given: Any) -> Any:
    layout, attention, forward = given.get("layout"), self.self_attn, self.mlp
    layers = (attention.o_proj, forward.gate_proj, forward.up_proj, forward.down_proj)
    fits = (
        hopper.Kernels.products
        and hidden_states.dtype == torch.bfloat16
        and not getattr(self, "selective_checkpointing", False)
    )
    fits = fits and layout is not None and given.get("past_key_values") is None and forward.config.hidden_act == "silu"
    if not (fits and _join(layers, F.linear) and all(hopper.takes(layer) for layer in layers)):
        return self.plain(hidden_states, **given)
    attended = _attended(attention, self.input_layernorm(hidden_states), given["position_embeddings"], layout)
    norm, (out, gate, up, down) = self.post_attention_layernorm, (layer.weight for layer in layers)
    both = torch.stack([gate * norm.weight, up * norm.weight], 1).flatten(0, 1)
    weights = (one.to(torch.bfloat16) for one in (out, both, down))
    flat = (hidden_states.flatten(0, 1), attended.flatten(0, 1))
    return hopper.rest_of_block(*flat, *weights, norm.variance_epsilon)[0].view_as(hidden_states)


def _heads(self: Any, x: Any, position_embeddings: Any) -> tuple[Any, Any, Any]:
    """Queries, keys and values, turned to their positions."""
    layers = (self.q_proj, self.k_proj, self.v_proj)
    if self.kernels and x.device.type == "cuda" and _join(layers) and not hasattr(self, "q_norm"):
        from sojourn.model.kernels.rope import turned_apart

        heads = [layer.out_features // self.head_dim for layer in layers[:2]]
        weight, bias = _side_by_side(layers, x)
        made = None
        if layers[0].multiply is not F.linear and bias is None:
            cos, sin = position_embeddings
            made = fp8.heads(x, weight, cos, sin, heads, layers[0].multiply is fp8.multiply)
        if made is None:
            made = turned_apart(layers[0].multiply(x, weight, bias), *position_embeddings, *heads)
        parts: tuple[Any, Any, Any] = made
        return parts
    query_BTHD, key_BTKD, value_BTKD = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in layers)
    if hasattr(self, "q_norm"):
        query_BTHD, key_BTKD = self.q_norm(query_BTHD), self.k_norm(key_BTKD)
    return *_on(x.device.type, "turned")(query_BTHD, key_BTKD, *position_embeddings), value_BTKD


def _join(layers: Any, by: Any = None) -> bool:
    """Whether they can make one multiplication: not where each has an adapter, and not worth it for frozen ones."""
    multiply = by or getattr(layers[0], "multiply", None)
    alike = all(getattr(layer, "multiply", None) is multiply for layer in layers)
    return multiply is not None and alike and all(bool(layer.weight.requires_grad) for layer in layers)


def _side_by_side(layers: Any, x: Any) -> tuple[Any, Any]:
    """Weights and biases as of one layer. Laying them so costs less than multiplying with each."""
    weight = torch.cat([layer.weight.to(x.dtype) for layer in layers])
    return weight, None if layers[0].bias is None else torch.cat([layer.bias.to(x.dtype) for layer in layers])


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
    return torch.compile(function, dynamic=True) if supports_triton() else function
