"""One global step: loss summed over the target tokens of the whole batch and divided by their number.

Shapes: B rows, T tokens a row, N target tokens, D model width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sojourn.data.artefact import Batch, Split, read_batch
from sojourn.train.optim import Optimizer


def loss_sum(model: Any, batch: Batch, device: str) -> Any:
    """Cross-entropy summed over the targets. Attention stays inside each document; the head sees targets only."""
    import torch
    import torch.nn.functional as F

    ids_BT = torch.from_numpy(batch.ids).to(device, non_blocking=True)
    labels_BT = torch.from_numpy(batch.labels).to(device, non_blocking=True)
    positions_BT = torch.from_numpy(batch.positions).to(device, non_blocking=True)
    documents_BT = torch.from_numpy(batch.documents).to(device, non_blocking=True)
    length = ids_BT.shape[1]
    causal_TT = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    mask_B1TT = (documents_BT[:, :, None] == documents_BT[:, None, :])[:, None] & causal_TT
    hidden_BTD = model.get_decoder()(
        input_ids=ids_BT, attention_mask=mask_B1TT, position_ids=positions_BT, use_cache=False
    ).last_hidden_state
    wanted_BT = labels_BT >= 0
    logits_NV = model.get_output_embeddings()(hidden_BTD[wanted_BT])
    return F.cross_entropy(logits_NV.float(), labels_BT[wanted_BT], reduction="sum")


@dataclass(frozen=True)
class Feed:
    """How rows reach the model: how many at once, how wide, on which device, in which numbers."""

    micro_batch: int
    width: int
    pad_id: int
    device: str
    precision: str = "fp32"
    fit: bool = False  # rows hold one document each, and a batch is only as wide as its longest

    def batches(self, split: Split, rows: np.ndarray) -> Iterator[Batch]:
        for start in range(0, len(rows), self.micro_batch):
            chosen = rows[start : start + self.micro_batch]
            width = int((split.rows[chosen + 1] - split.rows[chosen]).max()) if self.fit else self.width
            yield read_batch(split, chosen, min(self.width, -(-width // 8) * 8), self.pad_id)

    def autocast(self) -> Any:
        import torch

        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16 if self.precision == "bf16" else torch.float16)


def global_step(
    model: Any, optimizer: Optimizer, scaler: Any, batches: list[Batch], feed: Feed, clip: float
) -> tuple[Any, Any]:
    """Forward and backward of every micro batch, then one update. Returns the mean loss and the gradient's norm."""
    import torch

    targets = max(1, sum(batch.targets for batch in batches))
    loss = torch.zeros((), device=feed.device)
    for batch in batches:
        with feed.autocast():
            part = loss_sum(model, batch, feed.device) / targets
        scaler.scale(part).backward()
        loss += part.detach()
    scaler.unscale_(optimizer.torch)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    scaler.step(optimizer.torch)
    scaler.update()
    optimizer.zero_grad()
    return loss, norm


def evaluate(model: Any, split: Split, rows: int, feed: Feed) -> float:
    """Mean loss per target token over the first `rows` rows."""
    import torch

    total, targets = 0.0, 0
    model.eval()
    with torch.inference_mode(), feed.autocast():
        for batch in feed.batches(split, np.arange(min(rows, len(split)))):
            if batch.targets:
                total += float(loss_sum(model, batch, feed.device))
                targets += batch.targets
    model.train()
    return total / targets if targets else float("nan")
