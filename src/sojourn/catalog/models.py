"""Shapes of well-known models, found by the names people use, and the parameters that a shape adds up to."""

import difflib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sojourn.catalog.tables import load_rows, read_once, to_row, user_file
from sojourn.config.messages import printable
from sojourn.errors import UserError

_SAME_SHAPE = {  # words in a name that do not change a shape: how it was tuned, and how it is stored
    *("instruct", "chat", "it", "pt", "base", "thinking", "hf", "meta", "unsloth", "mlx"),
    *("gguf", "awq", "gptq", "bnb", "fp8", "int4", "int8", "4bit", "8bit", "bf16", "fp16"),
}


_SEES = re.compile(r"(^|[-_/.\d])(vl|vlm|vision|omni|llava|internvl|minicpm-v|pixtral)([-_/.\d:]|$)")


class RefusedModel(UserError):
    """A model that is known and cannot be trained or served here."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of a language model. See models.toml for the keys; everything else follows from them."""

    name: str
    hub: str
    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int
    source: str
    date: str
    also: tuple[str, ...] = ()
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norm_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    experts: int | None = None
    active_experts: int | None = None
    expert_ffn: int | None = None
    shared_ffn: int | None = None
    sliding_window: int | None = None
    full_every: int | None = None
    dense_layers: int | None = None
    attention_total: int | None = None
    softmax_layers: int | None = None
    other: int | None = None
    gated: bool = True
    q_rank: int | None = None
    kv_rank: int | None = None
    rope_dim: int | None = None
    v_dim: int | None = None
    sinks: bool = False
    router_bias: bool = False
    learned_positions: bool = False
    softcap: bool = False
    attention_dropout: bool = False
    router_aux_loss_coef: float = 0.0
    published: int | None = None
    note: str = ""
    caveat: str = ""
    stored: str = ""

    @cached_property
    def attention_parameters(self) -> int:
        """Of one layer: queries, keys, values and the output, with their biases and norms; in the mean, where layers
        differ."""
        if self.attention_total is not None:
            return self.attention_total // self.layers
        if self.kv_rank is not None:
            return sum(inputs * outputs for inputs, outputs in self.attention_shapes.values()) + self._latent_norms
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        made = queries + 2 * keys
        biases = made * self.qkv_bias + self.hidden * self.o_bias
        return self.hidden * (made + queries) + biases + 2 * self.head_dim * self.qk_norm + self.heads * self.sinks

    @property
    def attention_shapes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of attention. Multi-head latent attention (`kv_rank`) has low-rank
        queries, keys and values."""
        d, q, k = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.kv_rank is None:
            return {"q_proj": (d, q), "k_proj": (d, k), "v_proj": (d, k), "o_proj": (q, d)}
        rope, values = self.rope_dim or 0, self.heads * (self.v_dim or self.head_dim)
        low = {"q_a_proj": (d, self.q_rank), "q_b_proj": (self.q_rank, q)} if self.q_rank else {"q_proj": (d, q)}
        expanded = self.heads * (self.head_dim - rope) + values
        keys = {"kv_a_proj_with_mqa": (d, self.kv_rank + rope), "kv_b_proj": (self.kv_rank, expanded)}
        return {**low, **keys, "o_proj": (values, d)}

    @property
    def _latent_norms(self) -> int:
        return (self.q_rank or 0) + (self.kv_rank or 0)

    def _feed_forward(self, size: int) -> int:
        """Two matrices up and one down where it is gated, else one up."""
        ups = 2 if self.gated else 1
        return (ups + 1) * self.hidden * size + (ups * size + self.hidden) * self.mlp_bias

    def _all_feed_forwards(self, active: bool = False) -> int:
        """Of all layers; `active`: only what one token visits."""
        if self.experts is None:
            return self.layers * self._feed_forward(self.ffn)
        dense = self.dense_layers or 0
        visited = (self.active_experts if active else self.experts) or 0
        shared = self._feed_forward(self.shared_ffn) if self.shared_ffn else 0
        sparse = visited * self._feed_forward(self.expert_ffn or 0) + shared
        return dense * self._feed_forward(self.ffn) + self.sparse_layers * sparse + self.router_parameters

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return 0 if self.experts is None else self.layers - (self.dense_layers or 0)

    @property
    def router_parameters(self) -> int:
        """Of all layers."""
        return self.sparse_layers * (self.hidden + self.router_bias) * (self.experts or 0)

    @property
    def routed_width(self) -> int:
        """The size of all experts that one token visits, in a layer that has experts."""
        return (self.active_experts or 0) * (self.expert_ffn or 0)

    def ffn_parameters(self, active: bool = False) -> int:
        """Of one layer, on average where some layers have no experts; `active`: only what one token visits."""
        return round(self._all_feed_forwards(active) / self.layers)

    def layer_parameters(self, active: bool = False) -> int:
        return self.attention_parameters + self.ffn_parameters(active) + self.norms * self._norm

    @property
    def _norm(self) -> int:
        return self.hidden * (1 + self.norm_bias)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        """The output matrix where it is not the embedding, and its bias."""
        return self.embedding_parameters * (not self.tied) + self.vocab * self.head_bias

    @cached_property
    def parameters(self) -> int:
        return self._attention_and_norms + self._all_feed_forwards() + self._ends

    @cached_property
    def active_parameters(self) -> int:
        """What one token is computed with: all, but for the experts that it does not visit and, beside them, the input
        embedding, which is a lookup."""
        return self.parameters if self.experts is None else self._computed_parameters

    @cached_property
    def _computed_parameters(self) -> int:
        lookup = (0 if self.tied else self.embedding_parameters) + (self.other or 0)
        return self._attention_and_norms + self._all_feed_forwards(active=True) + self._ends - lookup

    @cached_property
    def _attention_and_norms(self) -> int:
        attention = self.attention_total or self.layers * self.attention_parameters
        return attention + self.layers * self.norms * self._norm

    @cached_property
    def _ends(self) -> int:
        positions = self.positions * self.hidden * self.learned_positions
        return self.embedding_parameters + positions + self._norm + self.head_parameters + (self.other or 0)

    def flops_per_token(self, length: float, frozen: bool = False) -> float:
        """Forward and backward; the input embedding is a lookup and costs none. Frozen weights get no gradients."""
        attention = 12 * (self.softmax_layers or self.layers) * self.heads * self.head_dim * length
        return (4 if frozen else 6) * self._computed_parameters + attention

    @property
    def active_ffn(self) -> int:
        """The feed-forward size that one token is computed with, on average where some layers have no experts."""
        if self.experts is None:
            return self.ffn
        dense = self.dense_layers or 0
        sparse = (self.active_experts or 1) * (self.expert_ffn or self.ffn) + (self.shared_ffn or 0)
        return round((dense * self.ffn + (self.layers - dense) * sparse) / self.layers)

    @property
    def full_layers(self) -> int:
        """Layers whose attention looks back to the start."""
        if self.sliding_window is None:
            return self.softmax_layers or self.layers
        return self.layers // self.full_every if self.full_every else 0


@read_once
def models(user: Path | None = None) -> tuple[ModelSpec, ...]:
    """Every model of the catalogue and of the user's own file."""
    return tuple(
        _shape(name, row, f'{where}: model."{name}"') for name, (row, where) in load_rows("model", user).items()
    )


def find_model(name: str, user: Path | None = None) -> ModelSpec:
    """The catalogue's row for a model: `qwen2.5-7b`, `Qwen/Qwen2.5-7B-Instruct`, `llama3.1:8b`."""
    known = {_key(called): row for row in models(user) for called in (row.name, row.hub, *row.also)}
    found = known.get(_key(name))
    if found is not None:
        return found
    if _SEES.search(name.lower()):
        raise RefusedModel(
            f"'{printable(name)}' sees images: Sojourn trains text alone; take the text model it is made from"
        )
    close = difflib.get_close_matches(_key(name)[:60], known, n=6, cutoff=0.6)
    names = list(dict.fromkeys(known[key].name for key in close))[:3]
    guess = f"did you mean {' or '.join(names)}?" if names else "it knows models like qwen2.5-7b or llama-3.1-8b."
    raise UserError(f"no model called '{printable(name)}' in the catalogue; {guess} Your own go into {user_file()}")


def _key(name: str) -> str:
    """The last part of a path or hub name as one word, without what leaves the shape as it is."""
    last = re.split(r"[/\\]", name.strip().rstrip("/\\"))[-1].lower()
    return "".join(word for word in re.split(r"[\s\-_:]+", last) if word not in _SAME_SHAPE)


def _shape(name: str, row: dict[str, Any], where: str) -> ModelSpec:
    filled = {"name": name, "hub": name, "family": "llama", **row}
    hidden, heads = filled.get("hidden"), filled.get("heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:  # else `to_row` reports what is wrong
        filled = {"kv_heads": heads, "head_dim": hidden // heads, **filled}
    shape = to_row(ModelSpec, filled, where, "model")
    if wrong := _wrong(shape):
        raise UserError(f"{where}: {wrong}")
    return shape


def _wrong(shape: ModelSpec) -> str | None:
    """What makes a shape impossible, by the key to change."""
    if shape.heads % shape.kv_heads:
        return f"`kv_heads` is {shape.kv_heads}: it must divide heads ({shape.heads})"
    if any((shape.experts, shape.active_experts, shape.expert_ffn, shape.shared_ffn)):
        for key in ("experts", "active_experts", "expert_ffn"):
            if getattr(shape, key) is None:
                return f"`{key}` is missing; a model with experts needs it"
        if (shape.active_experts or 0) > (shape.experts or 0):
            return f"`active_experts` is {shape.active_experts}: there are only {shape.experts} experts"
    if (shape.dense_layers or 0) > shape.layers:
        return f"`dense_layers` is {shape.dense_layers}: there are only {shape.layers} layers"
    if (shape.softmax_layers or 0) > shape.layers:
        return f"`softmax_layers` is {shape.softmax_layers}: there are only {shape.layers} layers"
    if shape.kv_rank is not None and not 0 < (shape.rope_dim or 0) < shape.head_dim:
        return "`rope_dim` goes with `kv_rank`, and is less than `head_dim`"
    if shape.full_every and shape.sliding_window is None:
        return "`full_every` goes with `sliding_window`, which is missing"
    if shape.published not in (None, shape.parameters):
        return f"`published` is {shape.published:,}, but the shape gives {shape.parameters:,} parameters"
    return None
