"""How a run is distributed over ranks, behind one interface. `Engine` is a single rank; the others extend it.

| engine | weights | gradients | file |
|---|---|---|---|
| single | on the one rank | on the one rank | this one |
| single | on the one rank | one at a time | `in_backward.py` |
| ddp | on every rank | all-reduced in flat buckets during the last backward | `ddp.py` |
| fsdp | sharded by torch's `fully_shard` | reduce-scattered | `fsdp.py` |
| deepspeed | ZeRO 1 to 3, from the user's `ds_config.json` | ZeRO | `deepspeed.py` |

One step: `accumulate` around all micro batches (`run`, `backward`), then `clip_grad_norm`, then `optimizer_step`.
`discard_gradients` at any time before `optimizer_step` leaves no trace of the step. Checkpoints are the same for all
engines: full tensors under the names of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from sojourn.model.network import Network
from sojourn.model.weights import load_trainable_state_dict, trainable_state_dict
from sojourn.train.optim.optimizers import Optimizer
from sojourn.train.ranks import SINGLE, Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class AppliedGradients:
    """Of an update in the backward: the gradient norm, and how many parameters had one that is not finite."""

    norm: float
    not_finite: int


class Engine:
    """`syncs_every_micro_batch`: forward and backward contain collectives, so all ranks must run equally many micro
    batches. A rank that fails in one leaves the others waiting: then all restart from the last checkpoint."""

    syncs_every_micro_batch = False
    updates_in_backward = False  # then `optimizer_step` runs the backward
    applied: AppliedGradients | None = None  # of the last update in the backward

    def __init__(self, network: Network, optimizer: Optimizer, scaler: Any, ranks: Ranks = SINGLE) -> None:
        self.network, self.optimizer, self.scaler, self.ranks = network, optimizer, scaler, ranks

    def run(self, work: Callable[[], T]) -> T:
        """Runs `work` where it finds full weights."""
        return work()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around the micro batches of a step (gradient accumulation). Where the ranks can agree on it, out of memory on
        one rank is raised on all."""
        with nullcontext() if self.syncs_every_micro_batch else self.ranks.raise_oom_on_all_ranks():
            yield

    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds to the gradients; `last`: the last micro batch of the step."""
        self.scaler.scale(loss).backward()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clips the norm of the full gradient to `max_norm` (0: no limit) and returns the norm before that."""
        self.scaler.unscale_(self.optimizer.torch)
        grads = [parameter.grad for parameter in self.optimizer.parameters if parameter.grad is not None]
        norm = self.optimizer.grad_norm(grads)
        if max_norm:
            self._clip(norm, max_norm)
        return norm

    def _clip(self, norm: Tensor, max_norm: float) -> None:
        if self.optimizer.clips_as_it_steps and not self.scaler.is_enabled():
            self.optimizer.torch.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)  # its kernel divides by this
            return
        can_be_read = type(norm) is Tensor and norm.device.type == "cpu"  # at no cost: then multiplying by 1 is saved
        if not (can_be_read and max_norm / (norm + 1e-6) >= 1):
            torch.nn.utils.clip_grads_with_norm_(self.optimizer.parameters, max_norm, norm)

    @property
    def has_direct_gradients(self) -> bool:
        """One rank without gradient scaling, whose gradients go straight to the optimizer."""
        return self.ranks.world_size == 1 and not self.syncs_every_micro_batch and not self.scaler.is_enabled()

    @property
    def supports_async_step(self) -> bool:
        """Whether `optimizer_step` can let the device decide if a step is good, without a sync with the host."""
        return self.has_direct_gradients and self.optimizer.fuses_clipping and bool(self.optimizer.torch.state)

    def optimizer_step(self, good: Tensor | None = None) -> None:
        """Updates the weights if there are gradients; `good`: a boolean on the device, False leaves all unchanged."""
        with self.ranks.raise_oom_on_all_ranks():
            if any(parameter.grad is not None for parameter in self.optimizer.parameters):
                if good is not None:
                    self.optimizer.torch.found_inf = (~good).float()
                self.scaler.step(self.optimizer.torch)
                self.scaler.update()
        self.optimizer.zero_grad()

    def backward_without_update(self) -> None:
        """Where `optimizer_step` would run the backward: the backward alone, which changes nothing."""

    def discard_gradients(self) -> None:
        """Drops the gradients, and the loss scaler's record of them."""
        self.optimizer.zero_grad()
        if self.scaler.is_enabled():
            self.scaler._per_optimizer_states.clear()

    @property
    def uses_loss_scaling(self) -> bool:
        """Whether a loss scaler (fp16) skips steps with infinite gradients by itself."""
        return bool(self.scaler.is_enabled())

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.set_learning_rate(rate)

    def local_states(self) -> Iterable[Tensor]:
        """This rank's trained weights and optimizer states."""
        return [*trainable_state_dict(self.network.model).values(), *self.optimizer.state_tensors().values()]

    def full_weights(self) -> dict[str, Tensor]:
        """Trained weights by name, unsharded, on rank 0. All ranks must call this together."""
        return trainable_state_dict(self.network.model)

    def full_optimizer_states(self) -> dict[str, Tensor]:
        """Optimizer states, likewise."""
        return self.optimizer.state_tensors()

    gathers_copies = False  # whether the two above return copies, which later steps do not change

    def load_full_weights(self, tensors: dict[str, Tensor]) -> None:
        """Each rank keeps its shard."""
        load_trainable_state_dict(self.network.model, tensors)

    def load_optimizer_states(self, tensors: dict[str, Tensor]) -> None:
        self.optimizer.load_state_tensors(tensors)
