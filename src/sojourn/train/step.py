"""One global step: loss summed over the target tokens of the whole batch and divided by their number.

Shapes: B rows, T tokens a row, N target tokens, D model width.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from sojourn.data.artefact import Batch, Split
from sojourn.model import loss
from sojourn.model.network import Network
from sojourn.train.batcher import Batcher, DeviceBatch
from sojourn.train.cuda_graphs import CudaGraphs
from sojourn.train.distributed.engine import Engine
from sojourn.train.optim.optimizers import Optimizer
from sojourn.train.ranks import SINGLE, Ranks


def hidden_of_targets(network: Network, batcher: Batcher, batch: Batch) -> tuple[Any, Any]:
    """Hidden states of the target tokens alone (the head need see no others), and their labels."""
    return _hidden_of(network, batcher.ready(batch))


def _hidden_of(network: Network, ready: DeviceBatch) -> tuple[Any, Any]:
    return network.hidden_states(ready.ids_BT, ready.positions_BT, ready.layout, ready.places_N), ready.labels_N


def loss_sum(network: Network, batcher: Batcher, batch: Batch, whole: bool = False) -> Any:
    """Cross-entropy summed over the targets. Attention stays inside each document."""
    return loss.loss_sum(network.lm_head, *hidden_of_targets(network, batcher, batch), whole)


def _summed(network: Network, ready: DeviceBatch, whole: bool) -> Any:
    return loss.loss_sum(network.lm_head, *_hidden_of(network, ready), whole)


@dataclass(frozen=True)
class SpeculativeStep:
    """A step whose first forward pass has been asked for before the one before it was known to be good."""

    step: int
    batches: list[Batch]
    waited: float
    micro_batch: int
    part: Any


class Answer:
    """Numbers on their way from the device. Reading them waits for what made them, but not for work that the device was
    given since: so it never runs out of work while we look at its answer."""

    def __init__(self, numbers: Any) -> None:
        self._numbers, self._there = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def read(self) -> list[float]:
        if self._there is not None:
            self._there.synchronize()
        found: list[float] = self._numbers.tolist()
        return found


@dataclass(frozen=True)
class Stepper:
    """What every step works with. Nothing is changed before `update`: gradients can be thrown away at any time."""

    engine: Engine
    batcher: Batcher
    clip: float
    whole: bool = False
    cuda_graphs: CudaGraphs | None = None

    @property
    def network(self) -> Network:
        return self.engine.network

    @property
    def ranks(self) -> Ranks:
        return self.engine.ranks

    @property
    def optimizer(self) -> Optimizer:
        return self.engine.optimizer

    @property
    def plays(self) -> bool:
        """Whether passes come from a recording."""
        return self.cuda_graphs is not None and self.cuda_graphs.plays

    @property
    def settled(self) -> bool:
        """Whether that is decided."""
        return self.cuda_graphs is None or self.cuda_graphs.settled

    def gradients(self, batches: list[Batch]) -> tuple[float, float]:
        """Forward and backward of every micro batch. Returns the mean loss and the norm of the (clipped) gradient."""
        loss, size = self.passes(batches).tolist()
        return loss, size

    def passes(self, batches: list[Batch], begun: SpeculativeStep | None = None) -> Any:
        """The same, as numbers still on the device. `begun`: what has been done of them already."""
        engine, ranks = self.engine, self.ranks
        targets = ranks.sum(sum(batch.targets for batch in batches))[0]
        mean = torch.zeros((), device=self.batcher.device)
        if targets == 0:  # nothing to learn from
            return torch.stack([mean, mean])
        there = begun.part if begun is not None and begun.batches is batches else None
        batches = (
            pad_with_empty_batches(batches, ranks)
            if engine.syncs_every_micro_batch
            else [batch for batch in batches if batch.targets]
        )
        with engine.accumulate():
            for number, batch in enumerate(batches, 1):
                part = self._part(batch, targets) if there is None else there
                if part.requires_grad:  # else it is done already
                    engine.backward(part, last=number == len(batches))
                mean += part.detach_()  # whoever holds it holds no graph
                there = None
        ranks.all_reduce(mean)
        return torch.stack([mean, engine.clip_grad_norm(self.clip).to(mean)])

    def begin(self, batches: list[Batch]) -> Any:
        """The forward pass of the first of them that teaches anything; None where none does."""
        targets = sum(batch.targets for batch in batches)
        return next((self._part(batch, targets) for batch in batches if batch.targets), None)

    def _part(self, batch: Batch, targets: float) -> Any:
        """A micro batch's share of the mean loss. Where a recording is played, the backward comes with it."""
        if self.cuda_graphs is not None:
            part, ready = self.cuda_graphs.take(self.batcher.ready(batch), targets)
            if part is not None:
                return part
            wanted = partial(_summed, self.network, ready, self.whole)
        else:
            wanted = partial(self._loss, batch)
        with self.batcher.autocast():
            return self.engine.run(wanted) / targets

    def _loss(self, batch: Batch) -> Any:
        return loss_sum(self.network, self.batcher, batch, self.whole)

    def update_if_good(self, found: Any, highest: float) -> Answer:
        """The update, if the device finds loss and norm to be numbers, and the loss not too high. The answer: loss,
        norm, and 1 where the weights have changed."""
        good = torch.isfinite(found).all() & (found[0].double() <= highest)
        self.engine.optimizer_step(good)
        return Answer(torch.cat([found, good.to(found)[None]]))

    def update(self) -> None:
        self.engine.optimizer_step()

    def discard(self) -> None:
        self.engine.discard_gradients()

    def step(self, batches: list[Batch]) -> tuple[float, float]:
        done = self.gradients(batches)
        self.update()
        return done


def make_cuda_graphs(engine: Engine, batcher: Batcher, whole: bool, again: bool) -> CudaGraphs | None:
    """None where passes are never alike, or make more than gradients. `again`: blocks are recomputed."""
    network = engine.network
    why = None
    if not engine.has_direct_gradients or network.sliding_windows:
        why = "for one process, without sliding windows or fp16"
    elif network.has_dropout and again:
        why = (
            "dropout cannot be recomputed from a recording: use train.activation_checkpointing=off or method.dropout=0"
        )
    if why is not None:
        print(f"note: train.cuda_graphs: {why}", flush=True)
        return None

    def summed(ready: DeviceBatch) -> Any:
        with batcher.autocast():
            return _summed(network, ready, whole)

    return CudaGraphs(summed, engine.optimizer.parameters)


def pad_with_empty_batches(batches: list[Batch], ranks: Ranks) -> list[Batch]:
    """As many as the process with the most has; those added train nothing."""
    return batches + [without_targets(batches[0])] * (ranks.max(len(batches)) - len(batches))


def without_targets(batch: Batch) -> Batch:
    """Its tokens, with nothing to learn from them."""
    return replace(batch, labels=np.full_like(batch.labels, -100))


def evaluate(
    network: Network, split: Split, rows: int, batcher: Batcher, engine: Engine | None = None
) -> tuple[float, float]:
    """Over the first `rows` rows: the mean loss per target token, and the share of tokens that were the likeliest."""
    total, hits, targets = 0.0, 0.0, 0
    ranks, syncs_every_micro_batch = (
        (engine.ranks, engine.syncs_every_micro_batch) if engine is not None else (SINGLE, False)
    )
    was_training = network.model.training
    network.model.eval()

    def scored(batch: Batch) -> tuple[Any, Any]:
        return loss.score(network.lm_head, *hidden_of_targets(network, batcher, batch))

    try:
        with (
            torch.no_grad(),
            batcher.autocast(),
            nullcontext() if syncs_every_micro_batch else ranks.raise_oom_on_all_ranks(),
        ):
            mine = ranks.shard(np.arange(min(rows, len(split))))
            batches = batcher.batches(split, mine)
            if syncs_every_micro_batch:
                found = list(batches) or [without_targets(one) for one in batcher.batches(split, np.zeros(1, np.int64))]
                batches = iter(pad_with_empty_batches(found, ranks))
            for batch in batches:
                if batch.targets or syncs_every_micro_batch:
                    lost, right = scored(batch) if engine is None else engine.run(partial(scored, batch))
                    total, hits, targets = total + float(lost), hits + float(right), targets + batch.targets
    finally:
        network.model.train(was_training)
    total, hits, counted = ranks.sum(total, hits, targets)
    return (total / counted, hits / counted) if counted else (float("nan"), float("nan"))
