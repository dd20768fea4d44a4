"""The experts of a mixture-of-experts layer with frozen weights: grouped GEMMs over tokens sorted by expert.

Weights are NF4 (dequantized for each grouped GEMM and discarded right after) or of any float dtype. The number of
tokens of each expert stays on the device. Routing weights are multiplied before the down projection instead of after
it: their gradient then needs no output of the down projection, and neither does anything else, so that activation
checkpointing does not recompute it.

Shapes: T tokens, k experts per token, S = T·k pairs of a token and an expert, sorted by expert, D hidden size, F width
of an expert, E experts, R rank of an adapter. An experts' weight is (E, out, in), or (E, in, out) if `transposed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sojourn.model.kernels.custom_op import custom_op, register_autograd
from sojourn.model.kernels.nf4 import dequantize, quantized_args
from sojourn.model.kernels.triton_support import compute_capability, fused, supports_triton

_GROUPED_MM = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ALIGNMENT = 8  # features: rows of 16 bytes in bf16


@dataclass(frozen=True)
class Route:
    """Which token each of the S rows is, and which row each of the T·k pairs has; `offsets_E`: the end of each
    expert's rows."""

    tokens_S: Tensor
    rows_S: Tensor
    experts_S: Tensor
    offsets_E: Tensor
    weights_S: Tensor


@dataclass(frozen=True)
class ExpertLora:
    """`a_ERI` and `b_EOR` (I inputs, O outputs), and the scaling."""

    a_ERI: Tensor
    b_EOR: Tensor
    scaling: float


def sort_by_expert(experts_Tk: Tensor, weights_Tk: Tensor, experts: int) -> Route:
    experts_S, pairs_S = torch.sort(experts_Tk.reshape(-1), stable=True)
    numbers_S = torch.arange(len(pairs_S), device=pairs_S.device, dtype=torch.int32)
    rows_S = torch.empty_like(numbers_S).scatter_(0, pairs_S, numbers_S)
    bounds_E = torch.arange(1, experts + 1, device=experts_S.device)
    offsets_E = torch.searchsorted(experts_S, bounds_E, out_int32=True)
    tokens_S = (pairs_S // experts_Tk.shape[1]).int()
    return Route(tokens_S, rows_S, experts_S, offsets_E, weights_Tk.reshape(-1)[pairs_S])


@custom_op("dispatch(Tensor x, Tensor tokens, Tensor rows) -> Tensor", lambda x, t, r: x.new_empty(len(t), x.shape[1]))
def dispatch(x_TD: Tensor, tokens_S: Tensor, rows_S: Tensor) -> Tensor:
    """Each token once per expert that it visits, sorted by expert."""
    return x_TD.index_select(0, tokens_S)


@custom_op(
    "combine(Tensor y, Tensor tokens, Tensor rows, int count) -> Tensor",
    lambda y, t, r, count: y.new_empty(count, y.shape[1]),
)
def combine(y_SD: Tensor, tokens_S: Tensor, rows_S: Tensor, count: int) -> Tensor:
    """The sum of each token's outputs, of `count` tokens; in the same order every time."""
    rows_Tk = rows_S.view(count, -1)
    if y_SD.is_cuda and supports_triton():
        from sojourn.model.kernels.gather_sum import gather_sum

        return gather_sum(y_SD, rows_Tk)
    return y_SD[rows_Tk].sum(1)


def _setup_dispatch(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])
    ctx.count = len(inputs[0])


def _setup_combine(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.route = inputs[1:3]  # see _setup_linear


register_autograd(
    "dispatch", _setup_dispatch, lambda ctx, grad_SD: (combine(grad_SD, *ctx.saved_tensors, ctx.count), None, None)
)
register_autograd("combine", _setup_combine, lambda ctx, grad_TD: (dispatch(grad_TD, *ctx.route), None, None, None))


def experts_linear(
    x_SI: Tensor, offsets_E: Tensor, weight: Tensor, transposed: bool, lora: ExpertLora | None = None
) -> Tensor:
    """Each expert's linear layer over its rows. `weight` is frozen: (E, out, in), or packed by bitsandbytes."""
    state = getattr(weight, "quant_state", None)
    shape = weight.shape if state is None else state.shape
    quantized = (None, None, 0, None, None, None, 0) if state is None else quantized_args(state)
    y_SO = _experts_linear(x_SI, offsets_E, weight, *quantized, *shape, transposed)
    if lora is None:
        return y_SO
    a_ERI, b_EOR = lora.a_ERI.to(x_SI.dtype), (lora.scaling * lora.b_EOR).to(x_SI.dtype)
    if x_SI.is_cuda and (more := -a_ERI.shape[1] % _ALIGNMENT):
        a_ERI, b_EOR = F.pad(a_ERI, (0, 0, 0, more)), F.pad(b_EOR, (0, more))
    low_SR = grouped_mm(x_SI, a_ERI.transpose(1, 2), offsets_E)
    return y_SO + grouped_mm(low_SR, b_EOR.transpose(1, 2), offsets_E)


def _empty_output(x_SI: Tensor, *args: Any) -> Tensor:
    rows, columns, transposed = args[-3:]
    return x_SI.new_empty(len(x_SI), columns if transposed else rows)


@custom_op(
    "experts_linear(Tensor x, Tensor offsets, Tensor weight, Tensor? absmax, Tensor? code, int block_size, "
    "Tensor? offset, Tensor? absmax2, Tensor? code2, int block_size2, int experts, int rows, int columns, "
    "bool transposed) -> Tensor",
    _empty_output,
)
def _experts_linear(
    x_SI: Tensor, offsets_E: Tensor, weight: Tensor, absmax: Tensor | None, code: Tensor | None, block_size: int,
    offset: Tensor | None, absmax2: Tensor | None, code2: Tensor | None, block_size2: int, experts: int, rows: int,
    columns: int, transposed: bool,
) -> Tensor:  # fmt: skip
    if absmax is None or code is None:
        weight = weight.to(x_SI.dtype)
    else:
        quantized = (weight, absmax, code, block_size, offset, absmax2, code2, block_size2)
        weight = dequantize(x_SI.dtype, *quantized, experts * rows, columns).view(experts, rows, columns)
    return grouped_mm(x_SI, weight if transposed else weight.transpose(1, 2), offsets_E)


def _setup_linear(ctx: Any, inputs: Any, output: Any) -> None:
    # Not by save_for_backward, although these are tensors: checkpointing would recompute this op to get them.
    ctx.args = inputs[1:]


def _linear_backward(ctx: Any, grad_SO: Tensor) -> Any:
    *args, transposed = ctx.args
    return _experts_linear(grad_SO.contiguous(), *args, not transposed), *(None for _ in ctx.args)


register_autograd("experts_linear", _setup_linear, _linear_backward)


def grouped_mm(x_SI: Tensor, weight_EIO: Tensor, offsets_E: Tensor) -> Tensor:
    """Each expert's rows times its matrix. Differentiable."""
    if _GROUPED_MM is not None and _supports_grouped_mm(x_SI, weight_EIO):
        return _GROUPED_MM(x_SI, weight_EIO, offs=offsets_E)
    if x_SI.is_cuda:
        _note_loop(str(x_SI.dtype).removeprefix("torch."))
    ends = offsets_E.tolist()
    rows = x_SI.split([end - start for start, end in zip([0, *ends], ends, strict=False)])
    return torch.cat([x @ weight for x, weight in zip(rows, weight_EIO, strict=True)])


def _supports_grouped_mm(x_SI: Tensor, weight_EIO: Tensor) -> bool:
    aligned = all(size % _ALIGNMENT == 0 for size in weight_EIO.shape[1:])
    return x_SI.is_cuda and x_SI.dtype == torch.bfloat16 and aligned and compute_capability() >= (8, 0)


@cache
def _note_loop(dtype: str) -> None:
    need = "bf16, sizes in multiples of 8 and a GPU of compute capability 8.0 or newer"
    print(f"note: experts compute one by one, in {dtype}: grouped GEMMs need {need}", flush=True)


def weighted_swiglu(gate_up_SF: Tensor, weights_S: Tensor) -> Tensor:
    """SwiGLU, times the routing weights; the gate's half first, then up's."""
    if gate_up_SF.is_cuda and supports_triton() and not torch.compiler.is_compiling():
        from sojourn.model.kernels import swiglu

        return swiglu.weighted_swiglu(gate_up_SF, weights_S)
    gate_SF, up_SF = gate_up_SF.float().chunk(2, -1)
    return (F.silu(gate_SF) * up_SF * weights_S[:, None].float()).to(gate_up_SF.dtype)


def weighted_clamped_swiglu(gate_up_SF: Tensor, weights_S: Tensor, alpha: float, limit: float) -> Tensor:
    """gpt-oss's: gate and up interleaved and clamped, with `up + 1`."""
    return fused(_weighted_clamped_swiglu, gate_up_SF)(gate_up_SF, weights_S, alpha, limit)


def _weighted_clamped_swiglu(gate_up_SF: Tensor, weights_S: Tensor, alpha: float, limit: float) -> Tensor:
    gate_SF, up_SF = gate_up_SF[:, ::2].float(), gate_up_SF[:, 1::2].float()
    gate_SF, up_SF = gate_SF.clamp(max=limit), up_SF.clamp(-limit, limit)
    return ((up_SF + 1) * gate_SF * torch.sigmoid(alpha * gate_SF) * weights_S[:, None].float()).to(gate_up_SF.dtype)
