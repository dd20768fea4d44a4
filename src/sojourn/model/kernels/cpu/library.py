"""The functions of kernels.c, attention.c and decoder_layer.c, called with tensors.

Modules with the attribute `cpu_kernels` use them (smoke_test.py sets it).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sojourn.model.kernels.cpu.compile_c import compile_library, threads_for
from sojourn.model.layout import Layout

ROWS_PER_SUM, _BLOCK = 32, 1024  # as in kernels.h
_DTYPES = (torch.float32, torch.int64)

_Strides = ctypes.c_int64 * 3
_P, _N, _F, _D, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_double, ctypes.c_int
_SIGNATURES = {
    "rms_norm_forward": (_P, _P, _P, _P, _N, _N, _F, _I),
    "rms_norm_backward": (_P, _P, _P, _P, _P, _P, _P, _N, _N, _I),
    "swiglu_forward": (_P, _P, _P, _N, _I),
    "swiglu_backward": (_P, _P, _P, _N, _I),
    "rope": (_P, _Strides, _P, _P, _P, _Strides, _N, _N, _N, _N, _F, _I),
    "attention_forward": (*(_P,) * 6, *(_N,) * 5, _F, _I),
    "attention_backward": (*(_P,) * 9, *(_N,) * 5, _F, _I),
    "decoder_layer_forward": (*(_P,) * 9, _F, _I),
    "decoder_layer_backward": (*(_P,) * 10, _F, _I),
    "decoder_forward": (_P, _P, _P, _N, _P, _P, _P, _F, _N, _I, _I),
    "decoder_backward": (_P, _P, _P, _P, _N, _P, _P, _F, *(_N,) * 3, _I),
    "cross_entropy": (_P, _P, _P, _N, _N, _I),
    "linear_cross_entropy": (*(_P,) * 7, *(_N,) * 3, _I),
    "sum_of_squares": (_P, _P, _N, _P, _P, _I),
    "adamw": (*(_P,) * 5, _N, _F, _I),
}


@cache
def load_library() -> Any:
    """Raises OSError or subprocess.SubprocessError where it cannot be compiled or loaded."""
    return compile_library(Path(__file__).parent, _SIGNATURES)


def cpu_kernels_take(*tensors: Tensor) -> bool:
    """Whether the kernels are made for these tensors: fp32, or int64 labels."""
    return (
        not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and all(x.device.type == "cpu" and x.dtype in _DTYPES and x.is_contiguous() for x in tensors)
    )


def rms_norm_forward(x_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed rows, and the scale of each (N)."""
    rows, size = x_ND.shape
    out_ND, scale_N = torch.empty_like(x_ND), x_ND.new_empty(rows)
    pointers = (x_ND.data_ptr(), weight_D.data_ptr(), out_ND.data_ptr(), scale_N.data_ptr())
    load_library().rms_norm_forward(*pointers, rows, size, eps, threads_for(x_ND.numel()))
    return out_ND, scale_N


def rms_norm_backward(
    grad_ND: Tensor, x_ND: Tensor, weight_D: Tensor, scale_N: Tensor, residual_grad_ND: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of x, to which `residual_grad_ND` is added, and of the weight."""
    rows, size = x_ND.shape
    out_ND, partial = torch.empty_like(x_ND), x_ND.new_empty(-(-rows // ROWS_PER_SUM), size)
    pointers = [tensor.data_ptr() for tensor in (grad_ND, x_ND, weight_D, scale_N)]
    pointers += [0 if residual_grad_ND is None else residual_grad_ND.data_ptr(), out_ND.data_ptr(), partial.data_ptr()]
    load_library().rms_norm_backward(*pointers, rows, size, threads_for(x_ND.numel()))
    return out_ND, partial.sum(0)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    out, size = torch.empty_like(gate), gate.numel()
    load_library().swiglu_forward(gate.data_ptr(), up.data_ptr(), out.data_ptr(), size, threads_for(size))
    return out


def swiglu_backward_(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    """`gate` and `up` become their own gradients, and `grad` the output of the forward, which need not be saved."""
    size = gate.numel()
    load_library().swiglu_backward(grad.data_ptr(), gate.data_ptr(), up.data_ptr(), size, threads_for(size))


def rope(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, out_BTHD: Tensor, sign: float = 1.0) -> None:
    """Into `out_BTHD`, which may be `x_BTHD`. `sign` -1 rotates back."""
    pointers = (cos_BTD.data_ptr(), sin_BTD.data_ptr(), out_BTHD.data_ptr(), _Strides(*out_BTHD.stride()[:3]))
    load_library().rope(
        x_BTHD.data_ptr(), _Strides(*x_BTHD.stride()[:3]), *pointers, *x_BTHD.shape, sign, threads_for(x_BTHD.numel())
    )


def attention_forward(
    query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor]:
    """The outputs of all heads, and the log of each softmax's denominator, for the backward."""
    out_BTHD, lse_BTH = torch.empty_like(query_BTHD), query_BTHD.new_empty(query_BTHD.shape[:3])
    pointers = [tensor.data_ptr() for tensor in (query_BTHD, key_BTKD, value_BTKD, out_BTHD, lse_BTH)]
    load_library().attention_forward(*pointers, *_attention_arguments(query_BTHD, key_BTKD, layout, scale))
    return out_BTHD, lse_BTH


def attention_backward(
    grad_BTHD: Tensor, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, lse_BTH: Tensor, layout: Layout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values."""
    grads = torch.empty_like(query_BTHD), torch.empty_like(key_BTKD), torch.empty_like(value_BTKD)
    given = (grad_BTHD, query_BTHD, key_BTKD, value_BTKD, lse_BTH)
    pointers = [tensor.data_ptr() for tensor in (*given, *grads)]
    load_library().attention_backward(*pointers, *_attention_arguments(query_BTHD, key_BTKD, layout, scale))
    return grads


def _attention_arguments(query_BTHD: Tensor, key_BTKD: Tensor, layout: Layout, scale: float) -> tuple[Any, ...]:
    starts, (heads, head_dim), kv_heads = layout.cu_seqlens, query_BTHD.shape[2:], key_BTKD.shape[2]
    sizes = (len(starts) - 1, layout.max_seqlen, heads, kv_heads, head_dim)
    return starts.data_ptr(), *sizes, scale, threads_for(query_BTHD.numel())


def decoder_layer_forward(
    x_BTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, weights: Sequence[Tensor], layout: Layout, scale: float,
    head_dim: int, eps: tuple[float, float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The layer's output, and what the backward needs. `weights`: as layer_on_cpu has them."""
    sizes, floats, threads = _layer_sizes(x_BTD.numel() // x_BTD.shape[-1], weights, layout, head_dim)
    saved, out_BTD = x_BTD.new_empty(floats), torch.empty_like(x_BTD)
    given = (x_BTD.data_ptr(), cos_BTD.data_ptr(), sin_BTD.data_ptr(), pointers(weights))
    made = (saved.data_ptr(), out_BTD.data_ptr())
    starts = layout.cu_seqlens.data_ptr()
    load_library().decoder_layer_forward(*given, *made, sizes, starts, (_F * 2)(*eps), scale, threads)
    return out_BTD, saved


def decoder_layer_backward(
    grad_BTD: Tensor, x_BTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, weights: Sequence[Tensor], saved: Tensor,
    layout: Layout, scale: float, head_dim: int,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The gradients of x and of the weights. `saved` is overwritten."""
    sizes, _, threads = _layer_sizes(x_BTD.numel() // x_BTD.shape[-1], weights, layout, head_dim)
    grad_x, grads = torch.empty_like(x_BTD), [torch.empty_like(weight) for weight in weights]
    given = [tensor.data_ptr() for tensor in (grad_BTD, x_BTD, cos_BTD, sin_BTD)]
    made = (pointers(weights), saved.data_ptr(), grad_x.data_ptr(), pointers(grads))
    load_library().decoder_layer_backward(*given, *made, sizes, layout.cu_seqlens.data_ptr(), scale, threads)
    return grad_x, grads


@dataclass(frozen=True)
class DecoderSettings:
    """Of a decoder like Llama's. `eps`: of both norms of each layer, then of the final norm; `padding`: the id whose
    embedding is not trained, or -1."""

    scale: float
    head_dim: int
    eps: tuple[float, ...]
    padding: int

    @property
    def layers(self) -> int:
        return len(self.eps) // 2


@dataclass(frozen=True)
class DecoderInputs:
    """Of a decoder's tokens: ids, those whose hidden states are wanted (ascending), RoPE's cosines and sines."""

    ids: Tensor
    targets_N: Tensor
    cos: Tensor
    sin: Tensor
    layout: Layout


@dataclass(frozen=True)
class SavedByDecoder:
    """For the backward. `x`: inputs of the layers and output of the last; `scales_N`: of the final norm."""

    x: Tensor
    scales_N: Tensor
    layers: list[Tensor]


def decoder_forward(
    given: DecoderInputs, settings: DecoderSettings, weights: Sequence[Tensor], keep: bool
) -> tuple[Tensor, SavedByDecoder]:
    """The target tokens' hidden states after the final norm (ND), and, if `keep`, what the backward needs. `weights`:
    embedding, final norm, then as layer_on_cpu has them, layer by layer."""
    norm, tokens, targets = weights[1], given.ids.numel(), len(given.targets_N)
    sizes, floats, threads = _layer_sizes(tokens, weights[2:11], given.layout, settings.head_dim)
    x = norm.new_empty(settings.layers + 1 if keep else 2, tokens, len(norm))
    saved = SavedByDecoder(
        x, norm.new_empty(targets), [norm.new_empty(floats) for _ in range(settings.layers if keep else 1)]
    )  # fmt: skip
    hidden_ND = norm.new_empty(targets, len(norm))
    load_library().decoder_forward(
        pointers((*_decoder_inputs(given, saved), hidden_ND)), pointers(weights), pointers(saved.layers),
        settings.layers, sizes, given.layout.cu_seqlens.data_ptr(), (_F * len(settings.eps))(*settings.eps),
        settings.scale, targets, keep, threads,
    )  # fmt: skip
    return hidden_ND, saved


def decoder_backward(
    grad_ND: Tensor, given: DecoderInputs, settings: DecoderSettings, weights: Sequence[Tensor], saved: SavedByDecoder
) -> list[Tensor]:
    """The gradients of the weights. `saved` is overwritten."""
    sizes, _, threads = _layer_sizes(given.ids.numel(), weights[2:11], given.layout, settings.head_dim)
    grads = [torch.empty_like(weight) for weight in weights]
    grad_x, targets = torch.empty_like(saved.x[:2]), len(given.targets_N)
    partial = grad_ND.new_empty(-(-targets // ROWS_PER_SUM), grad_ND.shape[1])
    load_library().decoder_backward(
        pointers((*_decoder_inputs(given, saved), grad_ND, grad_ND, grad_x, partial)), pointers(weights),
        pointers(saved.layers), pointers(grads), settings.layers, sizes, given.layout.cu_seqlens.data_ptr(),
        settings.scale, targets, len(weights[0]), settings.padding, threads,
    )  # fmt: skip
    return grads


def _decoder_inputs(given: DecoderInputs, saved: SavedByDecoder) -> tuple[Tensor, ...]:
    """As decoder_layer.c has them."""
    return given.ids, given.targets_N, given.cos, given.sin, saved.x, saved.scales_N


def _layer_sizes(tokens: int, weights: Sequence[Tensor], layout: Layout, head_dim: int) -> tuple[Any, int, int]:
    """The sizes, as decoder_layer.c has them; how many floats it saves of a layer; and threads."""
    size, queries, keys, ffn = len(weights[0]), len(weights[1]), len(weights[2]), len(weights[6])
    heads, kv_heads, documents = queries // head_dim, keys // head_dim, len(layout.cu_seqlens) - 1
    saved = tokens * (2 + heads + size + 2 * queries + 2 * keys + 2 * ffn)
    sizes = (_N * 8)(tokens, size, heads, kv_heads, head_dim, ffn, documents, layout.max_seqlen)
    return sizes, saved, threads_for(tokens * ffn)


def cross_entropy_with_grad(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    """Each token's loss; the logits become their gradient. Labels below 0 are ignored."""
    losses_C = logits_CV.new_empty(len(labels_C))
    pointers = (logits_CV.data_ptr(), labels_C.data_ptr(), losses_C.data_ptr())
    load_library().cross_entropy(*pointers, *logits_CV.shape, threads_for(logits_CV.numel()))
    return losses_C


def linear_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's loss by an LM head, and the gradients of their sum by hidden states and head. Labels below 0 are
    ignored."""
    (tokens, size), vocabulary = hidden_ND.shape, len(weight_VD)
    logits, losses = hidden_ND.new_empty(tokens, vocabulary), hidden_ND.new_empty(tokens)
    grads = torch.empty_like(hidden_ND), torch.empty_like(weight_VD)
    pointers = [tensor.data_ptr() for tensor in (hidden_ND, weight_VD, labels_N, logits, losses, *grads)]
    load_library().linear_cross_entropy(*pointers, tokens, size, vocabulary, threads_for(logits.numel()))
    return losses, *grads


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """Of all values of these tensors, contiguous and in fp32."""
    sizes = array("q", [tensor.numel() for tensor in tensors])
    partial = torch.empty(sum(-(-size // _BLOCK) for size in sizes), dtype=torch.float64)
    result = ctypes.c_double()
    arrays = (pointers(tensors), _as_c(sizes), len(sizes), partial.data_ptr(), ctypes.byref(result))
    load_library().sum_of_squares(*arrays, threads_for(sum(sizes)))
    return result.value


def adamw_step(weights: Sequence[Tensor], grads: Sequence[Tensor], states: Any, sizes: array[int],
               settings: Sequence[float], factor: float) -> None:  # fmt: skip
    """One step of AdamW in place. `states`: pointers to each parameter's mean, mean square and count of steps;
    `settings`: 5 of each parameter, as `adamw` of kernels.c has them."""
    arrays = (pointers(weights), pointers(grads), states, _as_c(sizes), _as_c(array("d", settings)), len(sizes))
    load_library().adamw(*arrays, factor, threads_for(sum(sizes)))


def pointers(tensors: Sequence[Tensor]) -> Any:
    """Their addresses as C has them. Through `array`: ctypes takes twice as long for each."""
    return _as_c(array("q", [tensor.data_ptr() for tensor in tensors]))


def _as_c(numbers: array[Any]) -> Any:
    return ((_N if numbers.typecode == "q" else _D) * len(numbers)).from_buffer(numbers)
