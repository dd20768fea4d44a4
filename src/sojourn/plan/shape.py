"""The sizes of a from-scratch model, every `auto` filled in, and how many parameters they come to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sojourn.config.quantities import Count
from sojourn.config.schema import ModelConfig, usual_head_size
from sojourn.errors import UserError

_ASPECT = 64  # width over layers, where one dial sets both
_NEAR = 0.045  # how far from the parameters asked for a model may be, where any comes so near


@dataclass(frozen=True)
class Shape:
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    tied: bool
    head_dim: int | None = None  # where heads do not simply share the width

    @property
    def head_size(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def parameters(self) -> int:
        """Counted as transformers' Llama lays them out: no biases, two norms a layer and one at the end."""
        attention = self.d_model * self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = attention + 3 * self.d_model * self.ffn_size + 2 * self.d_model
        embeddings = self.vocab_size * self.d_model * (1 if self.tied else 2)
        return self.num_layers * layer + embeddings + self.d_model

    def flops_per_token(self, length: float, frozen: bool = False) -> float:
        """Forward and backward; the input embedding is a lookup and costs none. Frozen weights get no gradients."""
        lookup = 0 if self.tied else self.vocab_size * self.d_model
        attention = 12 * self.num_layers * self.num_heads * self.head_size * length
        return (4 if frozen else 6) * (self.parameters - lookup) + attention

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA on all linear layers."""
        d, wide, narrow = self.d_model, self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        attention = 2 * (d + wide) + 2 * (d + narrow)
        return self.num_layers * rank * (attention + 3 * (d + self.ffn_size))


def base_shape(settings: dict[str, Any]) -> Shape:
    """Of an existing model, from its config.json."""
    d, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
    return Shape(
        d_model=d,
        num_layers=int(settings["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(settings.get("num_key_value_heads") or heads),
        ffn_size=int(settings.get("intermediate_size") or 4 * d),
        vocab_size=int(settings["vocab_size"]),
        tied=bool(settings.get("tie_word_embeddings", True)),
        head_dim=settings.get("head_dim"),
    )


def scratch_shape(model: ModelConfig, vocab_size: int) -> Shape:
    """Heads of 64 (128 from d_model 2048 on), SwiGLU of 8/3, embeddings tied up to d_model 1024."""
    if model.depth is not None:
        return _filled(model, *_of_depth(model.depth), vocab_size)
    if model.params is not None:
        return _of_params(model, int(model.params), vocab_size)
    if model.d_model is None or model.num_layers is None:
        raise ValueError("a model without sizes has no shape")
    return _filled(model, model.d_model, model.num_layers, vocab_size)


def _filled(model: ModelConfig, d: int, layers: int, vocab_size: int) -> Shape:
    heads = max(1, d // usual_head_size(d)) if model.num_heads == "auto" else model.num_heads
    kv_heads = heads if model.num_kv_heads == "auto" else model.num_kv_heads
    ffn = -(-8 * d // 3 // 64) * 64 if model.ffn_size == "auto" else model.ffn_size
    tied = d <= 1024 if model.tie_embeddings == "auto" else model.tie_embeddings
    return Shape(d, layers, heads, kv_heads, ffn, vocab_size, tied)


def _of_depth(depth: int) -> tuple[int, int]:
    width = _ASPECT * depth
    head = usual_head_size(width)
    return -(-width // head) * head, depth


def _of_params(model: ModelConfig, wanted: int, vocab_size: int) -> Shape:
    """Of each width the number of layers that comes nearest; of those near enough, the one best in proportions and
    number together."""
    found: list[Shape] = []
    width = 64
    while width <= 65536:
        bare, one = (_filled(model, width, layers, vocab_size).parameters for layers in (0, 1))
        layers = min(1024, max(1, round((wanted - bare) / (one - bare))))
        if found and (one > wanted * (1 + _NEAR) or width > 16 * _ASPECT * layers):  # wider ones are worse still
            break
        found.append(_filled(model, width, layers, vocab_size))
        width += usual_head_size(width)

    def miss(shape: Shape) -> float:
        return abs(shape.parameters / wanted - 1)

    def fault(shape: Shape) -> float:
        return abs(math.log(shape.d_model / shape.num_layers / _ASPECT)) + 20 * miss(shape)

    smallest = found[0].parameters
    if smallest > wanted * (1 + _NEAR):
        words = vocab_size * (1 if found[0].tied else 2) * found[0].d_model
        raise UserError(
            f"model.params: {Count(wanted)} given, but even the smallest model with data.vocab_size {vocab_size} has "
            f"{smallest:,} parameters, {words:,} of them embeddings; ask for more or set a smaller data.vocab_size"
        )
    near = [shape for shape in found if miss(shape) <= _NEAR]
    return min(near, key=fault) if near else min(found, key=miss)
