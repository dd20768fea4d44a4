"""The track that every peer runs on: the same rows in the same order, the same update, the same clock.

Loss is summed over the targets of the global batch and divided by their number, as in our own step.
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
from typing import Any

import numpy as np

from sojourn.data.artefact import Artefact, Batch, read_batch
from sojourn.data.order import step_rows

Tensors = dict[str, Any]
Loss = Callable[[Tensors, int], Any]  # of one micro batch, over the targets of the global batch


@dataclass(frozen=True)
class Task:
    """What a peer is told."""

    role: str
    family: str
    theta: float
    method: str
    base: str
    adapter: str | None
    rows: str
    whole_rows: bool
    global_batch: int
    micro_batch: int
    steps: int
    marks: list[int]
    device: str
    precision: str
    weights: str
    lr: float
    weight_decay: float
    clip: float
    rank: int
    alpha: int
    out: str
    compile: bool = False
    checkpointing: bool = False
    documents: int = 0  # so many at once, padded to the longest; none: rows as they are packed

    @cached_property
    def artefact(self) -> Artefact:
        return Artefact(Path(self.rows))

    def numbers(self, step: int) -> np.ndarray:
        """The rows of a step."""
        return step_rows(step, len(self.artefact.train), self.global_batch, seed=0)

    def batch(self, numbers: np.ndarray) -> Batch:
        return read_batch(self.artefact.train, numbers, self.artefact.row_length, self.artefact.pad_id)

    def batches(self, step: int) -> Iterator[Batch]:
        numbers = self.numbers(step)
        for start in range(0, len(numbers), self.micro_batch):
            yield self.batch(numbers[start : start + self.micro_batch])

    def autocast(self) -> Any:
        import torch

        bf16 = self.precision == "bf16"
        return torch.autocast(self.device, dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()


@dataclass
class Clock:
    """Times at the marks, with the device's work done; what was learned between them is read only at the end."""

    task: Task
    times: dict[int, float] = field(default_factory=dict)
    first_done: float = 0.0

    def mark(self, step: int) -> None:
        """`step`: how many are done."""
        if step in self.task.marks:
            if self.task.device == "cuda":
                import torch

                torch.cuda.synchronize()
            self.times[step] = time.perf_counter()
            self.first_done = self.first_done or time.time()

    def result(self, losses: list[float], first_gradient: float, tokens: list[int]) -> dict[str, Any]:
        """`tokens`: the real ones of each step."""
        found: dict[str, Any] = {
            "losses": {str(step): _number(losses[step - 1]) for step in self.task.marks},
            "first_gradient": _number(first_gradient),
            "first_done": self.first_done, "blocks": [],
        }  # fmt: skip
        for before, after in pairwise(self.task.marks):
            seconds = self.times[after] - self.times[before]
            found["blocks"].append({"step": after, "tokens_per_second": sum(tokens[before:after]) / seconds})
        if self.task.device == "cuda":
            import torch

            found |= {
                "memory": torch.cuda.max_memory_allocated(), "memory_reserved": torch.cuda.max_memory_reserved()
            }  # fmt: skip
        return found


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def race(task: Task, model: Any, loss_of: Loss) -> dict[str, Any]:
    """All steps of a peer that has no trainer of its own."""
    import torch

    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for name, p in named.items() if p.ndim >= 2 and "embed" not in name and "lm_head" not in name]
    kept = {id(p) for p in decayed}
    groups = [
        {"params": decayed, "weight_decay": task.weight_decay},
        {"params": [p for p in named.values() if id(p) not in kept], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=task.lr, betas=(0.9, 0.95), fused=True)
    clock, losses, tokens, first = Clock(task), list[Any](), list[int](), None
    for step in range(task.steps):
        batches = list(task.batches(step))
        targets = sum(batch.targets for batch in batches)
        total = torch.zeros((), device=task.device)
        for batch in batches:
            for inputs in padded(batch, task.documents) if task.documents else [as_packed(batch)]:
                there = {name: torch.from_numpy(one).to(task.device, non_blocking=True) for name, one in inputs.items()}
                part = loss_of(there, targets)
                part.backward()
                total += part.detach().float()
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), task.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        tokens.append(sum(batch.real_tokens for batch in batches))
        first = norm if first is None else first
        clock.mark(step + 1)
    return clock.result([float(one) for one in losses], float(first), tokens)  # type: ignore[arg-type]


def as_packed(batch: Batch) -> dict[str, np.ndarray]:
    return {"ids": batch.ids, "labels": batch.labels, "positions": batch.positions, "documents": batch.documents}


def padded(batch: Batch, at_once: int) -> Iterator[dict[str, np.ndarray]]:
    """The documents of packed rows side by side again, a few at a time, each batch as wide as its longest."""
    found = [
        (ids[place], labels[place])
        for ids, labels, documents in zip(batch.ids, batch.labels, batch.documents, strict=True)
        for place in (documents == number for number in range(documents.max() + 1))
    ]
    for start in range(0, len(found), at_once):
        part = found[start : start + at_once]
        shape = (len(part), max(len(ids) for ids, _ in part))
        ids, labels, mask = np.zeros(shape, np.int64), np.full(shape, -100, np.int64), np.zeros(shape, np.int64)
        for row, (document, wanted) in enumerate(part):
            ids[row, : len(document)], labels[row, : len(document)], mask[row, : len(document)] = document, wanted, 1
        yield {"ids": ids, "labels": labels, "mask": mask}
