"""The graph of a decoder with KV cache.

Inputs: input_ids [batch, new], attention_mask [batch, past + new] with 0 for padding on either side, and per layer
past_key_values.N.key / .value [batch, KV heads, past, head]. Outputs: logits [batch, new, vocabulary] in fp32, and
present.N.key / .value. Positions are counted from the mask. Names are those of Optimum and onnxruntime-genai.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sojourn.export.onnx.architecture import Architecture, Layer
from sojourn.export.onnx.graph import MICROSOFT, Graph
from sojourn.export.onnx.rope import Rope, read_ropes
from sojourn.export.onnx.stored_weights import StoredWeights

_MASKED = -3e4  # finite: a row of padding has no key at all, and −inf would become NaN; fp16 holds it
PAST, PRESENT = "past_key_values.{}.{}", "present.{}.{}"


@dataclass
class _Inputs:
    """Values that all layers share. `rotations`: cosines and sines by rope; `biases`: what is added to the scores, by
    window."""

    tokens: str  # [batch, new, −1], a shape
    last: str  # past + new − 1 for each text, int32
    total: str  # past + new, int32
    rows: str  # [batch, new]: the row of `rotations` of each token
    rotations: dict[str, tuple[str, str]] = field(default_factory=dict)
    biases: dict[int | None, str] = field(default_factory=dict)


class DecoderGraph:
    def __init__(self, architecture: Architecture, graph: Graph, weights: StoredWeights, dtype: str) -> None:
        from onnx import TensorProto

        self._a, self._g, self._w, self._dtype = architecture, graph, weights, dtype
        self._float, self._int32, self._int64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
        self._half = TensorProto.FLOAT16 if dtype == "float16" else TensorProto.FLOAT

    def build(self) -> None:
        graph, config = self._g, self._a.config
        ids = graph.input("input_ids", self._int64, ["batch", "new"])
        mask = graph.input("attention_mask", self._int64, ["batch", "total"])
        shared = self._shared(ids, mask)
        hidden = self._wide(self._w.embedding(graph.node("Reshape", [ids, graph.integers([-1])])))
        if self._a.family.is_gemma:
            hidden = graph.node("Mul", [hidden, graph.number(config.hidden_size**0.5, "float32")])
        for number, layer in enumerate(self._a.layers):
            hidden = self._layer(hidden, number, layer, shared)
        logits = self._wide(self._w.head(self._narrow(self._norm(hidden, "norm.weight"))))
        cap = getattr(config, "final_logit_softcapping", None)
        if cap:
            limit = graph.number(cap, "float32")
            logits = graph.node("Mul", [graph.node("Tanh", [graph.node("Div", [logits, limit])]), limit])
        graph.node("Reshape", [logits, shared.tokens], ["logits"])
        graph.output("logits", self._float, ["batch", "new", int(config.vocab_size)])
        self._declare_cache()

    def _declare_cache(self) -> None:
        for number in range(len(self._a.layers)):
            for kind in ("key", "value"):
                heads, size = self._a.kv_heads, self._a.head_dim
                self._g.input(PAST.format(number, kind), self._half, ["batch", heads, "past", size])
                self._g.output(PRESENT.format(number, kind), self._half, ["batch", heads, "total", size])

    def _layer(self, hidden: str, number: int, layer: Layer, shared: _Inputs) -> str:
        name = f"layers.{number}."
        before, after, before_mlp, after_mlp = self._a.family.norms
        normed = self._narrow(self._norm(hidden, f"{name}{before}.weight"))
        attended = self._wide(self._attention(normed, f"{name}self_attn.", number, layer, shared))
        if after is not None:
            attended = self._norm(attended, f"{name}{after}.weight")
        hidden = self._g.node("Add", [hidden, attended])
        normed = self._narrow(self._norm(hidden, f"{name}{before_mlp}.weight"))
        fed = self._wide(self._mlp(normed, f"{name}mlp."))
        if after_mlp is not None:
            fed = self._norm(fed, f"{name}{after_mlp}.weight")
        return self._g.node("Add", [hidden, fed])

    def _attention(self, values: str, name: str, number: int, layer: Layer, shared: _Inputs) -> str:
        graph, heads, kv_heads, size = self._g, self._a.heads, self._a.kv_heads, self._a.head_dim
        query, key, value = (
            graph.node("Reshape", [one, shared.tokens]) for one in self._projections(values, name, heads, kv_heads)
        )
        query = self._rotated(self._head_norm(query, f"{name}q_norm.weight", heads), heads, layer, shared)
        key = self._rotated(self._head_norm(key, f"{name}k_norm.weight", kv_heads), kv_heads, layer, shared)
        past = [PAST.format(number, kind) for kind in ("key", "value")]
        present = [PRESENT.format(number, kind) for kind in ("key", "value")]
        attended = graph.node(
            "GroupQueryAttention",
            [query, key, value, *past, shared.last, shared.total, "", "", "", shared.biases[layer.window]],
            [f"{name}output", *present],
            domain=MICROSOFT,
            num_heads=heads,
            kv_num_heads=kv_heads,
            scale=self._a.scale,
            **self._soft_cap(),
        )
        flat = graph.node("Reshape", [attended, graph.integers([-1, heads * size])])
        return self._w.linear(flat, f"{name}o_proj.weight")

    def _soft_cap(self) -> dict[str, float]:
        """Only Gemma 2 applies it: Gemma 3 has the setting, and its attention leaves it out."""
        cap = getattr(self._a.config, "attn_logit_softcapping", None) if self._a.model_type == "gemma2" else None
        return {"softcap": float(cap)} if cap else {}

    def _projections(self, values: str, name: str, heads: int, kv_heads: int) -> list[str]:
        size = self._a.head_dim
        if f"{name}qkv_proj.weight" in self._w:
            fused = self._w.linear(values, f"{name}qkv_proj.weight")
            return self._g.split(fused, [heads * size, kv_heads * size, kv_heads * size])
        return [self._w.linear(values, f"{name}{one}_proj.weight") for one in ("q", "k", "v")]

    def _head_norm(self, values: str, name: str, heads: int) -> str:
        """Per head, on [batch, new, heads × head]."""
        if name not in self._w:
            return values
        graph, size = self._g, self._a.head_dim
        split = graph.node("Reshape", [values, graph.integers([0, 0, heads, size])])
        normed = self._narrow(self._norm(self._wide(split), name))
        return graph.node("Reshape", [normed, graph.integers([0, 0, heads * size])])

    def _rotated(self, values: str, heads: int, layer: Layer, shared: _Inputs) -> str:
        if layer.rope is None:
            return values
        cosines, sines = shared.rotations[layer.rope]
        size = 2 * len(self._ropes[layer.rope].frequencies)
        partial = {"rotary_embedding_dim": size} if size != self._a.head_dim else {}
        return self._g.node(
            "RotaryEmbedding", [values, shared.rows, cosines, sines], domain=MICROSOFT,
            interleaved=int(self._a.family.interleaved_rope), num_heads=heads, **partial,
        )  # fmt: skip

    def _mlp(self, values: str, name: str) -> str:
        if f"{name}gate_up_proj.weight" in self._w:
            width = int(self._a.config.intermediate_size)
            gate, up = self._g.split(self._w.linear(values, f"{name}gate_up_proj.weight"), [width, width])
        else:
            gate, up = (self._w.linear(values, f"{name}{one}_proj.weight") for one in ("gate", "up"))
        if self._a.activation == "silu":
            active = self._g.node("Mul", [gate, self._g.node("Sigmoid", [gate])])
        else:
            kind = "tanh" if self._a.activation == "gelu_tanh" else "none"
            active = self._g.node("Gelu", [gate], approximate=kind)
        return self._w.linear(self._g.node("Mul", [active, up]), f"{name}down_proj.weight")

    def _norm(self, values: str, name: str) -> str:
        """RMSNorm in fp32."""
        weight = self._w.vector(name, "float32", 1.0 if self._a.family.is_gemma else 0.0)
        eps = float(self._a.config.rms_norm_eps)
        return self._g.node("SimplifiedLayerNormalization", [values, weight], axis=-1, epsilon=eps, stash_type=1)

    def _wide(self, value: str) -> str:
        return value if self._half == self._float else self._g.node("Cast", [value], to=self._float)

    def _narrow(self, value: str) -> str:
        return value if self._half == self._float else self._g.node("Cast", [value], to=self._half)

    def _shared(self, ids: str, mask: str) -> _Inputs:
        graph = self._g
        shape, one = graph.node("Shape", [ids]), graph.integers([1])
        batch, new = (graph.node("Gather", [shape, graph.integers([index])]) for index in (0, 1))
        total = graph.node("Gather", [graph.node("Shape", [mask]), one])
        total_int = graph.node("Cast", [total], to=self._int32)
        last = graph.node("Expand", [graph.node("Sub", [total_int, graph.constant(_int32(1))]), batch])
        tokens = graph.node("Concat", [shape, graph.integers([-1])], axis=0)
        counted = graph.node("Sub", [graph.node("CumSum", [mask, graph.number(1, "int64")]), one])
        counted = graph.node("Max", [counted, graph.integers([0])])
        past = graph.node("Sub", [total, new])
        positions = graph.node("Slice", [counted, past, total, one])
        count = graph.node("Squeeze", [graph.node("Mul", [batch, new])])
        rows = graph.node("Reshape", [self._range(graph.number(0, "int64"), count), shape])
        shared = _Inputs(tokens, last, graph.node("Squeeze", [total_int]), rows)
        self._ropes = read_ropes(self._a)
        for key, rope in self._ropes.items():
            shared.rotations[key] = self._rotations(rope, positions)
        keys = self._range(graph.number(0, "int64"), graph.node("Squeeze", [total]))
        queries = self._range(graph.node("Squeeze", [past]), graph.node("Squeeze", [total]))
        queries = graph.node("Unsqueeze", [queries, one])
        is_token = graph.node("Unsqueeze", [graph.node("Cast", [mask], to=_bool()), graph.integers([1, 2])])
        for window in dict.fromkeys(layer.window for layer in self._a.layers):
            shared.biases[window] = self._bias(keys, queries, is_token, window)
        return shared

    def _range(self, start: str, stop: str) -> str:
        return self._g.node("Range", [start, stop, self._g.number(1, "int64")])

    def _rotations(self, rope: Rope, positions: str) -> tuple[str, str]:
        """Cosines and sines [batch × new, rotated / 2] of this call's tokens alone: no table limits the context."""
        graph = self._g
        frequencies = graph.constant(rope.frequencies[None])
        if rope.long_frequencies is not None:
            longest = graph.node("ReduceMax", [positions], keepdims=0)
            is_long = graph.node("GreaterOrEqual", [longest, graph.number(rope.long_from, "int64")])
            frequencies = graph.node("Where", [is_long, graph.constant(rope.long_frequencies[None]), frequencies])
        column = graph.node("Reshape", [positions, graph.integers([-1, 1])])
        angles = graph.node("Mul", [graph.node("Cast", [column], to=self._float), frequencies])
        found = [graph.node(operator, [angles]) for operator in ("Cos", "Sin")]
        if rope.scaling != 1.0:
            found = [graph.node("Mul", [one, graph.number(rope.scaling, "float32")]) for one in found]
        cosines, sines = map(self._narrow, found)
        return cosines, sines

    def _bias(self, keys: str, queries: str, is_token: str, window: int | None) -> str:
        """[batch, 1, new, total]: 0 where a query sees a key. Windows are counted in places, as transformers does."""
        graph = self._g
        seen = graph.node("LessOrEqual", [keys, queries])
        if window is not None:
            oldest = graph.node("Sub", [queries, graph.integers([window])])
            seen = graph.node("And", [seen, graph.node("Greater", [keys, oldest])])
        seen = graph.node("And", [seen, is_token])
        return graph.node("Where", [seen, graph.number(0.0, self._dtype), graph.number(_MASKED, self._dtype)])


def _int32(value: int) -> Any:
    import numpy as np

    return np.array([value], dtype=np.int32)


def _bool() -> int:
    from onnx import TensorProto

    return int(TensorProto.BOOL)
