"""A GPT-2 of the workload's size, built and trained the way nanoGPT does it: layer norms without biases, learned
positions, GELU, autocast, all logits at once, compiled as a whole. Another model than ours, so that its speed alone can
be compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sojourn.bench.train.track import Task, Tensors, race


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.widen, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Any) -> Any:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (one.transpose(1, 2) for one in qkv.unbind(2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.before_mlp(x))))


class Gpt(nn.Module):  # type: ignore[misc]
    def __init__(self, c: Any, length: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.embed_positions = nn.Embedding(length, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c.hidden_size, c.num_attention_heads) for _ in range(c.num_hidden_layers))
        self.norm = nn.LayerNorm(c.hidden_size, bias=False)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.02)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Any, labels: Any) -> Any:
        x = self.embed_tokens(ids) + self.embed_positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def run_gpt(task: Task) -> dict[str, Any]:
    config = SimpleNamespace(**json.loads((Path(task.base) / "config.json").read_text(encoding="utf-8")))
    model = Gpt(config, task.artefact.row_length).to(task.device)
    call = torch.compile(model) if task.compile else model

    def loss_of(inputs: Tensors, targets: int) -> Any:
        with task.autocast():
            return call(inputs["ids"], inputs["labels"]) / targets

    return race(task, model, loss_of)
