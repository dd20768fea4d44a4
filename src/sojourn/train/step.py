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
from sojourn.train.ranks import ALONE, Ranks


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
    """What every step works with. Nothing is changed before `update`: gradients can be thrown away at any time."""

    network: Network
    optimizer: Optimizer
    scaler: Any
    feed: Feed
    clip: float
    whole: bool = False
    ranks: Ranks = ALONE

    def gradients(self, batches: list[Batch]) -> tuple[float, float]:
        """Forward and backward of every micro batch. Returns the mean loss and the norm of the (clipped) gradient."""
        targets = self.ranks.total(sum(batch.targets for batch in batches))[0]
        mean = torch.zeros((), device=self.feed.device)
        if targets == 0:  # nothing to learn from
            return 0.0, 0.0
        with self.ranks.together():
            for batch in batches:
                if batch.targets:
                    with self.feed.autocast():
                        part = loss_sum(self.network, self.feed, batch, self.whole) / targets
                    self.scaler.scale(part).backward()
                    mean += part.detach()
        self.ranks.add_gradients(self.optimizer.parameters)
        self.ranks.add(mean)
        self.scaler.unscale_(self.optimizer.torch)
        norm = torch.nn.utils.clip_grad_norm_(self.optimizer.parameters, self.clip or math.inf)
        loss, size = torch.stack([mean, norm.to(mean.dtype)]).tolist()
        return loss, size

    def update(self) -> None:
        """One step of the optimizer, if there is anything to learn from."""
        with self.ranks.together():
            if any(parameter.grad is not None for parameter in self.optimizer.parameters):
                self.scaler.step(self.optimizer.torch)
                self.scaler.update()
        self.optimizer.zero_grad()

    def discard(self) -> None:
        """Throws the gradients away, and what the scaler has noted of them."""
        self.optimizer.zero_grad()
        if self.scaler.is_enabled():
            self.scaler._per_optimizer_states.clear()

    def step(self, batches: list[Batch]) -> tuple[float, float]:
        done = self.gradients(batches)
        self.update()
        return done


def evaluate(network: Network, split: Split, rows: int, feed: Feed, ranks: Ranks = ALONE) -> tuple[float, float]:
    """Over the first `rows` rows: the mean loss per target token, and the share of tokens that were the likeliest."""
    total, hits, targets = 0.0, 0.0, 0
    was_training = network.model.training
    network.model.eval()
    try:
        with torch.no_grad(), feed.autocast(), ranks.together():
            for batch in feed.batches(split, ranks.share(np.arange(min(rows, len(split))))):
                if batch.targets:
                    lost, right = loss.score(network.head, *hidden_of_targets(network, feed, batch))
                    total, hits, targets = total + float(lost), hits + float(right), targets + batch.targets
    finally:
        network.model.train(was_training)
    total, hits, counted = ranks.total(total, hits, targets)
    return (total / counted, hits / counted) if counted else (float("nan"), float("nan"))
