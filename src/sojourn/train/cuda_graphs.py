"""Forward and backward of a micro batch, captured as a CUDA graph and replayed.

Launching kernels one by one takes a CPU as long as a GPU needs to run a small model. A CUDA graph launches all of them
at once. The first micro batches run eagerly, so that kernels are compiled and chosen; then a graph is captured.

- **Shape.** A graph has fixed shapes: rows, and room for target tokens (by eighths of all tokens), for `cu_seqlens` (by
  16) and for `max_seqlen` (by powers of two). A micro batch with fewer is padded with labels that do not count and
  documents of no tokens. One that does not fit makes the shape larger; the graph is then captured again.
- **Gradients.** The first micro batch of a step overwrites the gradients, later ones add to them: two graphs. Both are
  captured before either is replayed in a step, so that nothing is lost if capturing fails. The optimizer stays outside.
- **Memory.** A graph keeps the memory of a whole forward+backward, beside that of an eager pass. So graphs are released
  before an eager pass of as many tokens, before evaluations, and first of all when memory runs out. New graphs get a
  new memory pool: torch refuses to capture into a released pool while any tensor in it is alive. cuBLAS has a workspace
  per stream, so that of the other stream is freed before capturing.
- **Dropout** draws the same numbers as in eager mode. Under activation checkpointing it cannot be captured.

Parameters that were moved in memory are captured again. What cannot be captured runs eagerly, with a note.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sojourn.config.attention_backends import ATTENTION_BACKENDS
from sojourn.machine.out_of_memory import free_memory, is_oom
from sojourn.model.neftune import EmbeddingNoise
from sojourn.train.batcher import DeviceBatch

_WARMUP_PASSES = 3  # eager passes before the first capture: kernels are compiled and chosen in them
_TARGET_STEPS = 8  # room for targets comes in eighths of all tokens
_CU_SEQLENS_STEP = 16  # room for cu_seqlens; else each pass with one more document than any before is captured anew
_PACKED_SHARE = 16  # rows count as packed if more than one pass of 16 has several documents in a row
_IGNORE_INDEX = -100

Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]


@dataclass(frozen=True)
class GraphShape:
    """The shape of `ids_BT`, and room for targets, `cu_seqlens` and tokens of the longest document.

    `is_unpacked`: one document a row, for which attention has faster kernels.
    """

    ids: torch.Size
    is_unpacked: bool
    targets: int
    cu_seqlens: int
    max_seqlen: int

    def fits(self, other: GraphShape) -> bool:
        return self == self.grow(other)

    def grow(self, other: GraphShape) -> GraphShape:
        """Large enough for both, if their rows are alike; else the other."""
        if (self.ids, self.is_unpacked) != (other.ids, other.is_unpacked):
            return other
        return GraphShape(
            self.ids,
            self.is_unpacked,
            max(self.targets, other.targets),
            max(self.cu_seqlens, other.cu_seqlens),
            max(self.max_seqlen, other.max_seqlen),
        )


def graph_shape(batch: DeviceBatch, as_packed: bool = False) -> GraphShape | None:
    """None: cannot be captured. `as_packed`: even if it has one document a row."""
    layout = batch.layout
    if layout is None or layout.masks or layout.length_buckets is not None:
        return None
    ids, tokens = batch.ids_BT.shape, batch.ids_BT.numel()
    step = -(-tokens // _TARGET_STEPS)
    targets = min(tokens, -(-len(batch.target_indices_N) // step) * step)
    backend = ATTENTION_BACKENDS[layout.backend]
    if layout.one_document_per_row and backend.causal and not layout.has_window and not as_packed:
        return GraphShape(ids, True, targets, 0, layout.max_seqlen)
    if not backend.varlen:  # would read the first batch's documents; cu_seqlens are copied before each replay
        return None
    cu_seqlens = -(-len(layout.cu_seqlens) // _CU_SEQLENS_STEP) * _CU_SEQLENS_STEP
    return GraphShape(ids, False, targets, cu_seqlens, min(ids[-1], 1 << (layout.max_seqlen - 1).bit_length()))


def pad_to_shape(batch: DeviceBatch, shape: GraphShape) -> DeviceBatch:
    indices, labels, documents, layout = (
        batch.target_indices_N,
        batch.labels_N,
        batch.target_documents_N,
        batch.layout,
    )
    more, tokens = shape.targets - len(indices), batch.ids_BT.numel()
    if layout is not None and not shape.is_unpacked:
        empty = layout.cu_seqlens[-1:].expand(shape.cu_seqlens - len(layout.cu_seqlens))
        layout = replace(
            layout,
            cu_seqlens=torch.cat([layout.cu_seqlens, empty]),
            max_seqlen=shape.max_seqlen,
            one_document_per_row=False,
        )
    if shape.targets == tokens:  # all tokens, in order: nothing needs to be gathered
        labels = labels.new_full((tokens,), _IGNORE_INDEX).index_copy(0, indices, labels)
        if documents is not None:
            documents = documents.new_zeros(tokens).index_copy(0, indices, documents)
        indices = torch.arange(tokens, dtype=indices.dtype, device=indices.device)
    else:
        indices = torch.cat([indices, torch.arange(more, dtype=indices.dtype, device=indices.device)])
        labels = torch.cat([labels, labels.new_full((more,), _IGNORE_INDEX)])
        if documents is not None:
            documents = torch.cat([documents, documents.new_zeros(more)])
    return replace(batch, target_indices_N=indices, labels_N=labels, layout=layout, target_documents_N=documents)


@dataclass(frozen=True)
class _StaticInputs:
    """The tensors that graphs read. `loss_weight`: of the global batch."""

    batch: DeviceBatch
    loss_weight: Tensor

    @staticmethod
    def like(batch: DeviceBatch) -> _StaticInputs:
        layout, documents, noise = batch.layout, batch.target_documents_N, batch.noise
        if layout is not None and not layout.one_document_per_row:
            layout = replace(layout, cu_seqlens=layout.cu_seqlens.clone())
        static = replace(
            batch, ids_BT=batch.ids_BT.clone(), positions_BT=batch.positions_BT.clone(),
            target_indices_N=batch.target_indices_N.clone(), labels_N=batch.labels_N.clone(), layout=layout,
            target_documents_N=None if documents is None else documents.clone(),
            noise=noise and EmbeddingNoise(noise.keys_BT.clone(), noise.scales_BT.clone()),
        )  # fmt: skip
        return _StaticInputs(static, torch.ones((), device=batch.ids_BT.device))

    def copy(self, batch: DeviceBatch, loss_weight: float) -> None:
        self.loss_weight.fill_(loss_weight)
        self.batch.ids_BT.copy_(batch.ids_BT)
        self.batch.positions_BT.copy_(batch.positions_BT)
        self.batch.target_indices_N.copy_(batch.target_indices_N)
        self.batch.labels_N.copy_(batch.labels_N)
        if self.batch.target_documents_N is not None and batch.target_documents_N is not None:
            self.batch.target_documents_N.copy_(batch.target_documents_N)
        if self.batch.noise is not None and batch.noise is not None:
            self.batch.noise.keys_BT.copy_(batch.noise.keys_BT)
            self.batch.noise.scales_BT.copy_(batch.noise.scales_BT)
        if self.batch.layout is not None and batch.layout is not None and not batch.layout.one_document_per_row:
            self.batch.layout.cu_seqlens.copy_(batch.layout.cu_seqlens)


class CudaGraphs:
    """`loss_sum`: of a device batch. `make_capture` makes what captures graphs until they are released."""

    def __init__(
        self,
        loss_sum: Callable[[DeviceBatch], Tensor],
        parameters: list[Tensor],
        make_capture: Callable[[], Capture] | None = None,
    ) -> None:
        self._loss_sum, self._parameters = loss_sum, parameters
        self._make_capture = make_capture or GpuCapture
        self._shape: GraphShape | None = None
        self._warmup = self._passes = self._packed_passes = 0
        self._unsupported = self._noted = False
        # True: for the first micro batch of a step, which overwrites the gradients; False: for the others.
        self._graphs: dict[bool, tuple[Replay, Tensor]] = {}
        self.release()

    @property
    def has_graphs(self) -> bool:
        return bool(self._graphs)

    @property
    def is_settled(self) -> bool:
        """Whether a graph has been captured, or never will be."""
        return self.has_graphs or self._out_of_memory or self._unsupported

    def release(self) -> None:
        """Frees the memory of the graphs. If there was too little to capture them, it is tried again from now on."""
        had_graphs = self.has_graphs
        if had_graphs and torch.cuda.is_available():
            torch.cuda.synchronize()  # one may still be running
        self._graphs, self._out_of_memory = {}, False
        self._capture = self._make_capture()
        self._grads: list[Tensor | None] = []
        self._inputs: _StaticInputs | None = None
        self._addresses: list[int] = []
        if had_graphs:
            _free_cached_memory()

    def run(self, batch: DeviceBatch, loss_weight: float, is_only: bool) -> tuple[Tensor | None, DeviceBatch]:
        """A micro batch's share of the loss, with its gradients added already. None: run the returned batch eagerly.

        `loss_weight`: of the global batch. `is_only`: the step has no other micro batch.
        """
        if self._unsupported or self._out_of_memory or not self._fit_shape(batch) or self._shape is None:
            return None, batch
        batch = pad_to_shape(batch, self._shape)
        self._warmup += 1
        return (self._replay(batch, loss_weight, is_only) if self._warmup > _WARMUP_PASSES else None), batch

    def _replay(self, batch: DeviceBatch, loss_weight: float, is_only: bool) -> Tensor | None:
        is_first = all(parameter.grad is None for parameter in self._parameters)
        if not is_first and any(p.grad is not g for p, g in zip(self._parameters, self._grads, strict=False)):
            return None  # the first micro batch of this step ran eagerly
        if self._addresses and self._addresses != self._current_addresses():
            self.release()
        if is_first:
            if self._inputs is None:
                _free_cached_memory()
                self._inputs = _StaticInputs.like(batch)
            self._capture_missing(self._inputs, is_only)
        if self._inputs is None or is_first not in self._graphs:
            return None
        self._inputs.copy(batch, loss_weight)
        replay, loss_share = self._graphs[is_first]
        replay()
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        return loss_share

    def _fit_shape(self, batch: DeviceBatch) -> bool:
        """Whether the batch fits the shape, which may become another or larger for it."""
        is_packed = self._shape is not None and not self._shape.is_unpacked
        shape = graph_shape(batch, as_packed=is_packed)
        if shape is None:
            self._note_once("rows with several documents, and sliding windows, need train.attention=varlen")
            self._release_for_eager(batch)
            return False
        self._shape = self._shape or shape
        self._passes += 1
        if self._shape.fits(shape):
            return True
        self._release_for_eager(batch)
        if self._graphs:
            return False  # fewer rows, such as the last micro batch of a step
        if self._shape.ids == shape.ids and self._shape.is_unpacked and not shape.is_unpacked:
            self._packed_passes += 1
            if self._packed_passes == 1 or _PACKED_SHARE * self._packed_passes < self._passes:
                return False  # a text ends in this row; too rare to use the slower packed attention for all
        self._shape, self._warmup = self._shape.grow(shape), 0
        return True

    def _release_for_eager(self, batch: DeviceBatch) -> None:
        """An eager pass and a graph each hold the memory of a whole pass. One of fewer rows needs less, and may come in
        every step: then the graphs stay."""
        if self._graphs and self._inputs is not None and batch.ids_BT.numel() >= self._inputs.batch.ids_BT.numel():
            self.release()
            self._warmup = 0

    def _capture_missing(self, inputs: _StaticInputs, is_only: bool) -> None:
        """Captures the graphs that this step needs and that are not there yet, before any of them is replayed."""
        work = partial(self._forward_backward, inputs)
        reason, out_of_memory = "", False
        try:
            if True not in self._graphs:
                self._graphs[True] = self._capture(work)
                self._grads = [parameter.grad for parameter in self._parameters]
                self._addresses = self._current_addresses()
            if not is_only and False not in self._graphs:
                for parameter, grad in zip(self._parameters, self._grads, strict=True):
                    parameter.grad = grad
                self._graphs[False] = self._capture(work)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            out_of_memory = is_oom(error)
        if reason:  # outside `except`: the error's traceback holds memory
            self._give_up(reason, out_of_memory)

    def _give_up(self, reason: str, out_of_memory: bool) -> None:
        self._note_once(f"cannot capture a CUDA graph ({reason}); running without")
        for parameter in self._parameters:
            parameter.grad = None
        self.release()
        _free_cached_memory()
        self._out_of_memory, self._unsupported = out_of_memory, not out_of_memory

    def _note_once(self, message: str) -> None:
        if not self._noted:
            print(f"note: train.cuda_graphs: {message}", flush=True)
        self._noted = True

    def _forward_backward(self, inputs: _StaticInputs) -> Tensor:
        loss_share = self._loss_sum(inputs.batch) / inputs.loss_weight
        loss_share.backward()
        return loss_share.detach()

    def _current_addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters]


def _free_cached_memory() -> None:
    """Also cuBLAS's workspaces: there is one per stream, and graphs are captured in a stream of their own."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
    free_memory()


class GpuCapture:
    """Captures graphs into one memory pool, since no two of them run at the same time."""

    def __init__(self) -> None:
        self._pool: tuple[int, int] | None = None

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()
        return graph.replay, output
