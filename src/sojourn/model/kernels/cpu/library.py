"""The functions of kernels.c and attention.c, called with tensors.

Modules with the attribute `cpu_kernels` use them (smoke_test.py sets it).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sojourn.model.kernels.cpu.compile_c import compile_library, threads_for
from sojourn.model.layout import Layout

ROWS_PER_SUM, _BLOCK = 32, 1024  # as in kernels.c
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
