"""Peer: a Llama in plain torch, without any other library."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.harness import PeerTask, Tensors, train_steps


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.head_dim = c.hidden_size // c.num_attention_heads
        self.q_proj, self.o_proj = (Linear(c.hidden_size, c.hidden_size, bias=False) for _ in range(2))
        inner = self.head_dim * c.num_key_value_heads
        self.k_proj, self.v_proj = (Linear(c.hidden_size, inner, bias=False) for _ in range(2))
        self.grouped = c.num_key_value_heads < c.num_attention_heads

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(
            apply_rope(q, *rope), apply_rope(k, *rope), v, mask, is_causal=mask is None, enable_gqa=self.grouped
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


class Mlp(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(c.hidden_size, c.rms_norm_eps) for _ in range(2))
        self.self_attn, self.mlp = Attention(c), Mlp(c)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Its weights have the names of transformers' Llama."""

    def __init__(self, c: Any, theta: float, length: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.model.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        head_dim = c.hidden_size // c.num_attention_heads
        angles = torch.outer(torch.arange(length).float(), theta ** (-torch.arange(0, head_dim, 2).float() / head_dim))
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        x = self.model.embed_tokens(ids).to(self.cos.dtype)
        rope = (self.cos[positions][:, None], self.sin[positions][:, None])
        for layer in self.model.layers:
            x = layer(x, rope, mask)
        logits = self.lm_head(self.model.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def run_plain(task: PeerTask) -> dict[str, Any]:
    from safetensors.torch import load_file

    base = Path(task.base)
    config = SimpleNamespace(**json.loads((base / "config.json").read_text(encoding="utf-8")))
    dtype = torch.bfloat16 if task.precision == "bf16" else torch.float32
    model = Llama(config, task.theta, task.artefact.row_length, dtype)
    tensors = {name: tensor for path in base.glob("*.safetensors") for name, tensor in load_file(path).items()}
    missing, unknown = model.load_state_dict(tensors, strict=False)
    if unknown or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"unknown weights: {unknown}, missing weights: {missing}")
    model.to(task.device)
    call = torch.compile(model) if task.compile else model

    def loss_fn(inputs: Tensors, targets: int) -> Tensor:
        mask = None if task.whole_rows else _mask(inputs["documents"])
        return call(inputs["ids"], inputs["labels"], inputs["positions"], mask) / targets

    return train_steps(task, model, loss_fn)


def _mask(documents: Tensor) -> Tensor:
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return (documents[:, :, None] == documents[:, None, :])[:, None] & causal
