"""The forward pass over one step's tokens, one operation after another."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sojourn.infer.engine.adapters import Adapters
from sojourn.infer.engine.batch import StepBatch, build_arrays, to_device
from sojourn.infer.engine.decoder import Decoder, Layer
from sojourn.infer.engine.ops_torch import Ops
from sojourn.infer.engine.scheduler import Part


class Forward:
    def __init__(self, decoder: Decoder, ops: Ops, blocks: int, adapters: Adapters) -> None:
        self.decoder, self.ops, self._adapters = decoder, ops, adapters
        self.caches = [
            ops.new_cache(blocks, layer.attention, decoder.dtype, decoder.device) for layer in decoder.layers
        ]

    def __call__(self, batch: StepBatch) -> Tensor:
        """Logits (L, vocabulary) in the model's dtype."""
        decoder = self.decoder
        x_TD = F.embedding(batch.ids_T, decoder.embedding_VD)
        if decoder.embedding_scale != 1:
            x_TD = x_TD * decoder.embedding_scale
        for index, (layer, cache) in enumerate(zip(decoder.layers, self.caches, strict=True)):
            if batch.adapter_T is None and layer.post_attention_norm_D is None:
                self._plain_layer(x_TD, layer, cache, batch)
            else:
                self._layer(x_TD, index, layer, cache, batch)
        return self.ops.norm_linear(
            x_TD.index_select(0, batch.logit_rows_L), decoder.norm_D, decoder.eps, decoder.lm_head
        )

    def _plain_layer(self, x_TD: Tensor, layer: Layer, cache: Any, batch: StepBatch) -> None:
        ops, eps, spec = self.ops, self.decoder.eps, layer.attention
        qkv = ops.norm_linear(x_TD, layer.input_norm_D, eps, layer.qkv, layer.qkv_bias)
        query = ops.rope_store(qkv, cache, batch, spec)
        ops.linear_add_(x_TD, ops.attention(query, cache, batch, spec), layer.o, layer.o_bias)
        activated = ops.norm_gated(x_TD, layer.mlp_norm_D, eps, layer.gate_up, self.decoder.activation)
        ops.linear_add_(x_TD, activated, layer.down)

    def _layer(self, x_TD: Tensor, index: int, layer: Layer, cache: Any, batch: StepBatch) -> None:
        """With adapters, or with norms of what is added."""
        ops, eps, spec = self.ops, self.decoder.eps, layer.attention

        def linear(x: Tensor, name: str, packed: Any, bias: Tensor | None = None) -> Tensor:
            return self._adapters.add(ops.linear(x, packed, bias), x, index, name, batch.adapter_T)

        def add(x: Tensor, norm_D: Tensor | None) -> None:
            x_TD.add_(x if norm_D is None else ops.rms_norm(x, norm_D, eps))

        qkv = linear(ops.rms_norm(x_TD, layer.input_norm_D, eps), "qkv", layer.qkv, layer.qkv_bias)
        attended = ops.attention(ops.rope_store(qkv, cache, batch, spec), cache, batch, spec)
        add(linear(attended, "o", layer.o, layer.o_bias), layer.post_attention_norm_D)
        gate_up = linear(ops.rms_norm(x_TD, layer.mlp_norm_D, eps), "gate_up", layer.gate_up)
        add(linear(ops.gated_act(gate_up, self.decoder.activation), "down", layer.down), layer.post_mlp_norm_D)


class PlainForward:
    def __init__(self, forward: Forward, adapters: Adapters) -> None:
        self._forward, self._adapters = forward, adapters

    def warm_up(self, last_tokens: Tensor) -> None:
        """Nothing to prepare."""

    def __call__(self, parts: list[Part], last_tokens: Tensor) -> Tensor:
        batch = to_device(build_arrays(parts, self._adapters.indices), self._forward.decoder.device)
        if any(part.request.unread for part in parts):
            batch.ids_T = known_ids(batch.ids_T, last_tokens)
        return self._forward(batch)


def known_ids(ids_T: Tensor, last_tokens: Tensor) -> Tensor:
    """Token ids, where those below 0 name a row of `last_tokens`."""
    return torch.where(ids_T < 0, last_tokens[(-1 - ids_T).clamp(min=0)], ids_T)
