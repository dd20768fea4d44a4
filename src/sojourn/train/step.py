"""One global step: loss summed over the target tokens of the whole batch and divided by their number.

Shapes: B rows, T tokens a row, N target tokens, D model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from sojourn.data.artefact import Batch, Split, read_batch


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


def micro_batches(split: Split, rows: np.ndarray, micro_batch: int, width: int, pad_id: int) -> Iterator[Batch]:
    for start in range(0, len(rows), micro_batch):
        yield read_batch(split, rows[start : start + micro_batch], width, pad_id)


def autocast(device: str, precision: str) -> Any:
    import torch

    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)


def evaluate(model: Any, split: Split, rows: int, micro_batch: int, width: int, pad_id: int, device: str, precision: str) -> float:
    """Mean loss per target token over the first `rows` rows."""
    import torch

    total, targets = 0.0, 0
    model.eval()
    with torch.inference_mode(), autocast(device, precision):
        for batch in micro_batches(split, np.arange(min(rows, len(split))), micro_batch, width, pad_id):
            if batch.targets:
                total += float(loss_sum(model, batch, device))
                targets += batch.targets
    model.train()
    return total / targets if targets else float("nan")
