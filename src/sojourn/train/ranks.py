"""The processes that train one run together. Each reads its share of every global batch; gradients are summed.

Started by torchrun, which says who is who in the environment; a process alone is rank 0 of 1 and asks nobody.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sojourn.errors import UserError
from sojourn.train.ladder import is_memory_error

_PATIENCE = datetime.timedelta(hours=2)  # the first of them may prepare data for all


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    size: int = 1
    local: int = 0
    device: str = "cpu"

    @property
    def first(self) -> bool:
        """The one that writes."""
        return self.rank == 0

    def share(self, rows: np.ndarray) -> np.ndarray:
        """This process's part of a global batch."""
        return np.array_split(rows, self.size)[self.rank]

    def total(self, *numbers: float) -> list[float]:
        """Each number summed over all processes."""
        if self.size == 1:
            return list(numbers)
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(number) for number in tensor.tolist()]

    def any(self, flag: bool) -> bool:
        """Whether it is so for one of them at least; all get the same answer."""
        return flag if self.size == 1 else self.total(float(flag))[0] > 0

    def told(self, number: float) -> float:
        """What the first one says."""
        return self.total(number if self.first else 0.0)[0]

    def add(self, tensor: Any) -> None:
        """Sums a tensor over all processes, in place."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)

    def add_gradients(self, parameters: Iterable[Any]) -> None:
        """A process whose rows trained nothing has no gradients; it adds zeros."""
        if self.size == 1:
            return
        import torch
        import torch.distributed as dist

        under_way = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            under_way.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in under_way:
            work.wait()

    @contextmanager
    def together(self) -> Iterator[None]:
        """If memory runs out in one process, it does so in all: they take the ladder's next rung together."""
        if self.size == 1:
            yield
            return
        trouble: BaseException | None = None
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_memory_error(error):
                raise
            trouble = error
        if self.any(trouble is not None):
            raise trouble or MemoryError("out of memory in another process")

    def diverge(self, seed: int, step: int) -> None:
        """Processes beyond the first get random numbers of their own; the first one's are in the checkpoints."""
        if not self.first:
            import torch

            torch.manual_seed((seed * 1_000_003 + step) * 1_000_003 % 2**62 + self.rank)

    def wait(self) -> None:
        """For all of them."""
        self.total(0.0)


ALONE = Ranks()


def join(device: str, global_batch: int) -> Ranks:
    """Meets the others, if torchrun started us."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks(device=device)
    if global_batch < size:
        raise UserError(f"train.global_batch: {global_batch} rows cannot be shared by {size} processes; use {size}")
    import torch
    import torch.distributed as dist

    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_PATIENCE)
    return Ranks(rank, size, local, device)


def leave() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
