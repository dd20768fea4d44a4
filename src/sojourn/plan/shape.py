"""The sizes of a from-scratch model, every `auto` filled in, and how many parameters they come to."""

from __future__ import annotations

from dataclasses import dataclass

from sojourn.config.schema import ModelConfig, usual_head_size


@dataclass(frozen=True)
class Shape:
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    tied: bool

    @property
    def head_size(self) -> int:
        return self.d_model // self.num_heads

    @property
    def parameters(self) -> int:
        """Counted as transformers' Llama lays them out: no biases, two norms a layer and one at the end."""
        attention = self.d_model * self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = attention + 3 * self.d_model * self.ffn_size + 2 * self.d_model
        embeddings = self.vocab_size * self.d_model * (1 if self.tied else 2)
        return self.num_layers * layer + embeddings + self.d_model

    def flops_per_token(self, length: int) -> int:
        """Forward and backward; the input embedding is a lookup and costs none."""
        lookup = 0 if self.tied else self.vocab_size * self.d_model
        return 6 * (self.parameters - lookup) + 12 * self.num_layers * self.d_model * length


def scratch_shape(model: ModelConfig, vocab_size: int) -> Shape:
    """Heads of 64 (128 from d_model 2048 on), SwiGLU of 8/3, embeddings tied up to d_model 1024."""
    if model.d_model is None or model.num_layers is None:
        raise ValueError("a model without sizes has no shape")
    d = model.d_model
    heads = max(1, d // usual_head_size(d)) if model.num_heads == "auto" else model.num_heads
    kv_heads = heads if model.num_kv_heads == "auto" else model.num_kv_heads
    ffn = -(-8 * d // 3 // 64) * 64 if model.ffn_size == "auto" else model.ffn_size
    tied = d <= 1024 if model.tie_embeddings == "auto" else model.tie_embeddings
    return Shape(d, model.num_layers, heads, kv_heads, ffn, vocab_size, tied)
