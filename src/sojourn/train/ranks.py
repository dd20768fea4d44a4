"""The ranks (processes) that train one run. Each rank reads its shard of every global batch; rank 0 writes the run.

torchrun starts them and sets RANK, WORLD_SIZE and LOCAL_RANK; without torchrun there is one rank and no communication.
Numbers are agreed on by collectives, within `parallel.timeout`. Texts, and waits for work that may take long (preparing
data, saving, a mirror), go through torch's rendezvous store, so that the timeout of collectives can be short.
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
from typing import TYPE_CHECKING, Any

import numpy as np

from sojourn.config.schema import RunConfig
from sojourn.errors import RunFailed, UserError
from sojourn.launch.verdict import RelayedError, RunOver, read_verdict
from sojourn.machine.compare_ranks import RankFacts, compare
from sojourn.machine.out_of_memory import is_oom
from sojourn.machine.probe_ranks import rank_facts

if TYPE_CHECKING:
    from torch import Tensor

_STORE_TIMEOUT = 6 * 3600.0  # seconds: one rank may prepare data, or download a model, for all
_ERROR = "!"


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: str = "cpu"
    store: Any = None
    _calls: Iterator[int] = field(default_factory=itertools.count)

    @property
    def is_main(self) -> bool:
        """Rank 0, which writes the run."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """The rank that prepares data and downloads for its machine."""
        return self.local_rank == 0

    def shard(self, rows: np.ndarray) -> np.ndarray:
        """This rank's part of a global batch."""
        return np.array_split(rows, self.world_size)[self.rank]

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over all ranks."""
        return self._reduce(numbers, "SUM")

    def max(self, number: int) -> int:
        return int(self._reduce((number,), "MAX")[0])

    def _reduce(self, numbers: tuple[float, ...], operation: str) -> list[float]:
        if self.world_size == 1:
            return list(numbers)
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
        return [float(number) for number in tensor.tolist()]

    def any(self, flag: bool) -> bool:
        """Whether it is true on at least one rank; all ranks get the same answer."""
        return flag if self.world_size == 1 else self.sum(float(flag))[0] > 0

    def broadcast(self, number: float) -> float:
        """Rank 0's number."""
        return self.sum(number if self.is_main else 0.0)[0]

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a tensor over all ranks, in place."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)

    @contextmanager
    def raise_oom_on_all_ranks(self, finish: Callable[[], None] = lambda: None) -> Iterator[None]:
        """If one rank runs out of memory in the body, all ranks raise, and take the same OOM fallback.

        `finish`: collectives that the other ranks wait for; called even if this rank ran out of memory.
        """
        out_of_memory: BaseException | None = None
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if self.world_size == 1 or not is_oom(error):
                raise
            out_of_memory = error
        finish()
        if self.any(out_of_memory is not None):
            raise out_of_memory or MemoryError("out of memory on another rank")

    def seed_other_ranks(self, seed: int, step: int) -> None:
        """Ranks other than 0 get random numbers of their own for each step, so that a resumed run draws the same ones;
        rank 0's state comes from the checkpoint."""
        if not self.is_main:
            import torch

            torch.manual_seed((seed * 1_000_003 + step) * 1_000_003 % 2**62 + self.rank)

    def barrier(self) -> None:
        """Waits for all ranks, up to hours."""
        if self.world_size == 1:
            return
        key = f"barrier/{next(self._calls)}"
        self._await_all(key)
        if self.is_main:  # it may host the store, and must not exit before all ranks have seen the barrier open
            self._await_all(f"{key}/seen")
        else:
            self._arrive(f"{key}/seen")

    def _arrive(self, key: str) -> None:
        self.store.set(f"{key}/{self.rank}", "")
        self.store.add(key, 1)

    def _await_all(self, key: str) -> None:
        self._arrive(key)

        def missing() -> list[int]:
            return [rank for rank in range(self.world_size) if not self.store.check([f"{key}/{rank}"])]

        _poll(lambda: bool(self.store.add(key, 0) >= self.world_size), missing)

    def all_gather(self, text: str) -> list[str]:
        """The text of every rank, in the order of ranks."""
        if self.world_size == 1:
            return [text]
        call = next(self._calls)
        self.store.set(f"gather/{call}/{self.rank}", text)
        return [self._receive(f"gather/{call}/{rank}", rank) for rank in range(self.world_size)]

    def run_on_main(self, make: Callable[[], str]) -> str:
        """Runs on rank 0; all ranks get its text, or its UserError."""
        if self.world_size == 1:
            return make()
        key = f"main/{next(self._calls)}"
        if self.is_main:
            try:
                text = make()
            except UserError as error:
                self.store.set(key, f"{_ERROR}{error}")
                with suppress(RunFailed):  # rank 0 may host the store, and exits when all have read the error
                    _poll(lambda: bool(self.store.add(f"{key}/read", 0) >= self.world_size - 1), seconds=10)
                raise
            self.store.set(key, f"={text}")
            return text
        text = self._receive(key, rank=0)
        self.store.add(f"{key}/read", 1)
        if text.startswith(_ERROR):
            raise RelayedError(text[1:])
        return text[1:]

    def _receive(self, key: str, rank: int) -> str:
        _poll(lambda: bool(self.store.check([key])), lambda: [rank])
        return str(self.store.get(key).decode())


def _poll(
    is_ready: Callable[[], bool], missing: Callable[[], list[int]] = lambda: [], seconds: float = _STORE_TIMEOUT
) -> None:
    """Polls, because a signal cannot interrupt the store's own wait. `missing`: the ranks that are awaited."""
    end, pause = time.monotonic() + seconds, 0.002
    while not is_ready():
        if time.monotonic() > end:
            ranks = ", ".join(map(str, missing()))
            raise RunFailed(f"timed out waiting for rank {ranks}; run the same command on all machines to resume")
        time.sleep(pause)
        pause = min(0.1, 1.5 * pause)


SINGLE = Ranks()


def needs_process_group(config: RunConfig) -> bool:
    """Whether even a single rank needs a process group."""
    sharded = config.parallel.engine not in ("auto", "single") or config.parallel.deepspeed is not None
    return sharded or config.train.offload == "all"


def join_process_group(device: str, config: RunConfig) -> Ranks:
    world_size, batch = int(os.environ.get("WORLD_SIZE", "1")), config.train.global_batch
    if batch < world_size:
        raise UserError(
            f"train.global_batch: {batch} rows are fewer than the {world_size} ranks; use at least {world_size}"
        )
    if world_size == 1 and not needs_process_group(config):
        return Ranks(device=device)
    import torch.distributed as dist

    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    if dist.is_initialized():
        leave_process_group()
    timeout = timedelta(seconds=_STORE_TIMEOUT)
    store = dist.HashStore() if world_size == 1 else next(dist.rendezvous("env://", timeout=timeout))[0]
    store.set_timeout(timeout)
    ranks = Ranks(rank, world_size, local_rank, device, dist.PrefixStore("sojourn", store))
    raise_if_run_is_over(ranks)
    _refuse_different_software(ranks)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.PrefixStore("group", store), rank=rank, world_size=world_size,
        timeout=timedelta(seconds=float(config.parallel.timeout)),
    )  # fmt: skip
    return ranks


def raise_if_run_is_over(ranks: Ranks) -> None:
    """What ended the run on one machine ends it on all, which would wait for that machine otherwise."""
    verdicts = [verdict for verdict in ranks.all_gather(read_verdict()) if verdict]
    if verdicts:
        ranks.barrier()  # all ranks must have read it before the store goes
        raise RunOver(verdicts[0])


def _refuse_different_software(ranks: Ranks) -> None:
    """Other versions on another machine would compute something else, or hang."""
    if ranks.world_size == 1:
        return
    per_rank = [RankFacts(**json.loads(text)) for text in ranks.all_gather(json.dumps(asdict(rank_facts(os.environ))))]
    failure = next((finding for finding in compare(per_rank, "") if finding.level == "fail"), None)
    if failure is not None:
        raise UserError(f"{failure.name}: {failure.message}; {failure.fix}")


def leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
