"""The processes that train one run together. Each reads its share of every global batch.

Started by torchrun, which says who is who in the environment; a process alone is rank 0 of 1 and asks nobody. Numbers
are agreed upon by collectives, within `parallel.timeout`; texts, and waits for work that may take long, go through the
store that all of them met at.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from sojourn.config.schema import RunConfig
from sojourn.errors import RunFailed, UserError
from sojourn.launch.verdict import VERDICT, Over, Relayed
from sojourn.machine.probe_ranks import facts
from sojourn.machine.process_group import Facts, compare
from sojourn.train.faults.oom_fallback import is_memory_error

_PATIENCE = 6 * 3600.0  # the first of them may prepare data, or fetch a model, for all
_REFUSED = "!"


@dataclass(frozen=True)
class Ranks:
    """`local`: which one on this machine."""

    rank: int = 0
    size: int = 1
    local: int = 0
    device: str = "cpu"
    store: Any = None
    _calls: Iterator[int] = field(default_factory=itertools.count)

    @property
    def first(self) -> bool:
        """The one that writes."""
        return self.rank == 0

    @property
    def first_here(self) -> bool:
        """The one that prepares and fetches for its machine."""
        return self.local == 0

    def share(self, rows: np.ndarray) -> np.ndarray:
        """This process's part of a global batch."""
        return np.array_split(rows, self.size)[self.rank]

    def total(self, *numbers: float) -> list[float]:
        """Each number summed over all processes."""
        return self._reduced(numbers, "SUM")

    def most(self, number: int) -> int:
        return int(self._reduced((number,), "MAX")[0])

    def _reduced(self, numbers: tuple[float, ...], how: str) -> list[float]:
        if self.size == 1:
            return list(numbers)
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, how))
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

    @contextmanager
    def together(self, finish: Callable[[], None] = lambda: None) -> Iterator[None]:
        """If memory runs out in one process, it does so in all: they take the ladder's next rung together.

        `finish`: what the others wait for, even so.
        """
        trouble: BaseException | None = None
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if self.size == 1 or not is_memory_error(error):
                raise
            trouble = error
        finish()
        if self.any(trouble is not None):
            raise trouble or MemoryError("out of memory in another process")

    def diverge(self, seed: int, step: int) -> None:
        """Processes beyond the first get random numbers of their own; the first one's are in the checkpoints."""
        if not self.first:
            import torch

            torch.manual_seed((seed * 1_000_003 + step) * 1_000_003 % 2**62 + self.rank)

    def wait(self) -> None:
        """For all of them, however long it takes."""
        if self.size == 1:
            return
        key = f"wait/{next(self._calls)}"
        self.store.add(key, 1)
        _until(lambda: bool(self.store.add(key, 0) >= self.size))
        self.store.add(f"{key}/seen", 1)
        if self.first:  # it may keep the store, and must not leave with it before all have seen this
            _until(lambda: bool(self.store.add(f"{key}/seen", 0) >= self.size))

    def gathered(self, text: str) -> list[str]:
        """What each of them says."""
        if self.size == 1:
            return [text]
        call = next(self._calls)
        self.store.set(f"say/{call}/{self.rank}", text)
        return [self._heard(f"say/{call}/{rank}") for rank in range(self.size)]

    def from_first(self, make: Callable[[], str]) -> str:
        """Made by the first one for all. What it refuses, all refuse."""
        if self.size == 1:
            return make()
        key = f"first/{next(self._calls)}"
        if self.first:
            try:
                text = make()
            except UserError as error:
                self.store.set(key, f"{_REFUSED}{error}")
                with suppress(RunFailed):  # it may keep the store, and leaves when all have heard
                    _until(lambda: bool(self.store.add(f"{key}/heard", 0) >= self.size - 1), seconds=10)
                raise
            self.store.set(key, f"={text}")
            return text
        text = self._heard(key)
        self.store.add(f"{key}/heard", 1)
        if text.startswith(_REFUSED):
            raise Relayed(text[1:])
        return text[1:]

    def _heard(self, key: str) -> str:
        _until(lambda: bool(self.store.check([key])))
        return str(self.store.get(key).decode())


def _until(ready: Callable[[], bool], seconds: float = _PATIENCE) -> None:
    """Asks now and then: the store's own waiting would be deaf to signals."""
    end, pause = time.monotonic() + seconds, 0.002
    while not ready():
        if time.monotonic() > end:
            raise RunFailed("another process of this run does not come; run the same command again on all machines")
        time.sleep(pause)
        pause = min(0.1, 1.5 * pause)


ALONE = Ranks()


def wants_group(config: RunConfig) -> bool:
    """Whether even a process alone needs a group to be in."""
    several = config.parallel.engine not in ("auto", "single") or config.parallel.deepspeed is not None
    return several or config.train.offload == "all"


def join(device: str, config: RunConfig) -> Ranks:
    """Meets the others, if torchrun started us."""
    size, batch = int(os.environ.get("WORLD_SIZE", "1")), config.train.global_batch
    if batch < size:
        raise UserError(f"train.global_batch: {batch} rows cannot be shared by {size} processes; use {size}")
    if size == 1 and not wants_group(config):
        return Ranks(device=device)
    import torch.distributed as dist

    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    if dist.is_initialized():
        leave()
    store = dist.HashStore() if size == 1 else next(dist.rendezvous("env://", timeout=timedelta(seconds=_PATIENCE)))[0]
    store.set_timeout(timedelta(seconds=_PATIENCE))
    ranks = Ranks(rank, size, local, device, dist.PrefixStore("sojourn", store))
    hear_verdict(ranks)
    _refuse_unlike(ranks)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.PrefixStore("group", store), rank=rank, world_size=size,
        timeout=timedelta(seconds=float(config.parallel.timeout)),
    )  # fmt: skip
    return ranks


def own_verdict() -> str:
    """Why this machine's processes have ended for good, if they have: JSON that `launch` reads."""
    path = Path(os.environ.get(VERDICT, ""))
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def hear_verdict(ranks: Ranks) -> None:
    """What ended the run on one machine ends it on all, which would wait for that one otherwise."""
    told = [verdict for verdict in ranks.gathered(own_verdict()) if verdict]
    if told:
        ranks.wait()  # until all have heard
        raise Over(told[0])


def _refuse_unlike(ranks: Ranks) -> None:
    """Other versions on another machine would compute something else, or hang."""
    if ranks.size == 1:
        return
    known = [Facts(**json.loads(text)) for text in ranks.gathered(json.dumps(asdict(facts(os.environ))))]
    wrong = next((finding for finding in compare(known, "") if finding.level == "fail"), None)
    if wrong is not None:
        raise UserError(f"{wrong.name}: {wrong.says}; {wrong.mend}")


def leave() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
