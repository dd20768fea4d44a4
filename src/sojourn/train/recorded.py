"""Passes that a GPU repeats from a recording of all their kernels (a CUDA graph).

Launching kernels one by one takes a CPU as long as a GPU needs to run a small model. Recorded are passes that are all
alike: whole rows, as many of them each time. Any other is made as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sojourn.train.feed import Ready
from sojourn.train.survive.ladder import free_memory

_AS_USUAL = 3  # passes before the first recording: kernels are compiled and chosen in them

Record = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]


class Recorder:
    """`loss`: of a batch that is ready, summed. A pass is forward and backward in one. `machine` makes what records
    until all is forgotten."""

    def __init__(
        self, loss: Callable[[Ready], Any], parameters: list[Any], machine: Callable[[], Record] | None = None
    ) -> None:
        self._loss, self._parameters = loss, parameters
        self._machine = machine or OnGpu
        self._shape: Any = None
        self._seen = 0
        self._broken = self._said = False
        self._recordings: dict[bool, tuple[Callable[[], None], Any]] = {}
        self.forget()

    def forget(self) -> None:
        """Gives the memory of recordings back."""
        if self._recordings and torch.cuda.is_available():
            torch.cuda.synchronize()  # one may still be playing
        self._recordings = {}
        self._record_pass = self._machine()
        self._grads: list[Any] = []
        self._ready: Any = None
        self._targets: Any = None
        self._places: list[int] = []

    def play(self, ready: Ready, targets: float) -> Any:
        """A micro batch's share of the mean loss, with its gradients added already; None: make this pass as usual."""
        if self._broken or not self._is_usual(ready):
            return None
        first = all(parameter.grad is None for parameter in self._parameters)
        if not first and any(p.grad is not g for p, g in zip(self._parameters, self._grads, strict=False)):
            return None  # the step's first pass was made as usual
        if self._places and self._places != self._now():
            self.forget()
        if first not in self._recordings and not self._record(first, ready):
            return None
        self._fill(ready, targets)
        again, part = self._recordings[first]
        again()
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        return part

    def _is_usual(self, ready: Ready) -> bool:
        layout = ready.layout
        if layout is None or not layout.plain or layout.masks or layout.grids is not None:
            self._say_once("rows of several documents, or with padding, are not recorded, but computed as usual")
            self._make_room(ready)
            return False
        shape = (ready.ids_BT.shape, ready.places_N.shape, layout.longest)
        if shape != self._shape:
            self._make_room(ready)
            if self._recordings:
                return False
            self._shape, self._seen = shape, 0
        self._seen += 1
        return self._seen > _AS_USUAL

    def _make_room(self, ready: Ready) -> None:
        """For a pass as usual: it and a recording hold the memory of a whole pass each. One of fewer rows needs less,
        and may come in every step."""
        if self._recordings and ready.ids_BT.numel() >= self._ready.ids_BT.numel():
            self.forget()
            self._seen = 0
            free_memory()

    def _record(self, first: bool, ready: Ready) -> bool:
        if not first and not self._recordings:
            return False
        if self._ready is None:
            free_memory()
            self._ready = replace(
                ready, ids_BT=ready.ids_BT.clone(), positions_BT=ready.positions_BT.clone(),
                places_N=ready.places_N.clone(), labels_N=ready.labels_N.clone(),
            )  # fmt: skip
            self._targets = torch.ones((), device=ready.ids_BT.device)
        why = ""
        try:
            self._recordings[first] = self._record_pass(self._pass)
        except RuntimeError as error:
            why = " ".join(str(error).split())[:200]
        if first not in self._recordings:  # outside, since the error holds on to memory
            self._give_up(first, why)
            return False
        if first:
            self._grads = [parameter.grad for parameter in self._parameters]
            self._places = self._now()
        return True

    def _give_up(self, first: bool, why: str) -> None:
        self._say_once(f"this run cannot be recorded ({why}); going on without")
        self._broken = True
        if first:
            self.forget()
            for parameter in self._parameters:
                parameter.grad = None
            free_memory()

    def _say_once(self, what: str) -> None:
        if not self._said:
            print(f"note: train.cuda_graphs: {what}", flush=True)
        self._said = True

    def _pass(self) -> Any:
        part = self._loss(self._ready) / self._targets
        part.backward()
        return part.detach()

    def _fill(self, ready: Ready, targets: float) -> None:
        self._targets.fill_(targets)
        for name in ("ids_BT", "positions_BT", "places_N", "labels_N"):
            getattr(self._ready, name).copy_(getattr(ready, name))

    def _now(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters]


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
