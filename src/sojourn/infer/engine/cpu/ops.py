"""linear.c and attention.c as a backend: a row's result is the same, bit for bit, whatever else is in the batch.

Activations and the KV cache are fp32. Weights are fp32 too, or bf16 where that loses nothing (most published models
were saved in bf16), or int8 with a scale for each output.

Shapes: T tokens, S sequences, B blocks, I inputs, O outputs, P outputs in a panel (see linear.c).
"""

from __future__ import annotations

import ctypes
import math
import mmap
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sojourn.infer.engine.batch import StepBatch
from sojourn.infer.engine.block_pool import BLOCK
from sojourn.infer.engine.decoder import AttentionSpec
from sojourn.model.kernels.cpu.compile_c import compile_library, threads_for

MAX_HEAD_DIM = 512  # as in attention.c
_ALL = 1 << 62  # a window without end
_FP32, _BF16, _INT8 = range(3)  # as in tile.h and linear.c, and so are the next two lines
_STORE, _ADD = range(2)
_ACTIVATIONS = {"silu": 2, "gelu_tanh": 3}
_HUGE_PAGE = 1 << 21
_ARENA = 16 * _HUGE_PAGE
Cache = tuple[Tensor, Tensor]  # keys and values of a layer

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "panel_width": (_P,),
    "linear": (*(_P,) * 6, *(_N,) * 3, _F, _I, _I, _I),
    "rms_norm": (*(_P,) * 3, _N, _N, _F, _I),
    "gated_act": (_P, _P, _N, _N, _I, _I),
    "rope_store": (*(_P,) * 10, *(_N,) * 5, _F, _I),
    "attention": (*(_P,) * 7, *(_N,) * 6, _F, _I),
}


@dataclass(frozen=True)
class PackedWeight:
    """Panels (O/P, I, P), and the scales of int8 weights."""

    panels: Tensor
    scale_O: Tensor | None
    kind: int
    inputs: int
    outputs: int


@cache
def load_library() -> Any:
    """Raises OSError or subprocess.SubprocessError where it cannot be compiled or loaded."""
    return compile_library(Path(__file__).parent, _SIGNATURES)


class CpuOps:
    def __init__(self, quantization: Literal["int8"] | None = None) -> None:
        self.quantization = quantization
        self._library = load_library()
        width = ctypes.c_int64()
        self._library.panel_width(ctypes.addressof(width))
        self._panel = width.value
        self._arena = torch.empty(0, dtype=torch.uint8)

    def pack(self, weight_OI: Tensor) -> PackedWeight:
        outputs, inputs = weight_OI.shape
        scale_O = None
        if self.quantization == "int8":
            weight_OI = weight_OI.float()
            scale_O = weight_OI.abs().amax(1).div_(127).clamp_(min=1e-30)
            kind, weight_OI = _INT8, (weight_OI / scale_O[:, None]).round_().to(torch.int8)
        elif torch.equal(bf16 := weight_OI.to(torch.bfloat16), weight_OI):
            kind, weight_OI = _BF16, bf16.view(torch.int16)
        else:
            kind, weight_OI = _FP32, weight_OI.float()
        padded = F.pad(weight_OI, (0, 0, 0, -outputs % self._panel))
        panels = padded.unflatten(0, (-1, self._panel)).transpose(1, 2)
        if kind == _BF16:
            panels = panels.unflatten(2, (2, -1)).transpose(2, 3)
        return PackedWeight(self._allocate(panels).copy_(panels), scale_O, kind, inputs, outputs)

    def _allocate(self, like: Tensor) -> Tensor:
        """From an arena, which lives as long as any of its tensors."""
        size = -(-like.numel() * like.element_size() // 64) * 64
        if size > len(self._arena):
            self._arena = _huge_pages(max(size, _ARENA))
        taken, self._arena = self._arena[:size], self._arena[size:]
        return taken.view(like.dtype)[: like.numel()].view(like.shape)

    def linear(self, x_TI: Tensor, packed: PackedWeight, bias_O: Tensor | None = None) -> Tensor:
        return self._linear(torch.empty(len(x_TI), packed.outputs), x_TI, packed, bias_O)

    def linear_add_(self, sum_TO: Tensor, x_TI: Tensor, packed: PackedWeight, bias_O: Tensor | None = None) -> None:
        self._linear(sum_TO, x_TI, packed, bias_O, then=_ADD)

    def norm_linear(
        self, x_TD: Tensor, weight_D: Tensor, eps: float, packed: PackedWeight, bias_O: Tensor | None = None
    ) -> Tensor:
        return self._linear(torch.empty(len(x_TD), packed.outputs), x_TD, packed, bias_O, weight_D, eps)

    def norm_gated(self, x_TD: Tensor, weight_D: Tensor, eps: float, packed: PackedWeight, activation: str) -> Tensor:
        out = torch.empty(len(x_TD), packed.outputs // 2)
        return self._linear(out, x_TD, packed, None, weight_D, eps, _ACTIVATIONS[activation])

    def _linear(
        self, out: Tensor, x_TI: Tensor, packed: PackedWeight, bias_O: Tensor | None, norm_I: Tensor | None = None,
        eps: float = 0.0, then: int = _STORE,
    ) -> Tensor:  # fmt: skip
        rows, inputs = x_TI.shape
        if inputs != packed.inputs:
            raise ValueError(f"{inputs} inputs for a matrix of {packed.inputs}")
        self._library.linear(
            _pointer(x_TI), _pointer(norm_I), packed.panels.data_ptr(), _pointer(packed.scale_O), _pointer(bias_O),
            _pointer(out), rows, inputs, packed.outputs, eps, packed.kind, then, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        out_TD = torch.empty_like(x_TD)
        pointers = (_pointer(x_TD), _pointer(weight_D), out_TD.data_ptr())
        self._library.rms_norm(*pointers, *x_TD.shape, eps, threads_for(x_TD.numel()))
        return out_TD

    def gated_act(self, gate_up_TF: Tensor, activation: str) -> Tensor:
        rows, size = len(gate_up_TF), gate_up_TF.shape[1] // 2
        out, then = torch.empty(rows, size), _ACTIVATIONS[activation]
        self._library.gated_act(_pointer(gate_up_TF), out.data_ptr(), rows, size, then, threads_for(out.numel()))
        return out

    def new_cache(self, blocks: int, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> Cache:
        """Keys and values, in fp32."""
        if spec.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"heads of {spec.head_dim}; at most {MAX_HEAD_DIM}")
        padded = -(-spec.head_dim // self._panel) * self._panel
        shapes = ((blocks, spec.kv_heads, spec.head_dim, BLOCK), (blocks, spec.kv_heads, BLOCK, padded))
        keys, values = (_huge_pages(4 * math.prod(shape)).view(torch.float32).view(shape) for shape in shapes)
        return keys, values

    def rope_store(self, qkv_TE: Tensor, cache: Cache, batch: StepBatch, spec: AttentionSpec) -> Tensor:
        tokens = qkv_TE.shape[0]
        query_THD = torch.empty(tokens, spec.heads, spec.head_dim)
        self._library.rope_store(
            _pointer(qkv_TE), query_THD.data_ptr(), cache[0].data_ptr(), cache[1].data_ptr(),
            _pointer(batch.slots_T, torch.int32), _pointer(batch.positions_T, torch.int32),
            _pointer(spec.cos_PR), _pointer(spec.sin_PR), _pointer(spec.q_norm_D), _pointer(spec.k_norm_D),
            tokens, spec.heads, spec.kv_heads, spec.head_dim, spec.rotary_dim, spec.eps, threads_for(qkv_TE.numel()),
        )  # fmt: skip
        return query_THD

    def attention(self, query_THD: Tensor, cache: Cache, batch: StepBatch, spec: AttentionSpec) -> Tensor:
        out_TE = torch.empty(query_THD.shape[0], spec.heads * spec.head_dim)
        sequences, blocks = batch.block_table_SB.shape
        indices = (_pointer(x, torch.int32) for x in (batch.block_table_SB, batch.starts_S1, batch.context_S))
        self._library.attention(
            _pointer(query_THD), cache[0].data_ptr(), cache[1].data_ptr(), out_TE.data_ptr(), *indices,
            sequences, blocks, spec.heads, spec.kv_heads, spec.head_dim, spec.window or _ALL, spec.scale,
            torch.get_num_threads(),
        )  # fmt: skip
        return out_TE


def _huge_pages(size: int) -> Tensor:
    """Zeros, which the system gives when they are read or written: memory is read faster with fewer TLB misses."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE)
    with suppress(AttributeError, OSError):  # systems without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + size]


def _pointer(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    if tensor is None:
        return None
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        raise TypeError(f"a contiguous tensor of {dtype}, not {tensor.dtype} with strides {tensor.stride()}")
    pointer: int = tensor.data_ptr()
    return pointer
