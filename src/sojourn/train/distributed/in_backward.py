"""One rank that updates each parameter in the backward, as soon as its gradient is complete, and frees the gradient
(`train.optimizer_in_backward=on`): the gradients of all parameters never exist at once.

"Nothing changes before the update" still holds; the update only starts earlier. `backward` holds the loss back, so that
it can be judged. `optimizer_step` runs the backward with its updates; an error in it may have changed some weights, as
in any optimizer step. A gradient that is not finite leaves its parameter as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sojourn.train.distributed.engine import AppliedGradients, Engine
from sojourn.train.optim.low_memory_adamw import grad_norm


class InBackward(Engine):
    has_direct_gradients = False
    updates_in_backward = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._loss: Tensor | None = None
        self._norms: list[tuple[Tensor, Tensor]] = []
        self._updates = True
        for parameter in self.optimizer.parameters:
            # Called once in a backward, after all gradients of the parameter are added up, also of a tied one.
            parameter.register_post_accumulate_grad_hook(self._apply)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self.optimizer.torch.start_step()
        with super().accumulate():
            yield

    def backward(self, loss: Tensor, last: bool) -> None:
        """Later: see `optimizer_step`."""
        if not last or self._loss is not None:
            raise RuntimeError("train.optimizer_in_backward=on cannot accumulate gradients")
        self._loss = loss * 1.0  # the caller detaches its own

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Not known before the update: see `applied`."""
        return torch.zeros(())

    def optimizer_step(self, good: Tensor | None = None) -> None:
        self._run_backward(updates=True)
        norms = torch.stack([norm for _, norm in self._norms]) if self._norms else torch.zeros(0)
        finite = norms.isfinite()
        bad = [
            parameter for (parameter, _), is_finite in zip(self._norms, finite.tolist(), strict=True) if not is_finite
        ]
        for parameter in bad:
            self.optimizer.torch.undo_step(parameter)
        self.applied = AppliedGradients(float(torch.linalg.vector_norm(norms[finite])), len(bad))
        self._norms = []

    def backward_without_update(self) -> None:
        self._run_backward(updates=False)
        self._norms = []

    def _run_backward(self, updates: bool) -> None:
        loss, self._loss = self._loss, None
        self._norms, self._updates = [], updates
        if loss is not None:
            loss.backward()

    def _apply(self, parameter: Tensor) -> None:
        norm = grad_norm(parameter.grad)
        if self._updates:
            self.optimizer.torch.update(parameter, norm)
        parameter.grad = None
        self._norms.append((parameter, norm))

    def discard_gradients(self) -> None:
        self._loss = None
        super().discard_gradients()
