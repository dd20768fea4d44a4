"""Decoding steps as CUDA graphs: one for each of a few numbers of sequences, without and with adapters; the rest is
padded. Steps with prompts are launched operation by operation: they have enough to compute. They are padded, too:
libraries load another kernel for nearly every size, which takes longer than to compute the padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sojourn.infer.engine.adapters import Adapters
from sojourn.infer.engine.batch import StepBatch, build_arrays, pad_prompts, scores_prompt, to_device
from sojourn.infer.engine.block_pool import BLOCK
from sojourn.infer.engine.forward import Forward, known_ids
from sojourn.infer.engine.scheduler import Part

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_PROMPT_SIZES = (16, 32, 64, 128, 192)  # tokens; beyond: multiples of 128


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    batch: StepBatch
    logits: Tensor


class GraphedForward:
    def __init__(self, forward: Forward, max_rows: int, max_tokens: int, context: int, adapters: Adapters) -> None:
        self._forward, self._adapters, self._context = forward, adapters, context
        self._prompt_sizes = [*_PROMPT_SIZES, *range(256, max_tokens + 127, 128)]
        self._sizes = [size for size in _SIZES if size < max_rows] + [max_rows] if max_rows <= _SIZES[-1] else [*_SIZES]
        self._graphs: dict[tuple[int, bool], _Graph] = {}  # by size, and whether there are adapters
        self._changes = adapters.changes

    def warm_up(self, last_tokens: Tensor) -> None:
        """Captures all graphs, the largest first: smaller ones use its memory."""
        for size in reversed(self._sizes):
            for adapted in (False, True)[: 1 + bool(self._adapters.indices)]:
                self._graphs[size, adapted] = self._capture(size, adapted, last_tokens)
        for size in self._prompt_sizes:
            arrays = {name: np.zeros(0) for name in ("ids", "positions", "slots", "context", "kv_slots")}
            arrays |= {name: np.zeros(1) for name in ("starts", "query_starts", "kv_starts", "logit_rows")}
            arrays["table"] = np.zeros((0, 1))
            pad_prompts(arrays, size)
            self._forward(to_device(arrays, last_tokens.device))

    def __call__(self, parts: list[Part], last_tokens: Tensor) -> Tensor:
        size = next((size for size in self._sizes if size >= len(parts)), None)
        if size is None or any(part.size > 1 or scores_prompt(part) or not part.samples for part in parts):
            return self._compute(parts, last_tokens)
        if self._changes != self._adapters.changes:  # their graphs have the matrices of before
            self._graphs = {key: graph for key, graph in self._graphs.items() if not key[1]}
            self._changes = self._adapters.changes
        key = (size, any(part.request.adapter for part in parts))
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key, last_tokens)
        graph = self._graphs[key]
        _copy(to_device(build_arrays(parts, self._adapters.indices, size), last_tokens.device), graph.batch)
        graph.graph.replay()
        return graph.logits[: len(parts)]

    def _compute(self, parts: list[Part], last_tokens: Tensor) -> Tensor:
        arrays = build_arrays(parts, self._adapters.indices)
        tokens, count = len(arrays["ids"]), len(arrays["logit_rows"])
        if "kv_slots" in arrays:
            pad_prompts(arrays, next((size for size in self._prompt_sizes if size >= tokens), tokens))
        if 0 < count <= _SIZES[-1]:
            arrays["logit_rows"] = np.pad(arrays["logit_rows"], (0, (1 << (count - 1).bit_length()) - count))
        batch = to_device(arrays, last_tokens.device)
        batch.ids_T = known_ids(batch.ids_T, last_tokens)
        return self._forward(batch)[:count]

    def _capture(self, size: int, adapted: bool, last_tokens: Tensor) -> _Graph:
        device = last_tokens.device
        zeros = torch.zeros(size, dtype=torch.int32, device=device)
        order = torch.arange(size + 1, dtype=torch.int32, device=device)
        table = torch.zeros(size, -(-self._context // BLOCK), dtype=torch.int32, device=device)
        batch = StepBatch(
            zeros.clone(), zeros.clone(), zeros.clone(), order, zeros + 1, table, order[:size],
            zeros.clone() if adapted else None, None, size, 1, 1,
        )  # fmt: skip

        def run() -> Tensor:
            ids = batch.ids_T
            batch.ids_T = known_ids(ids, last_tokens)
            logits = self._forward(batch)
            batch.ids_T = ids
            return logits

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # compiles kernels, and lets cuBLAS allocate
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Not a handle kept from before: a pool is gone with its last graph.
        pool = next((one.graph.pool() for one in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            logits = run()
        return _Graph(graph, batch, logits)


def _copy(source: StepBatch, target: StepBatch) -> None:
    target.ids_T.copy_(source.ids_T)
    target.positions_T.copy_(source.positions_T)
    target.slots_T.copy_(source.slots_T)
    target.context_S.copy_(source.context_S)
    target.block_table_SB[:, : source.block_table_SB.shape[1]].copy_(source.block_table_SB)
    if target.adapter_T is not None and source.adapter_T is not None:
        target.adapter_T.copy_(source.adapter_T)
