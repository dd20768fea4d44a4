"""The sizes of a from-scratch model, every `auto` filled in."""

from __future__ import annotations

import math

from sojourn.catalog.models import ModelSpec
from sojourn.config.quantities import Count
from sojourn.config.schema import ModelConfig, default_head_size
from sojourn.errors import UserError

_ASPECT_RATIO = 64  # d_model over layers, where one dial sets both
_TOLERANCE = 0.045  # relative distance from `model.params`, where any size comes so near


def llama_spec(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool) -> ModelSpec:
    """As transformers' Llama lays it out: no biases, two norms a layer and one at the end."""
    return ModelSpec(
        name=f"{hidden}×{layers}", hub="", family="llama", hidden=hidden, layers=layers, heads=heads,
        kv_heads=kv_heads, head_dim=hidden // heads, ffn=ffn, vocab=vocab, positions=0, source="the configuration",
        date="", tied=tied,
    )  # fmt: skip


def new_model_spec(model: ModelConfig, vocab_size: int) -> ModelSpec:
    """Heads of 64 (128 from d_model 2048 on), SwiGLU of 8/3, embeddings tied up to d_model 1024."""
    if model.depth is not None:
        return _filled(model, *_of_depth(model.depth), vocab_size)
    if model.params is not None:
        return _of_params(model, int(model.params), vocab_size)
    if model.d_model is None or model.num_layers is None:
        raise ValueError("a model without sizes has no shape")
    return _filled(model, model.d_model, model.num_layers, vocab_size)


def _filled(model: ModelConfig, d: int, layers: int, vocab_size: int) -> ModelSpec:
    heads = max(1, d // default_head_size(d)) if model.num_heads == "auto" else model.num_heads
    kv_heads = heads if model.num_kv_heads == "auto" else model.num_kv_heads
    ffn = -(-8 * d // 3 // 64) * 64 if model.ffn_size == "auto" else model.ffn_size
    tied = d <= 1024 if model.tie_embeddings == "auto" else model.tie_embeddings
    return llama_spec(d, layers, heads, kv_heads, ffn, vocab_size, tied)


def _of_depth(depth: int) -> tuple[int, int]:
    width = _ASPECT_RATIO * depth
    head = default_head_size(width)
    return -(-width // head) * head, depth


def _of_params(model: ModelConfig, wanted: int, vocab_size: int) -> ModelSpec:
    """Of each width the number of layers that comes nearest; of those near enough, the one best in proportions and
    number together."""
    found: list[ModelSpec] = []
    width = 64
    while width <= 65536:
        bare, one = (_filled(model, width, layers, vocab_size).parameters for layers in (0, 1))
        layers = min(1024, max(1, round((wanted - bare) / (one - bare))))
        if found and (
            one > wanted * (1 + _TOLERANCE) or width > 16 * _ASPECT_RATIO * layers
        ):  # wider ones are worse still
            break
        found.append(_filled(model, width, layers, vocab_size))
        width += default_head_size(width)

    def error(shape: ModelSpec) -> float:
        return abs(shape.parameters / wanted - 1)

    def cost(shape: ModelSpec) -> float:
        return abs(math.log(shape.hidden / shape.layers / _ASPECT_RATIO)) + 20 * error(shape)

    smallest = found[0].parameters
    if smallest > wanted * (1 + _TOLERANCE):
        words = vocab_size * (1 if found[0].tied else 2) * found[0].hidden
        raise UserError(
            f"model.params: {Count(wanted)} given, but even the smallest model with data.vocab_size {vocab_size} has "
            f"{smallest:,} parameters, {words:,} of them embeddings; ask for more or set a smaller data.vocab_size"
        )
    near = [shape for shape in found if error(shape) <= _TOLERANCE]
    return min(near, key=cost) if near else min(found, key=error)
