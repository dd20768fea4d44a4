"""One global step: forward and backward of every micro batch (gradient accumulation), then one optimizer update.

The loss is that of the whole global batch, whatever the micro batch and the number of ranks: see `objective/base.py`.
Nothing changes before the update, so the gradients of a step can be discarded and computed again at any time. The OOM
fallback, the replay of suspicious steps and the abandoning of a step at a signal rely on that.

With `train.optimizer_in_backward=on` the backward is a part of the update (`distributed/in_backward.py`): `gradients`
computes the loss only, which is checked before anything changes.

Async step. The weights must not change before loss and gradient norm are known to be good, but waiting for them leaves
a GPU idle. The fused AdamW kernel can skip an update by itself (`found_inf`) and divide by the clipping factor
(`grad_scale`). So, where it is used (one rank, CUDA, no gradient scaler), the device judges: we launch the update,
which happens only if loss and norm are good, then the next step's first forward (the speculative step), and only then
read the loss. If the step was not good, nothing has changed, and the speculative step is discarded. There is no
speculative step where dropout draws random numbers, since these must be drawn in the order of good steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sojourn.data.artefact import Batch
from sojourn.model.network import Network
from sojourn.train.batcher import Batcher, DeviceBatch
from sojourn.train.cuda_graphs import CudaGraphs
from sojourn.train.distributed.engine import Engine
from sojourn.train.objective.base import Objective
from sojourn.train.optim.optimizers import Optimizer
from sojourn.train.ranks import Ranks


@dataclass(frozen=True)
class SpeculativeStep:
    """A step whose first forward was launched before the loss of the step before it was read.

    `loss_share`: of its first micro batch with anything to learn from; None if it must be computed (again).
    """

    step: int
    batches: list[Batch]
    data_wait: float
    micro_batch: int
    loss_share: Tensor | None


class AsyncRead:
    """A copy of values from the device. `read` waits for the copy, but not for work launched after it."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        read: list[float] = self._values.tolist()
        return read


@dataclass(frozen=True)
class Stepper:
    engine: Engine
    batcher: Batcher
    objective: Objective
    max_grad_norm: float
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
    def has_cuda_graphs(self) -> bool:
        """Whether CUDA graphs are captured, and hold memory."""
        return self.cuda_graphs is not None and self.cuda_graphs.has_graphs

    @property
    def is_settled(self) -> bool:
        """Whether CUDA graphs have been captured, or never will be."""
        return self.cuda_graphs is None or self.cuda_graphs.is_settled

    def gradients(self, batches: list[Batch]) -> tuple[float, float]:
        """Forward and backward of every micro batch. Returns the loss, and the gradient norm before clipping (0 where
        the backward is a part of the update)."""
        loss, norm = self.launch_gradients(batches).tolist()
        return loss, norm

    def launch_gradients(self, batches: list[Batch], speculative: SpeculativeStep | None = None) -> Tensor:
        """The same without waiting for the device: loss and gradient norm as a tensor.

        `speculative`: its forward is used instead of computing it again, if it is of these batches.
        """
        engine, ranks, objective = self.engine, self.ranks, self.objective
        loss_weight = ranks.sum(sum(objective.weight(batch) for batch in batches))[0]
        loss = torch.zeros((), device=self.batcher.device)
        if loss_weight == 0:  # nothing to learn from
            return torch.stack([loss, loss])
        is_same_step = speculative is not None and speculative.batches is batches
        first_share = speculative.loss_share if speculative is not None and is_same_step else None
        if engine.syncs_every_micro_batch:
            batches = pad_with_empty_batches(batches, ranks)
        else:
            batches = [batch for batch in batches if objective.weight(batch)]
        with engine.accumulate():
            for number, batch in enumerate(batches, 1):
                share = self._loss_share(batch, loss_weight) if first_share is None else first_share
                if share.requires_grad:  # else a CUDA graph has run the backward too
                    engine.backward(share, last=number == len(batches))
                loss += share.detach_()  # in place, so that whoever holds it holds no autograd graph
                first_share = None
        ranks.all_reduce(loss)
        return torch.stack([loss, engine.clip_grad_norm(self.max_grad_norm).to(loss)])

    def speculative_forward(self, batches: list[Batch]) -> Tensor | None:
        """The first forward of a step: its loss share; None if there is nothing to learn from."""
        loss_weight = sum(self.objective.weight(batch) for batch in batches)
        return next((self._loss_share(batch, loss_weight) for batch in batches if self.objective.weight(batch)), None)

    def _loss_share(self, batch: Batch, loss_weight: float) -> Tensor:
        """A micro batch's share of the loss; `loss_weight`: of the global batch. A CUDA graph runs the backward too."""
        if self.cuda_graphs is None:
            loss_sum = partial(self._loss_sum, batch)
        else:
            is_only = loss_weight <= self.objective.weight(batch)
            share, device_batch = self.cuda_graphs.run(self.batcher.to_device(batch), loss_weight, is_only)
            if share is not None:
                return share
            loss_sum = partial(self.objective.loss_sum, self.network, device_batch)
        with self.batcher.autocast():
            return self.engine.run(loss_sum) / loss_weight

    def _loss_sum(self, batch: Batch) -> Tensor:
        return self.objective.loss_sum(self.network, self.batcher.to_device(batch))

    def update_if_good(self, loss_and_norm: Tensor, max_loss: float) -> AsyncRead:
        """Launches the update; it changes nothing if loss or norm are not finite, or the loss is above `max_loss`.

        Reads as loss, norm, and 1 if the weights have changed, else 0.
        """
        is_good = torch.isfinite(loss_and_norm).all() & (loss_and_norm[0].double() <= max_loss)
        self.engine.optimizer_step(is_good)
        return AsyncRead(torch.cat([loss_and_norm, is_good.to(loss_and_norm)[None]]))

    def update(self) -> None:
        self.engine.optimizer_step()

    def gradients_without_update(self, batches: list[Batch]) -> None:
        """Forward and backward, wherever the update is: to find out whether memory suffices."""
        self.gradients(batches)
        self.engine.backward_without_update()

    def discard(self) -> None:
        """Throws the gradients away."""
        self.engine.discard_gradients()

    def step(self, batches: list[Batch]) -> tuple[float, float]:
        """Gradients and update, without any protection: for tests and measurements."""
        loss, norm = self.gradients(batches)
        self.update()
        return loss, norm if self.engine.applied is None else self.engine.applied.norm


def make_cuda_graphs(
    engine: Engine, batcher: Batcher, objective: Objective, activation_checkpointing: bool
) -> CudaGraphs | None:
    """None, with a note, where forward+backward cannot be captured."""
    network = engine.network
    reason = None
    if not engine.has_direct_gradients:
        reason = "only for one rank, without fp16"
    elif network.has_dropout and activation_checkpointing:
        reason = "dropout needs train.activation_checkpointing=off"
    if reason is not None:
        print(f"note: train.cuda_graphs: {reason}", flush=True)
        return None

    def loss_sum(batch: DeviceBatch) -> Tensor:
        with batcher.autocast():
            return objective.loss_sum(network, batch)

    return CudaGraphs(loss_sum, engine.optimizer.parameters)


def pad_with_empty_batches(batches: list[Batch], ranks: Ranks) -> list[Batch]:
    """As many micro batches as the rank with the most has; those added have no targets."""
    return batches + [without_targets(batches[0])] * (ranks.max(len(batches)) - len(batches))


def without_targets(batch: Batch) -> Batch:
    """The same tokens, with nothing to learn from."""
    return replace(batch, labels=np.full_like(batch.labels, -100))
