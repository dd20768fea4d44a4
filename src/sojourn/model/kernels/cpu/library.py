"""The functions of kernels.c, attention.c and decoder_layer.c, called with tensors.

Modules with the attribute `cpu_kernels` use them (smoke_test.py sets it).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sojourn.model.kernels.cpu.compile_c import compile_library, threads_for
from sojourn.model.layout import Layout

ROWS_PER_SUM, _BLOCK = 32, 1024  # as in kernels.h
_DTYPES = (torch.float32, torch.int64)

_Strides = ctypes.c_int64 * 3
_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "rms_norm_forward": (_P, _P, _P, _P, _N, _N, _F, _I),
    "rms_norm_backward": (_P, _P, _P, _P, _P, _P, _P, _N, _N, _I),
    "swiglu_forward": (_P, _P, _P, _N, _I),
    "swiglu_backward": (_P, _P, _P, _N, _I),
    "rope": (_P, _Strides, _P, _P, _P, _Strides, _N, _N, _N, _N, _F, _I),
    "attention_forward": (*(_P,) * 6, *(_N,) * 5, _F, _I),
    "attention_backward": (*(_P,) * 9, *(_N,) * 5, _F, _I),
    "decoder_layer_forward": (*(_P,) * 3, *(_F,) * 3, _I),
    "decoder_layer_backward": (*(_P,) * 3, _F, _I),
    "cross_entropy": (_P, _P, _P, _N, _N, _I),
    "sum_of_squares": (_P, _P, _N, _P, _P, _I),
    "adamw": (_P, _P, _P, _N, _I),
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
    sizes, counts, threads = _layer_sizes(x_BTD, weights, layout, head_dim)
    saved, out_BTD = x_BTD.new_empty(sum(counts)), torch.empty_like(x_BTD)
    given = [tensor.data_ptr() for tensor in (x_BTD, cos_BTD, sin_BTD, *_norms_first(weights))]
    pointers = (_P * 23)(*given, *_parts(saved, counts), out_BTD.data_ptr())
    load_library().decoder_layer_forward(pointers, sizes, layout.cu_seqlens.data_ptr(), *eps, scale, threads)
    return out_BTD, saved


def decoder_layer_backward(
    grad_BTD: Tensor, x_BTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, weights: Sequence[Tensor], saved: Tensor,
    layout: Layout, scale: float, head_dim: int,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The gradients of x and of the weights. `saved` is overwritten."""
    sizes, counts, threads = _layer_sizes(x_BTD, weights, layout, head_dim)
    grad_x, grad_weights = torch.empty_like(x_BTD), [torch.empty_like(weight) for weight in weights]
    given = [tensor.data_ptr() for tensor in (grad_BTD, x_BTD, cos_BTD, sin_BTD, *_norms_first(weights))]
    made = [tensor.data_ptr() for tensor in (grad_x, *_norms_first(grad_weights))]
    pointers = (_P * 33)(*given, *_parts(saved, counts), *made)
    load_library().decoder_layer_backward(pointers, sizes, layout.cu_seqlens.data_ptr(), scale, threads)
    return grad_x, grad_weights


def _norms_first(weights: Sequence[Tensor]) -> list[Tensor]:
    """As decoder_layer.c has them: both norms, then the matrices."""
    return [weights[0], weights[5], *weights[1:5], *weights[6:]]


def _layer_sizes(
    x_BTD: Tensor, weights: Sequence[Tensor], layout: Layout, head_dim: int
) -> tuple[Any, tuple[int, ...], int]:
    """The sizes, as decoder_layer.c has them; the floats of each tensor that it saves; and threads."""
    tokens, size, ffn = x_BTD.numel() // x_BTD.shape[-1], x_BTD.shape[-1], len(weights[6])
    queries, keys = len(weights[1]), len(weights[2])
    heads, kv_heads, documents = queries // head_dim, keys // head_dim, len(layout.cu_seqlens) - 1
    of_token = (1, queries, keys, keys, queries, heads, size, 1, ffn, ffn)
    sizes = (_N * 8)(tokens, size, heads, kv_heads, head_dim, ffn, documents, layout.max_seqlen)
    return sizes, tuple(tokens * count for count in of_token), threads_for(tokens * ffn)


def _parts(tensor: Tensor, counts: Sequence[int]) -> list[int]:
    """Where its parts begin: so many floats each."""
    first = tensor.data_ptr()
    return [first + 4 * before for before in accumulate(counts[:-1], initial=0)]


def cross_entropy_with_grad(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    """Each token's loss; the logits become their gradient. Labels below 0 are ignored."""
    losses_C = logits_CV.new_empty(len(labels_C))
    pointers = (logits_CV.data_ptr(), labels_C.data_ptr(), losses_C.data_ptr())
    load_library().cross_entropy(*pointers, *logits_CV.shape, threads_for(logits_CV.numel()))
    return losses_C


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """Of all values of these tensors, contiguous and in fp32."""
    sizes = [tensor.numel() for tensor in tensors]
    partial = torch.empty(sum(-(-size // _BLOCK) for size in sizes), dtype=torch.float64)
    result = ctypes.c_double()
    arrays = (_pointers(tensors), (_N * len(sizes))(*sizes), len(sizes), partial.data_ptr(), ctypes.byref(result))
    load_library().sum_of_squares(*arrays, threads_for(sum(sizes)))
    return result.value


def adamw_step(tensors: Sequence[Sequence[Tensor]], settings: Sequence[Sequence[float]]) -> None:
    """One step of AdamW in place. Of each parameter: weight, gradient, mean, mean square; and its 7 settings, as
    `adamw` of kernels.c has them."""
    sizes, numbers = [one[0].numel() for one in tensors], [number for one in settings for number in one]
    pointers = _pointers([tensor for one in tensors for tensor in one])
    arrays = (pointers, (_N * len(sizes))(*sizes), (_F * len(numbers))(*numbers), len(sizes))
    load_library().adamw(*arrays, threads_for(sum(sizes)))


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (_P * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
