"""Decoding steps as CUDA graphs: one for each of a few numbers of sequences, with the rest padded. Other steps
(prompts, adapters) are launched operation by operation: they have enough to compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sojourn.infer.engine.adapters import Adapters
from sojourn.infer.engine.batch import StepBatch, build_arrays, to_device
from sojourn.infer.engine.block_pool import BLOCK
from sojourn.infer.engine.forward import Forward, PlainForward, known_ids
from sojourn.infer.engine.scheduler import Part

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    batch: StepBatch
    logits: Tensor


class GraphedForward:
    def __init__(self, forward: Forward, max_rows: int, context: int, adapters: Adapters) -> None:
        self._forward, self._adapters, self._context = forward, adapters, context
        self._plain = PlainForward(forward, adapters)
        self._sizes = [size for size in _SIZES if size < max_rows] + [max_rows] if max_rows <= _SIZES[-1] else [*_SIZES]
        self._graphs: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, last_tokens: Tensor) -> None:
        """Captures all graphs, the largest first: smaller ones use its memory."""
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(size, last_tokens)

    def __call__(self, parts: list[Part], last_tokens: Tensor) -> Tensor:
        size = next((size for size in self._sizes if size >= len(parts)), None)
        plain = size is None or any(
            part.size > 1 or part.request.adapter or part.request.prompt_logprobs is not None or not part.samples
            for part in parts
        )
        if plain or size is None:
            return self._plain(parts, last_tokens)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size, last_tokens)
        graph = self._graphs[size]
        _copy(to_device(build_arrays(parts, {}, size), last_tokens.device), graph.batch)
        graph.graph.replay()
        return graph.logits[: len(parts)]

    def _capture(self, size: int, last_tokens: Tensor) -> _Graph:
        device = last_tokens.device
        zeros = torch.zeros(size, dtype=torch.int32, device=device)
        order = torch.arange(size + 1, dtype=torch.int32, device=device)
        table = torch.zeros(size, -(-self._context // BLOCK), dtype=torch.int32, device=device)
        batch = StepBatch(
            zeros.clone(), zeros.clone(), zeros.clone(), order, zeros + 1, table, order[:size], None, None, size, 1, 1
        )

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
        with torch.cuda.graph(graph, pool=self._pool):
            logits = run()
        return _Graph(graph, batch, logits)


def _copy(source: StepBatch, target: StepBatch) -> None:
    target.ids_T.copy_(source.ids_T)
    target.positions_T.copy_(source.positions_T)
    target.slots_T.copy_(source.slots_T)
    target.context_S.copy_(source.context_S)
    target.block_table_SB[:, : source.block_table_SB.shape[1]].copy_(source.block_table_SB)
