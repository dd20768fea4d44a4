"""What every training peer shares: the same rows in the same order, the same optimizer, the same timing.

The loss is summed over the target tokens of the global batch and divided by their number, as in our own step.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sojourn.data.artefact import Artefact, Batch, read_batch
from sojourn.data.order import step_rows

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]
Loss = Callable[[Tensors, int], "torch.Tensor"]  # of one micro batch, divided by the targets of the global batch


@dataclass(frozen=True)
class PeerTask:
    """The work of one peer."""

    runner: str
    family: str
    theta: float
    method: str
    base: str
    adapter: str | None
    prepared: str  # the folder of the artefact
    whole_rows: bool  # one document fills the rows: plain causal attention
    global_batch: int
    micro_batch: int
    steps: int
    logged_steps: list[int]
    device: str
    precision: str
    weight_dtype: str
    lr: float
    weight_decay: float
    clip: float
    rank: int
    alpha: int
    out: str
    compile: bool = False
    gradient_checkpointing: bool = False
    padded_documents: int = 0  # documents per padded batch; 0: packed rows

    @cached_property
    def artefact(self) -> Artefact:
        return Artefact(Path(self.prepared))

    def row_indices(self, step: int) -> np.ndarray:
        return step_rows(step, len(self.artefact.train), self.global_batch, seed=0)

    def batch(self, indices: np.ndarray) -> Batch:
        return read_batch(self.artefact.train, indices, self.artefact.row_length, self.artefact.pad_id)

    def batches(self, step: int) -> Iterator[Batch]:
        indices = self.row_indices(step)
        for start in range(0, len(indices), self.micro_batch):
            yield self.batch(indices[start : start + self.micro_batch])

    def autocast(self) -> Any:
        import torch

        bf16 = self.precision == "bf16"
        return torch.autocast(self.device, dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()


@dataclass
class StepTimer:
    """Wall-clock time at the logged steps, each after a synchronisation of the device."""

    task: PeerTask
    times: dict[int, float] = field(default_factory=dict)
    first_step_at: float = 0.0

    def step_done(self, step: int) -> None:
        """`step` counts from 1."""
        if step in self.task.logged_steps:
            if self.task.device == "cuda":
                import torch

                torch.cuda.synchronize()
            self.times[step] = time.perf_counter()
            self.first_step_at = self.first_step_at or time.time()

    def result(self, losses: list[float], first_grad_norm: float, tokens: list[int]) -> dict[str, Any]:
        """`tokens`: real tokens of each step, without padding."""
        row: dict[str, Any] = {
            "losses": {str(step): _finite_or_none(losses[step - 1]) for step in self.task.logged_steps},
            "first_grad_norm": _finite_or_none(first_grad_norm),
            "first_step_at": self.first_step_at, "intervals": [],
        }  # fmt: skip
        for before, after in pairwise(self.task.logged_steps):
            seconds = self.times[after] - self.times[before]
            row["intervals"].append({"step": after, "tokens_per_second": sum(tokens[before:after]) / seconds})
        if self.task.device == "cuda":
            import torch

            row |= {"memory": torch.cuda.max_memory_allocated(), "memory_reserved": torch.cuda.max_memory_reserved()}
        return row


def _finite_or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def train_steps(task: PeerTask, model: torch.nn.Module, loss_fn: Loss) -> dict[str, Any]:
    """The training loop of a peer that has no trainer of its own."""
    import torch

    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for name, p in trainable.items() if p.ndim >= 2 and "embed" not in name and "lm_head" not in name]
    decayed_ids = {id(p) for p in decayed}
    groups = [
        {"params": decayed, "weight_decay": task.weight_decay},
        {"params": [p for p in trainable.values() if id(p) not in decayed_ids], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=task.lr, betas=(0.9, 0.95), fused=True)
    timer, losses, tokens, first_norm = StepTimer(task), list[Any](), list[int](), None
    for step in range(task.steps):
        batches = list(task.batches(step))
        targets = sum(batch.targets for batch in batches)
        total = torch.zeros((), device=task.device)
        for batch in batches:
            for arrays in padded(batch, task.padded_documents) if task.padded_documents else [packed(batch)]:
                inputs = {name: torch.from_numpy(a).to(task.device, non_blocking=True) for name, a in arrays.items()}
                loss = loss_fn(inputs, targets)
                loss.backward()
                total += loss.detach().float()
        norm = torch.nn.utils.clip_grad_norm_(list(trainable.values()), task.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        tokens.append(sum(batch.real_tokens for batch in batches))
        first_norm = norm if first_norm is None else first_norm
        timer.step_done(step + 1)
    return timer.result([float(loss) for loss in losses], float(first_norm), tokens)


def packed(batch: Batch) -> dict[str, np.ndarray]:
    return {"ids": batch.ids, "labels": batch.labels, "positions": batch.positions, "documents": batch.documents}


def padded(batch: Batch, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """The documents of packed rows as padded batches, each as wide as its longest document."""
    unpacked = [
        (ids[mask], labels[mask])
        for ids, labels, documents in zip(batch.ids, batch.labels, batch.documents, strict=True)
        for mask in (documents == number for number in range(documents.max() + 1))
    ]
    for start in range(0, len(unpacked), batch_size):
        part = unpacked[start : start + batch_size]
        shape = (len(part), max(len(ids) for ids, _ in part))
        ids, labels, mask = np.zeros(shape, np.int64), np.full(shape, -100, np.int64), np.zeros(shape, np.int64)
        for row, (document, targets) in enumerate(part):
            ids[row, : len(document)], labels[row, : len(document)], mask[row, : len(document)] = document, targets, 1
        yield {"ids": ids, "labels": labels, "mask": mask}
