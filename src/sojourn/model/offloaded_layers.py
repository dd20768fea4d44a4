"""Activation checkpointing that needs the least memory: `train.activation_checkpointing=offload`.

A decoder layer is one autograd function. Its forward stores nothing on the GPU: the layer's input goes to pinned host
memory on a stream of its own. Its backward gets the input back, which was fetched during the layer above's, and
recomputes the layer. The MLP, where no token reads another, is computed tile by tile, each with its backward
before the next: no tensor of length × intermediate size ever exists. The results are those of `full`. All of it can be
captured as a CUDA graph, the copies too.

The layer's trained parameters are inputs of the function, which returns their gradients once: hooks on parameters (DDP,
FSDP, an optimizer step in the backward) see them as they would without.

Shapes: B rows, T tokens per row, N tokens of a tile, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sojourn.estimate.activations import mlp_tile_tokens
from sojourn.model.kernels.fused_forwards import normalizes_mlp_output
from sojourn.model.kernels.kept_weights import kept_weights
from sojourn.model.layers import decoder_layers

Block = Callable[[Any, Tensor], Tensor]

_PIECE = 2**25  # bytes of one pinned buffer: torch rounds its size up to a power of two, of a whole input twice as much


def offload_layer_inputs(model: nn.Module, preserve_rng_state: bool) -> None:
    """`preserve_rng_state`: for dropout, which must draw the same numbers when a layer is recomputed."""
    layers = decoder_layers(model)
    inputs, config = LayerInputs(len(layers)), model.config.get_text_config()
    for index, layer in enumerate(layers):
        layer_class: Any = type(layer)
        layer.__class__ = _offloading_class(layer_class, preserve_rng_state)
        layer.__dict__.update(layer_inputs=inputs, layer_index=index)
        layer.tile_tokens = mlp_tile_tokens(config.intermediate_size)
    model.get_output_embeddings().small_chunks = True  # see model/loss.py


@cache
def _offloading_class(layer_class: Any, preserve_rng_state: bool) -> Any:
    original_forward = layer_class.forward

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        def whole(x: Tensor) -> Any:
            return original_forward(self, x, *args, **kwargs)

        if not torch.is_grad_enabled():
            return whole(hidden_states)
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return _OffloadedLayer.apply(self, whole, kwargs, preserve_rng_state, hidden_states, *parameters)

    members = {"forward": forward, "__module__": layer_class.__module__}
    return type(layer_class.__name__, (layer_class,), members)


class LayerInputs:
    """The inputs of all layers, from their forward to their backward: in host memory, but for the last one's, which is
    needed at once. Without a GPU they stay where they are."""

    def __init__(self, layers: int) -> None:
        self._last = layers - 1
        self._host: dict[int, list[Tensor]] = {}  # pinned; allocated once, since that is slow
        self._here: dict[int, Tensor] = {}
        self._arrived: dict[int, torch.cuda.Event] = {}
        self._stream: torch.cuda.Stream | None = None
        self._leaving: tuple[Tensor, torch.cuda.Event] | None = None

    def put(self, index: int, x: Tensor) -> None:
        if index == 0:
            self._forget_unfinished_pass()
        self._wait_for_copy()
        if not x.is_cuda or index == self._last:
            self._here[index] = x.detach()
            return
        stream = self._copy_stream(x.device)
        with torch.cuda.stream(stream):
            for part, buffer in self._pieces(index, x):
                buffer.copy_(x.reshape(-1)[part], non_blocking=True)
            self._leaving = x, stream.record_event()

    def take(self, index: int, like: Tensor) -> Tensor:
        self._wait_for_copy()
        self.fetch(index, like)
        x = self._here.pop(index)
        if (arrived := self._arrived.pop(index, None)) is not None:
            torch.cuda.current_stream(x.device).wait_event(arrived)
        return x

    def fetch(self, index: int, like: Tensor) -> None:
        """Starts to bring it back, unless it is here; `like`: of its shape."""
        if index < 0 or index in self._here:
            return
        x, stream = torch.empty_like(like), self._copy_stream(like.device)  # contiguous, as `like`
        with torch.cuda.stream(stream):
            for part, buffer in self._pieces(index, x):
                x.view(-1)[part].copy_(buffer, non_blocking=True)
            self._arrived[index] = stream.record_event()
        self._here[index] = x

    def _forget_unfinished_pass(self) -> None:
        """Memory ran out in it, or it could not be captured. Its copies may still be running."""
        if (self._leaving or self._arrived) and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        self._leaving = None
        self._arrived.clear()
        self._here.clear()

    def _copy_stream(self, device: torch.device) -> torch.cuda.Stream:
        """It waits for what was launched so far, which may still use memory that was allocated since."""
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream

    def _wait_for_copy(self) -> None:
        """The memory of the last tensor that was sent may be used again."""
        if self._leaving is not None:
            torch.cuda.current_stream(self._leaving[0].device).wait_event(self._leaving[1])
            self._leaving = None

    def _pieces(self, index: int, like: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Parts of a flat input, each with its buffer in host memory."""
        buffers, length = self._host.setdefault(index, []), _PIECE // like.element_size()
        for number, start in enumerate(range(0, like.numel(), length)):
            part = slice(start, min(start + length, like.numel()))
            size = part.stop - part.start
            if number == len(buffers) or buffers[number].numel() < size or buffers[number].dtype != like.dtype:
                buffers[number:] = [torch.empty(size, dtype=like.dtype, pin_memory=like.is_cuda)]
            yield part, buffers[number][:size]


class _OffloadedLayer(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        layer: Any,
        whole: Callable[[Tensor], Tensor],
        kwargs: dict[str, Any],
        preserve_rng_state: bool,
        x_BTD: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        layer.layer_inputs.put(layer.layer_index, x_BTD)
        ctx.layer, ctx.whole, ctx.kwargs, ctx.parameters = layer, whole, kwargs, parameters
        ctx.context = _forward_context(x_BTD.device, preserve_rng_state)
        blocks = getattr(layer, "blocks", None)
        if blocks is None:
            return whole(x_BTD)
        attention_block, mlp_block = blocks
        hidden_BTD = attention_block(layer, x_BTD, **kwargs)
        flat_D = hidden_BTD.flatten(0, 1)
        with kept_weights(layer.mlp):
            for tile in _tiles(layer, len(flat_D)):
                flat_D[tile] = mlp_block(layer, flat_D[tile][None])[0]  # nothing reads these tokens' states again
        return hidden_BTD

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (grad_BTD,), layer = upstream, ctx.layer
        grad_BTD = grad_BTD.contiguous()  # only the layer above or the final norm has made it, and none else reads it
        x_BTD = layer.layer_inputs.take(layer.layer_index, grad_BTD).detach()
        x_BTD.requires_grad_(ctx.needs_input_grad[4])
        gradients = _Gradients(ctx.parameters)
        blocks = getattr(layer, "blocks", None)
        with ctx.context(), kept_weights(layer):
            if blocks is None:
                out_BTD = ctx.whole(x_BTD)
            else:
                out_BTD = blocks[0](layer, x_BTD, **ctx.kwargs)
                _mlp_backward_(layer, blocks[1], out_BTD.detach(), grad_BTD, gradients)
            if x_BTD.requires_grad:  # else the layers below have no backward that would take their inputs
                layer.layer_inputs.fetch(layer.layer_index - 1, grad_BTD)
            grad_x = gradients.add(out_BTD, x_BTD, grad_BTD)
        return None, None, None, None, grad_x, *gradients.sums


def _mlp_backward_(layer: Any, mlp_block: Block, hidden: Tensor, grad: Tensor, gradients: _Gradients) -> None:
    """Overwrites the gradient of the MLP block's output with that of its input, tile by tile. The output itself is not
    needed again, unless a norm follows it."""
    flat_hidden, flat_grad = hidden.flatten(0, 1), grad.flatten(0, 1)
    layer.mlp.skips_output = not normalizes_mlp_output(layer)
    try:
        for tile in _tiles(layer, len(flat_hidden)):
            tile_1ND = flat_hidden[tile][None].requires_grad_()
            flat_grad[tile] = gradients.add(mlp_block(layer, tile_1ND), tile_1ND, flat_grad[tile][None])[0]
    finally:
        layer.mlp.skips_output = False


class _Gradients:
    """Of the parameters of a layer, summed over its parts."""

    def __init__(self, parameters: tuple[Tensor, ...]) -> None:
        self._parameters = parameters
        self.sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, out: Tensor, x: Tensor, grad: Tensor) -> Any:
        """Adds those of a part from `x` to `out`; returns that of `x`, None where it needs none."""
        inputs = [x] if x.requires_grad else []
        grads = torch.autograd.grad(out, [*inputs, *self._parameters], grad, allow_unused=True)
        for i, new in enumerate(grads[len(inputs) :]):
            if new is not None:
                before = self.sums[i]
                self.sums[i] = new if before is None else before.add_(new)
        return grads[0] if inputs else None


def _tiles(layer: Any, tokens: int) -> Iterator[slice]:
    return (slice(start, start + layer.tile_tokens) for start in range(0, tokens, layer.tile_tokens))


def _forward_context(device: torch.device, preserve_rng_state: bool) -> Any:
    """Makes a context in which a layer computes again as it does now: autocast, random numbers."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    on_cpu = torch.get_rng_state() if preserve_rng_state else None
    on_gpu = torch.cuda.get_rng_state(device) if preserve_rng_state and kind == "cuda" else None

    @contextmanager
    def context() -> Iterator[None]:
        fork = torch.random.fork_rng([device] if kind == "cuda" else []) if preserve_rng_state else nullcontext()
        with fork, torch.enable_grad(), torch.autocast(kind, dtype, enabled):
            if on_cpu is not None:
                torch.set_rng_state(on_cpu)
            if on_gpu is not None:
                torch.cuda.set_rng_state(on_gpu, device)
            yield

    return context
