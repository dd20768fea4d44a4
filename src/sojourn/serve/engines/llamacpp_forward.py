"""llama.cpp as the forward of the engine's loop: scheduling and sampling are ours, KV cache and layers are its.

A row of the engine is a sequence of llama.cpp. A row keeps what it holds when its request ends, so that a request with
the same beginning need not compute it again: the row that has most of it is copied, which costs llama.cpp no memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sojourn.errors import RunFailed
from sojourn.estimate.serving import BLOCK, kv_memory
from sojourn.infer.engine.batch import scores_prompt
from sojourn.infer.engine.block_pool import BlockPool
from sojourn.infer.engine.engine import DecodeLoop, EngineOptions
from sojourn.infer.gguf.file import GgufFile
from sojourn.infer.runtimes.llamacpp import threads
from sojourn.infer.runtimes.llamacpp_process import LlamaCpp
from sojourn.machine.precision import choose_device
from sojourn.serve.memory import free_memory

if TYPE_CHECKING:
    from sojourn.infer.engine.request import Request
    from sojourn.infer.engine.scheduler import Part, Scheduler

_MOST_TOKENS = 256  # of a step
_CELLS = 16_384  # tokens of the KV cache, unless one request may have more
_NO_ROOM = 1  # llama_decode's code
_SHORT = 32  # tokens: a beginning of fewer is not looked for in other rows
Change = tuple[str, int, int] | tuple[str, int, int, int]  # of what a row holds: see llamacpp_child.py


@dataclass(frozen=True)
class GgufShape:
    """What the KV cache needs to know. `long_rope`: RoPE goes by the size of the context."""

    context: int
    kv_bytes_per_token: int
    long_rope: bool


def read_shape(file: GgufFile) -> GgufShape:
    layers, heads = int(file["{arch}.block_count"]), _most(file["{arch}.attention.head_count"] or 1)
    width = int(file["{arch}.embedding_length"]) // heads
    sizes = [int(file["{arch}.attention." + one] or width) for one in ("key_length", "value_length")]
    kv_heads = _most(file["{arch}.attention.head_count_kv"] or heads)
    context = int(file["{arch}.context_length"] or 2048)
    return GgufShape(context, 2 * layers * kv_heads * sum(sizes), "rope_factors_long.weight" in file.tensors)


def _most(value: Any) -> int:
    """Of all layers, where they differ."""
    return max(map(int, value)) if isinstance(value, list | tuple) else int(value)


def choose_cells(shape: GgufShape, context: int | None, rows: int, free: int, device: str) -> tuple[int, int]:
    """Tokens of the KV cache and of one request. llama.cpp writes all of the cache at the start, so it takes no more
    than that."""
    context = min(context or shape.context, shape.context)
    room = kv_memory(free, device) // max(1, shape.kv_bytes_per_token)
    wanted = min(rows * context, max(context, _CELLS))
    cells = min(-(-wanted // BLOCK), max(1, room // BLOCK)) * BLOCK
    return cells, min(context, cells)


class LlamaForward:
    """`rows`: requests at a time. `cells`: tokens of the KV cache. `shared`: among the rows, else each has its part."""

    def __init__(self, child: LlamaCpp, path: Path, rows: int, cells: int, gpu: bool, shared: bool) -> None:
        self._child = child
        with tempfile.TemporaryDirectory(prefix="sojourn-", dir=_shared_memory()) as folder:
            logits = Path(folder) / "logits"
            try:
                found = self._child.ask(
                    "open_sequences", path=str(path.resolve()), threads=threads(), rows=rows, cells=cells,
                    batch=_MOST_TOKENS, gpu=gpu, shared=shared, logits=str(logits),
                )  # fmt: skip
            except BaseException:
                self._child.close()
                raise
            self.vocab_size, self.stop_ids = int(found["vocabulary"]), frozenset(map(int, found["stops"]))
            self.device = "cuda" if found["gpu"] else "cpu"
            self._logits_LV = np.memmap(logits, np.float32, "r+", shape=(_MOST_TOKENS, self.vocab_size))
        self._rewinds, self._shared, self._cells = bool(found["rewinds"]), shared, cells
        self._held: list[list[int]] = [[] for _ in range(rows)]  # tokens whose keys and values each row has
        self._owner: list[Request | None] = [None] * rows
        self._known = [0] * rows  # tokens at the beginning of what is held that are the owner's
        self.scheduler: Scheduler | None = None  # counts what was not computed again

    def warm_up(self, last_tokens: Tensor) -> None:
        """Nothing to prepare."""

    def check(self) -> None:
        """Raises RunFailed where llama.cpp is gone."""
        if not self._child.is_running:
            self._ask([], [])

    def __call__(self, parts: list[Part], last_tokens: Tensor) -> Tensor:
        changes: list[Change] = []
        for part in parts:  # all of them first: what is copied was computed by steps before
            if self._owner[part.request.row] is not part.request:
                changes += self._take(part.request)
        asked = []
        for part in parts:
            row, scored = part.request.row, scores_prompt(part)
            wanted = part.size if scored else (1 + len(part.draft)) * part.samples
            # The last token's logits are needed where the part samples
            first = part.start if scored else max(part.start, min(self._known[row], part.end - part.samples))
            ids = part.ids()[first - part.start :]
            if not ids:
                continue
            if len(self._held[row]) > first:
                changes.append(("keep", row, first))
                del self._held[row][first:]
            self._held[row] += ids
            self._known[row] = len(self._held[row]) - len(part.draft)
            asked.append((row, first, ids, wanted))
        if asked:
            self._decode(changes, asked)
        return torch.from_numpy(self._logits_LV[: sum(wanted for *_, wanted in asked)])

    def _take(self, request: Request) -> list[Change]:
        """Its row is the request's from now on, with as much of its beginning as any row holds."""
        row = request.row
        known = [request.token_at(position) for position in range(request.length)]
        reuses = self._rewinds and request.prompt_logprobs is None
        best, source = _common(self._held[row], known) if reuses else 0, row
        for other, held in enumerate(self._held if reuses and self._shared else ()):
            if other != row and (found := _common(held, known)) >= best + _SHORT:
                best, source = found, other
        changes: list[Change] = []
        if (source != row or not best) and self._held[row]:
            changes.append(("keep", row, 0))
            self._held[row] = []
        if source != row:
            changes.append(("copy", source, row, best))
            self._held[row] = self._held[source][:best]
        self._owner[row], self._known[row] = request, best
        reused = min(best, request.length - 1)
        if self.scheduler is not None:
            self.scheduler.prefix_tokens += reused
        if not request.tokens:
            request.cached = reused
        return changes

    def _decode(self, changes: list[Change], parts: list[Any]) -> None:
        """Rows that nobody uses give their cells up where they are needed. Copied cells are counted twice."""
        idle = [row for row, owner in enumerate(self._owner) if self._held[row] and not _is_running(owner, row)]
        while idle and sum(map(len, self._held)) > self._cells:
            changes.append(self._drop(idle.pop(0)))
        code = self._ask(changes, parts)
        if code == _NO_ROOM and idle:
            code = self._ask([self._drop(row) for row in idle], parts)
        if code:
            raise RunFailed(f"llama.cpp could not compute a step (llama_decode: {code})")

    def _drop(self, row: int) -> Change:
        self._held[row], self._owner[row], self._known[row] = [], None, 0
        return ("keep", row, 0)

    def _ask(self, changes: list[Change], parts: list[Any]) -> int:
        return int(self._child.ask("forward", changes=changes, parts=parts)["code"])

    def close(self) -> None:
        self._child.close()


def _common(held: Sequence[int], known: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for at, (one, other) in enumerate(zip(held, known, strict=False)):
        if one != other:
            return at
    return min(len(held), len(known))


def _is_running(owner: Request | None, row: int) -> bool:
    """The scheduler takes the blocks of a request that leaves its row."""
    return owner is not None and bool(owner.blocks) and owner.row == row


def _shared_memory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108, PTH112


def open_llama_engine(path: Path, rows: int, context: int | None, device: str) -> tuple[DecodeLoop, LlamaForward]:
    """The engine's loop over llama.cpp. Raises RunFailed, with llama.cpp's reason, where it does not open the file."""
    shape, device = read_shape(GgufFile(path)), choose_device(device)
    free = free_memory(device)
    if free is None:  # Apple's GPUs share the memory
        free, device = free_memory("cpu") or 0, "cpu"
    cells, context = choose_cells(shape, context, rows, max(0, free - path.stat().st_size), device)
    forward = LlamaForward(LlamaCpp(path.name), path, rows, cells, device != "cpu", shared=not shape.long_rope)
    return make_engine(forward, rows, cells, context), forward


def make_engine(forward: LlamaForward, rows: int, cells: int, context: int) -> DecodeLoop:
    options = EngineOptions(rows, _MOST_TOKENS, context, 1 + cells // BLOCK)
    engine = DecodeLoop(forward, torch.device("cpu"), options)
    engine.scheduler.pool, forward.scheduler = _Cells(options.blocks), engine.scheduler
    return engine


class _Cells(BlockPool):
    """Counts blocks. Which beginnings are known is the rows' business."""

    def remember(self, block: int, content: bytes) -> None:
        pass
