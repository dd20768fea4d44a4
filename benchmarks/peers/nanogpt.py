"""Peer: a GPT-2 of the workload's size, built and trained as nanoGPT does it.

Layer norms without biases, learned positions, GELU, autocast, all logits at once, compiled as a whole. It is another
model than ours, so only its speed is compared, not its losses.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.harness import PeerTask, Tensors, train_steps


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.ln_1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.ln_2(x))))


class Gpt(nn.Module):
    def __init__(self, c: Any, length: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.embed_positions = nn.Embedding(length, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c.hidden_size, c.num_attention_heads) for _ in range(c.num_hidden_layers))
        self.norm = nn.LayerNorm(c.hidden_size, bias=False)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.02)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed_tokens(ids) + self.embed_positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def run_nanogpt(task: PeerTask) -> dict[str, Any]:
    config = SimpleNamespace(**json.loads((Path(task.base) / "config.json").read_text(encoding="utf-8")))
    model = Gpt(config, task.artefact.row_length).to(task.device)
    call = torch.compile(model) if task.compile else model

    def loss_fn(inputs: Tensors, targets: int) -> Tensor:
        with task.autocast():
            return call(inputs["ids"], inputs["labels"]) / targets

    return train_steps(task, model, loss_fn)
