"""Passes that a GPU repeats from a recording of all their kernels (a CUDA graph).

Launching kernels one by one takes a CPU as long as a GPU needs to run a small model. A recording knows one form: so
many rows, and room for so many targets and documents. Passes with fewer of them are filled up with targets that do not
count and documents without tokens. A pass that has no room makes it larger, which takes a few passes made as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sojourn.train.batcher import DeviceBatch
from sojourn.train.faults.oom_fallback import free_memory, is_oom

_AS_USUAL = 3  # passes before the first recording: kernels are compiled and chosen in them
_TARGETS = 8  # the room for targets comes in so many parts of all tokens
_STARTS = 16  # that for starts of documents by so many: else every pass with one more than any before is recorded anew
_OFTEN = 16  # one pass of so many with ends of documents in its rows, and rows are taken to be packed
_IGNORED = -100  # a label that does not count
_PACKED = ("varlen", "flash_attention_2")  # attention to which the ends of documents are numbers on the device

Record = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]


@dataclass(frozen=True)
class GraphShape:
    """Rows, and what there is room for: targets, starts of documents and tokens of the longest. `plain`: one document a
    row, for which attention has faster kernels."""

    rows: Any
    plain: bool
    targets: int
    starts: int
    longest: int

    def holds(self, other: GraphShape) -> bool:
        return self == self.grown(other)

    def grown(self, other: GraphShape) -> GraphShape:
        """To hold both, where their rows are alike."""
        if (self.rows, self.plain) != (other.rows, other.plain):
            return other
        sizes = zip(self.sizes, other.sizes, strict=True)
        return GraphShape(self.rows, self.plain, *(max(both) for both in sizes))

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.targets, self.starts, self.longest


def graph_shape(ready: DeviceBatch, plain: bool = True) -> GraphShape | None:
    """None: such a pass cannot be recorded. Not `plain`: as if it were packed, even where it is not."""
    layout = ready.layout
    if layout is None or layout.masks or layout.length_buckets is not None:
        return None
    rows, tokens = ready.ids_BT.shape, ready.ids_BT.numel()
    part = -(-tokens // _TARGETS)
    targets = min(tokens, -(-len(ready.places_N) // part) * part)
    if layout.one_document_per_row and plain:
        return GraphShape(rows, True, targets, 0, layout.max_seqlen)
    if layout.backend not in _PACKED:
        return None
    starts = -(-len(layout.cu_seqlens) // _STARTS) * _STARTS
    return GraphShape(rows, False, targets, starts, min(rows[-1], 1 << (layout.max_seqlen - 1).bit_length()))


def pad_to_shape(ready: DeviceBatch, form: GraphShape) -> DeviceBatch:
    """The same pass, as large as the form."""
    places, labels, layout = ready.places_N, ready.labels_N, ready.layout
    more, tokens = form.targets - len(places), ready.ids_BT.numel()
    if layout is not None and not form.plain:
        ends = layout.cu_seqlens[-1:].expand(form.starts - len(layout.cu_seqlens))
        layout = replace(
            layout, cu_seqlens=torch.cat([layout.cu_seqlens, ends]), max_seqlen=form.longest, one_document_per_row=False
        )
    if form.targets == tokens:  # all of them, in order: nothing need be picked out
        labels = labels.new_full((tokens,), _IGNORED).index_copy(0, places, labels)
        places = torch.arange(tokens, dtype=places.dtype, device=places.device)
    else:
        places = torch.cat([places, torch.arange(more, dtype=places.dtype, device=places.device)])
        labels = torch.cat([labels, labels.new_full((more,), _IGNORED)])
    return replace(ready, places_N=places, labels_N=labels, layout=layout)


class CudaGraphs:
    """`loss`: of a batch that is ready, summed. A pass is forward and backward in one. `machine` makes what records
    until all is forgotten."""

    def __init__(
        self, loss: Callable[[DeviceBatch], Any], parameters: list[Any], machine: Callable[[], Record] | None = None
    ) -> None:
        self._loss, self._parameters = loss, parameters
        self._machine = machine or OnGpu
        self._form: GraphShape | None = None
        self._seen = self._passes = self._odd = 0
        self._broken = self._said = False
        self._recordings: dict[bool, tuple[Callable[[], None], Any]] = {}
        self.forget()

    @property
    def plays(self) -> bool:
        return bool(self._recordings)

    @property
    def settled(self) -> bool:
        """Whether a pass has been recorded, or never will be."""
        return self.plays or self._short or self._broken

    def forget(self) -> None:
        """Gives the memory of recordings back. Where it was short, there may be more of it from now on."""
        played = self.plays
        if played and torch.cuda.is_available():
            torch.cuda.synchronize()  # one may still be playing
        self._recordings, self._short = {}, False
        self._record_pass = self._machine()
        self._grads: list[Any] = []
        self._ready: Any = None
        self._targets: Any = None
        self._places: list[int] = []
        if played:
            _give_back()

    def take(self, ready: DeviceBatch, targets: float) -> tuple[Any, DeviceBatch]:
        """A micro batch's share of the mean loss, with its gradients added already; None: make this pass as usual, as
        it is returned."""
        if self._broken or self._short or not self._has_form(ready) or self._form is None:
            return None, ready
        several = targets > len(ready.places_N)
        ready = pad_to_shape(ready, self._form)
        self._seen += 1
        return (self._play(ready, targets, several) if self._seen > _AS_USUAL else None), ready

    def _play(self, ready: DeviceBatch, targets: float, several: bool) -> Any:
        """`several`: the step has more passes than this one."""
        first = all(parameter.grad is None for parameter in self._parameters)
        if not first and any(p.grad is not g for p, g in zip(self._parameters, self._grads, strict=False)):
            return None  # the step's first pass was made as usual
        if self._places and self._places != self._now():
            self.forget()
        if first and not self._record(ready, several):
            return None
        if first not in self._recordings:
            return None
        self._fill(ready, targets)
        again, part = self._recordings[first]
        again()
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        return part

    def _has_form(self, ready: DeviceBatch) -> bool:
        """Whether the pass has the form, which may become another or larger for it."""
        packed = self._form is not None and not self._form.plain
        form = graph_shape(ready, plain=not packed)
        if form is None:
            self._say_once("rows of several documents are recorded with train.attention=varlen alone")
            self._make_room(ready)
            return False
        self._form = self._form or form
        self._passes += 1
        if self._form.holds(form):
            return True
        self._make_room(ready)
        if self._recordings:
            return False  # fewer rows, such as the last ones of a step
        if self._form.rows == form.rows and self._form.plain and not form.plain:
            self._odd += 1
            if self._odd == 1 or _OFTEN * self._odd < self._passes:
                return False  # the end of a text, now and then: not worth slower attention for all
        self._form, self._seen = self._form.grown(form), 0
        return True

    def _make_room(self, ready: DeviceBatch) -> None:
        """For a pass as usual: it and a recording hold the memory of a whole pass each. One of fewer rows needs less,
        and may come in every step."""
        if self._recordings and ready.ids_BT.numel() >= self._ready.ids_BT.numel():
            self.forget()
            self._seen = 0

    def _record(self, ready: DeviceBatch, several: bool) -> bool:
        """What the step's passes need and is not there yet: before any of them is played, so that nothing is lost where
        it cannot be done."""
        if self._ready is None:
            _give_back()
            layout = ready.layout
            if layout is not None and not layout.one_document_per_row:
                layout = replace(layout, cu_seqlens=layout.cu_seqlens.clone())
            self._ready = replace(
                ready, ids_BT=ready.ids_BT.clone(), positions_BT=ready.positions_BT.clone(),
                places_N=ready.places_N.clone(), labels_N=ready.labels_N.clone(), layout=layout,
            )  # fmt: skip
            self._targets = torch.ones((), device=ready.ids_BT.device)
        why, short = "", False
        try:
            if True not in self._recordings:
                self._recordings[True] = self._record_pass(self._pass)
                self._grads, self._places = [parameter.grad for parameter in self._parameters], self._now()
            if several and False not in self._recordings:
                for parameter, grad in zip(self._parameters, self._grads, strict=True):
                    parameter.grad = grad
                self._recordings[False] = self._record_pass(self._pass)
        except RuntimeError as error:
            why, short = " ".join(str(error).split())[:200] or type(error).__name__, is_oom(error)
        if why:  # outside, since the error holds on to memory
            self._give_up(why, short)
        return not why

    def _give_up(self, why: str, short: bool) -> None:
        self._say_once(f"this run cannot be recorded ({why}); going on without")
        for parameter in self._parameters:
            parameter.grad = None
        self.forget()
        _give_back()
        self._short, self._broken = short, not short

    def _say_once(self, what: str) -> None:
        if not self._said:
            print(f"note: train.cuda_graphs: {what}", flush=True)
        self._said = True

    def _pass(self) -> Any:
        part = self._loss(self._ready) / self._targets
        part.backward()
        return part.detach()

    def _fill(self, ready: Any, targets: float) -> None:
        self._targets.fill_(targets)
        for name in ("ids_BT", "positions_BT", "places_N", "labels_N"):
            getattr(self._ready, name).copy_(getattr(ready, name))
        if not ready.layout.one_document_per_row:
            self._ready.layout.cu_seqlens.copy_(ready.layout.cu_seqlens)

    def _now(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters]


def _give_back() -> None:
    """All memory that is not in use. Multiplications have a workspace for each stream that they run in, and recordings
    are made in one of their own."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
    free_memory()


class OnGpu:
    """All recordings share memory: none is needed any longer when the next is played. That memory ends with them: torch
    refuses to record into what has been given back while anything made there, such as a loss, is still held."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            made = work()
        return graph.replay, made
