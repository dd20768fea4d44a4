"""One global step: loss summed over the target tokens of the whole batch and divided by their number.

Shapes: B rows, T tokens a row, N target tokens, D model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sojourn.data.artefact import Batch, Split
from sojourn.model import loss
from sojourn.model.network import Network
from sojourn.train.feed import Feed
from sojourn.train.optim import Optimizer


def hidden_of_targets(network: Network, feed: Feed, batch: Batch) -> tuple[Any, Any]:
    """Hidden states of the target tokens alone (the head need see no others), and their labels."""
    ready = feed.ready(batch)
    hidden_BTD = network.hidden(ready.ids_BT, ready.positions_BT, ready.layout)
    return hidden_BTD.flatten(0, 1)[ready.places_N], ready.labels_N


def loss_sum(network: Network, feed: Feed, batch: Batch, whole: bool = False) -> Any:
    """Cross-entropy summed over the targets. Attention stays inside each document."""
    hidden_ND, labels_N = hidden_of_targets(network, feed, batch)
    return loss.loss_sum(network.head, hidden_ND, labels_N, whole)


@dataclass(frozen=True)
class Stepper:
    """What every step works with."""

    network: Network
    optimizer: Optimizer
    scaler: Any
    feed: Feed
    clip: float
    whole: bool = False

    def step(self, batches: list[Batch]) -> tuple[Any, Any]:
        """Forward and backward of every micro batch, then one update. Returns the mean loss and the gradient's norm."""
        targets = sum(batch.targets for batch in batches)
        mean = torch.zeros((), device=self.feed.device)
        if targets == 0:  # nothing to learn from
            return mean, mean
        for batch in batches:
            if batch.targets:
                with self.feed.autocast():
                    part = loss_sum(self.network, self.feed, batch, self.whole) / targets
                self.scaler.scale(part).backward()
                mean += part.detach()
        self.scaler.unscale_(self.optimizer.torch)
        norm = torch.nn.utils.clip_grad_norm_(self.optimizer.parameters, self.clip or math.inf)
        self.scaler.step(self.optimizer.torch)
        self.scaler.update()
        self.optimizer.zero_grad()
        return mean, norm


def evaluate(network: Network, split: Split, rows: int, feed: Feed) -> tuple[float, float]:
    """Over the first `rows` rows: the mean loss per target token, and the share of tokens that were the likeliest."""
    total, hits, targets = 0.0, 0.0, 0
    was_training = network.model.training
    network.model.eval()
    with torch.no_grad(), feed.autocast():
        for batch in feed.batches(split, np.arange(min(rows, len(split)))):
            if batch.targets:
                lost, right = loss.score(network.head, *hidden_of_targets(network, feed, batch))
                total, hits, targets = total + float(lost), hits + float(right), targets + batch.targets
    network.model.train(was_training)
    return (total / targets, hits / targets) if targets else (float("nan"), float("nan"))
