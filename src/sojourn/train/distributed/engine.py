"""What the loop knows of the way a run is spread over processes. `Engine` is a process alone; the others build on it.

A step is: `passes` around all micro batches (`run`, `backward`), then `clip`, then `update`, or `discard` at any time
before that, as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from sojourn.model.network import Network
from sojourn.model.weights import load_trainable_state_dict, trainable_state_dict
from sojourn.train.optim.optimizers import Optimizer
from sojourn.train.ranks import SINGLE, Ranks

T = TypeVar("T")


class Engine:
    """`syncs_every_micro_batch`: forward and backward contain collectives, so all ranks must run equally many micro
    batches. A rank that fails in one leaves the others waiting: then all restart from the last checkpoint."""

    syncs_every_micro_batch = False

    def __init__(self, network: Network, optimizer: Optimizer, scaler: Any, ranks: Ranks = SINGLE) -> None:
        self.network, self.optimizer, self.scaler, self.ranks = network, optimizer, scaler, ranks

    def run(self, work: Callable[[], T]) -> T:
        """Work that needs the weights."""
        return work()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around the passes of a step. If memory runs out in one process, it does in all, if they can agree."""
        with nullcontext() if self.syncs_every_micro_batch else self.ranks.raise_oom_on_all_ranks():
            yield

    def backward(self, loss: Any, last: bool) -> None:
        """Adds to the gradients; `last`: of this step."""
        self.scaler.scale(loss).backward()

    def clip_grad_norm(self, max_norm: float) -> Any:
        """The norm of the whole gradient, which is no longer than `max_norm` afterwards."""
        self.scaler.unscale_(self.optimizer.torch)
        grads = [parameter.grad for parameter in self.optimizer.parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if max_norm:
            self._clip(norm, max_norm)
        return norm

    def _clip(self, norm: Any, max_norm: float) -> None:
        if self.optimizer.fuses_clipping and not self.scaler.is_enabled():
            self.optimizer.torch.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)  # which its kernel divides by
        else:
            torch.nn.utils.clip_grads_with_norm_(self.optimizer.parameters, max_norm, norm)

    @property
    def has_direct_gradients(self) -> bool:
        """One rank without gradient scaling, whose gradients go straight to the optimizer."""
        return self.ranks.world_size == 1 and not self.syncs_every_micro_batch and not self.scaler.is_enabled()

    @property
    def supports_async_step(self) -> bool:
        """Whether `update` can leave it to the device to see if a step is good, instead of waiting for the answer."""
        return self.has_direct_gradients and self.optimizer.fuses_clipping and bool(self.optimizer.torch.state)

    def optimizer_step(self, good: Any = None) -> None:
        """One step of the optimizer, if there is anything to learn from; `good`: and if this turns out to be true."""
        with self.ranks.raise_oom_on_all_ranks():
            if any(parameter.grad is not None for parameter in self.optimizer.parameters):
                if good is not None:
                    self.optimizer.torch.found_inf = (~good).float()
                self.scaler.step(self.optimizer.torch)
                self.scaler.update()
        self.optimizer.zero_grad()

    def discard_gradients(self) -> None:
        """Throws the gradients away, and what the scaler has noted of them."""
        self.optimizer.zero_grad()
        if self.scaler.is_enabled():
            self.scaler._per_optimizer_states.clear()

    @property
    def uses_loss_scaling(self) -> bool:
        """Whether infinite gradients are the scaler's everyday business."""
        return bool(self.scaler.is_enabled())

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.set_learning_rate(rate)

    def local_states(self) -> Iterable[Any]:
        """What this process holds of weights and moments."""
        return [*trainable_state_dict(self.network.model).values(), *self.optimizer.state_tensors().values()]

    def full_weights(self) -> dict[str, Any]:
        """Whole, by name, where they are to be written. All processes must ask together."""
        return trainable_state_dict(self.network.model)

    def full_optimizer_states(self) -> dict[str, Any]:
        """The optimizer's state, likewise."""
        return self.optimizer.state_tensors()

    gathers_copies = False  # whether the two above are copies already

    def load_full_weights(self, tensors: dict[str, Any]) -> None:
        """Puts whole weights back, each process its share."""
        load_trainable_state_dict(self.network.model, tensors)

    def load_optimizer_states(self, tensors: dict[str, Any]) -> None:
        self.optimizer.load_state_tensors(tensors)
