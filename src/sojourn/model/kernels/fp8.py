"""Linear layers with FP8 matmuls and dynamic tensorwise scaling.

Each operand is divided by a scale, amax / (largest FP8 value), so that it fills the FP8 range. Activations and weights
are E4M3 (finer), gradients E5M2 (wider range). Products accumulate in fp32 and come out in bf16; master weights stay
fp32.

With `forward=False` only the two matmuls of the backward are in FP8. That is two thirds of the matmul time, and the
loss is computed in bf16: most of the error that FP8 adds to gradients comes through the forward.

FP8 GEMMs are fast enough that making their operands costs as much as they save. So operands take few passes over
memory:

* amax comes from the kernel that computes a tensor (SwiGLU, RoPE backward), or from a reduction that torch.compile
  fuses into it (RMSNorm), instead of another pass.
* One kernel writes an operand row-major and transposed (fp8_cast.py): the forward sums over features, the gradient of
  the weight over tokens. The transposed FP8 copy is saved for the backward instead of the bf16 operand.
* The SwiGLU backward writes FP8 directly, with an upper bound instead of the amax, which is not known yet.

Measured beside torchao's float8 (tensorwise) at 875M on an H200: 1.06 times as fast with the same matmuls in FP8, 1.12
times with the LM head, at 6.7 GiB more memory (benchmarks/float8_torchao.py, 2026-11-17).

Shapes: M tokens, K input features, N output features, F MLP width, P = width of q, k and v together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sojourn.model.kernels.triton_support import supports_triton

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16  # FP8 GEMMs need all dimensions to be multiples of it


class TritonKernels:
    """Enabled once the smoke test has passed; otherwise torch computes the same, slower."""

    enabled = False


def smoke_test(device: torch.device) -> None:
    """Enables our kernels where they compute what torch computes: FP8 is young on every GPU and in every compiler."""
    TritonKernels.enabled = False
    if device.type != "cuda" or not supports_triton():
        return
    x = torch.linspace(-3, 3, 96 * 160, device=device).view(160, 96).bfloat16()
    expected = _smoke_test_outputs(x)
    try:
        TritonKernels.enabled = True
        outputs, reason = _smoke_test_outputs(x), "wrong results"
        TritonKernels.enabled = all(_is_close(*pair) for pair in zip(outputs, expected, strict=True))
    except Exception as error:
        TritonKernels.enabled, reason = False, " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if not TritonKernels.enabled:
        print(
            f"note: train.fp8: our Triton kernels failed their smoke test ({reason}); using torch, slower", flush=True
        )


def _smoke_test_outputs(x: Tensor) -> list[Tensor]:
    amax = _amax(x)
    outputs = [y for dtype in (_E4M3, _E5M2) for y in _cast_and_transpose(x, _scale(amax, dtype), dtype)]
    outputs.append(_cast_transposed(x, _scale(amax, _E4M3), _E4M3))
    query, key, value = x.view(10, 16, 6, 16).split(2, 2)
    angles = x.view(10, 16, 96)[..., :16]
    _, rope_amax = _split_qkv_rope_backward(query, key, value, angles.cos(), angles.sin())
    swiglu_grads = _swiglu_backward(x[:, :48], x, _scale(10 * amax, _E5M2))
    return [y.float() for y in (*outputs, *_swiglu(x)[1:], *swiglu_grads, rope_amax)]


def _is_close(value: Tensor, expected: Tensor) -> bool:
    """Rounding of the last bit may differ now and then; in E5M2 that is up to a quarter of the value."""
    error = (value - expected).abs()
    rarely = (error > 0.01 * expected.abs()).float().mean() < 0.01
    return bool(rarely and (error <= 0.26 * expected.abs() + 0.01).all())


def supports_layer(layer: nn.Module) -> bool:
    return all(size % ALIGNMENT == 0 for size in layer.weight.shape)


def fp8_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, forward: bool = True) -> Tensor:
    """Like `F.linear`."""
    x_MK = x.flatten(0, -2)
    if x_MK.shape[0] % ALIGNMENT:  # only unpacked rows have such lengths
        return F.linear(x, weight_NK.to(x.dtype), bias_N)
    y = _Linear.apply(x_MK, weight_NK, forward).view(*x.shape[:-1], -1)
    return y if bias_N is None else y + bias_N


def fp8_backward_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """The forward in bf16, the backward in FP8."""
    return fp8_linear(x, weight_NK, bias_N, forward=False)


def swiglu_mlp(x: Tensor, gate_up_2FK: Tensor, down_KF: Tensor, forward: bool = True) -> Tensor | None:
    """An MLP with SwiGLU, without biases, all weights trained; None where the number of tokens is not aligned."""
    x_MK = x.flatten(0, -2)
    return None if x_MK.shape[0] % ALIGNMENT else _SwiGLUMLP.apply(x_MK, gate_up_2FK, down_KF, forward).view(x.shape)


def qkv_rope(
    x_BTK: Tensor, qkv_PK: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int], forward: bool = True
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Queries, keys and values by one matmul, with RoPE, all weights trained; None as above. `heads`: of queries, and
    of keys and values."""
    rows, width, _ = x_BTK.shape
    return None if rows * width % ALIGNMENT else _QKVRoPE.apply(x_BTK, qkv_PK, cos, sin, *heads, forward)


class _Operand(NamedTuple):
    """Of a forward matmul. `row_major` is None where the forward is in bf16; `transposed` is for the backward."""

    bf16: Tensor
    scale: Tensor
    row_major: Tensor | None
    transposed: Tensor


def _operand(tensor: Tensor, forward: bool, amax: Tensor | None = None) -> _Operand:
    scale = _scale(_amax(tensor) if amax is None else amax, _E4M3)
    if forward:
        return _Operand(tensor, scale, *_cast_and_transpose(tensor, scale, _E4M3))
    return _Operand(tensor, scale, None, _cast_transposed(tensor, scale, _E4M3))


def _matmul_t(a: _Operand, b: _Operand) -> Tensor:
    """a · bᵀ."""
    if a.row_major is None:
        return a.bf16 @ b.bf16.t()
    return _scaled_mm(a.row_major, a.scale, b.row_major, b.scale, a.bf16.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, forward: bool) -> Tensor:
        ctx.dtype = x_MK.dtype
        if ctx.needs_input_grad[1]:
            x, weight = _operand(x_MK, forward), _operand(weight_NK, forward)
            ctx.save_for_backward(x.transposed, x.scale, weight.transposed, weight.scale)
            return _matmul_t(x, weight)
        w_scale = _scale(_amax(weight_NK), _E4M3)
        ctx.save_for_backward(None, None, weight_NK, w_scale)  # frozen: cast again in the backward, not stored twice
        if not forward:
            return x_MK @ weight_NK.t()
        x_scale = _scale(_amax(x_MK), _E4M3)
        x8, w8 = _cast(x_MK, x_scale, _E4M3), _cast(weight_NK, w_scale, _E4M3)
        return _scaled_mm(x8, x_scale, w8, w_scale, ctx.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x8_KM, x_scale, weight, w_scale = ctx.saved_tensors
        grad_MN, dtype = grads[0], ctx.dtype
        scale = _scale(_amax(grad_MN), _E5M2)
        if not ctx.needs_input_grad[1]:
            w8_KN = _cast(weight, w_scale, _E4M3).t().contiguous()
            return _scaled_mm(_cast(grad_MN, scale, _E5M2), scale, w8_KN, w_scale, dtype), None, None
        g8_MN, g8_NM = _cast_and_transpose(grad_MN, scale, _E5M2)
        grad_weight = _scaled_mm(g8_NM, scale, x8_KM, x_scale, dtype)
        return _scaled_mm(g8_MN, scale, weight, w_scale, dtype), grad_weight, None


class _QKVRoPE(torch.autograd.Function):
    """One function, because the RoPE backward kernel knows the amax of the gradients that it writes."""

    @staticmethod
    def forward(
        ctx: Any, x_BTK: Tensor, qkv_PK: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, forward: bool
    ) -> Any:
        x, qkv = _operand(x_BTK.flatten(0, 1), forward), _operand(qkv_PK, forward)
        ctx.save_for_backward(x.transposed, x.scale, qkv.transposed, qkv.scale, cos, sin)
        return _split_qkv_rope(_matmul_t(x, qkv).view(*x_BTK.shape[:2], -1), cos, sin, heads, kv_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x8_KM, x_scale, w8_KP, w_scale, cos, sin = ctx.saved_tensors
        query, key, value = grads
        grad_BTP, amax = _split_qkv_rope_backward(query, key, value, cos, sin)
        dtype, scale = grad_BTP.dtype, _scale(amax, _E5M2)
        g8_MP, g8_PM = _cast_and_transpose(grad_BTP.flatten(0, 1), scale, _E5M2)
        grad_qkv = _scaled_mm(g8_PM, scale, x8_KM, x_scale, dtype)
        grad_x = _scaled_mm(g8_MP, scale, w8_KP, w_scale, dtype).view(*grad_BTP.shape[:2], -1)
        return grad_x, grad_qkv, None, None, None, None, None


class _SwiGLUMLP(torch.autograd.Function):
    """One function, because the SwiGLU kernels know the amax of what they write."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, gate_up_2FK: Tensor, down_KF: Tensor, forward: bool) -> Tensor:
        ctx.dtype = x_MK.dtype
        x, gate_up, down = (_operand(tensor, forward) for tensor in (x_MK, gate_up_2FK, down_KF))
        projected_M2F = _matmul_t(x, gate_up)
        hidden_MF, hidden_amax, projected_amax = _swiglu(projected_M2F)
        hidden = _operand(hidden_MF, forward, hidden_amax)
        operands = (x, gate_up, down, hidden)
        transposed, scales = zip(*((operand.transposed, operand.scale) for operand in operands), strict=True)
        ctx.save_for_backward(projected_M2F, projected_amax, *transposed, *scales)
        return _matmul_t(hidden, down)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        projected_M2F, projected_amax, *saved = ctx.saved_tensors
        x8_KM, w8_K2F, d8_FK, h8_FM, x_scale, w_scale, d_scale, h_scale = saved
        grad_MK, dtype = grads[0], ctx.dtype
        scale = _scale(_amax(grad_MK), _E5M2)
        g8_MK, g8_KM = _cast_and_transpose(grad_MK, scale, _E5M2)
        grad_down = _scaled_mm(g8_KM, scale, h8_FM, h_scale, dtype)
        grad_hidden_MF = _scaled_mm(g8_MK, scale, d8_FK, d_scale, dtype)
        down_amax = d_scale * torch.finfo(_E4M3).max
        scale = _scale(_swiglu_grad_bound(grad_MK, down_amax, projected_amax), _E5M2)
        g8_M2F, g8_2FM = _swiglu_backward(grad_hidden_MF, projected_M2F, scale)
        grad_gate_up = _scaled_mm(g8_2FM, scale, x8_KM, x_scale, dtype)
        return _scaled_mm(g8_M2F, scale, w8_K2F, w_scale, dtype), grad_gate_up, grad_down, None


class Fp8LMHead:
    """The LM head, for one chunk of tokens at a time. Shapes: C tokens of the chunk, V vocabulary size, D hidden
    size."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_scale = _scale(_amax(weight_VD), _E4M3)
        self.weight_VD, self.weight_DV = _cast_and_transpose(weight_VD, self.weight_scale, _E4M3)
        # The gradient of cross-entropy by a logit is a probability, or a probability minus 1: its amax is 1.
        self.grad_scale = torch.full((), 1 / torch.finfo(_E5M2).max, device=weight_VD.device)

    def logits(self, hidden_CD: Tensor) -> Tensor:
        self.hidden_scale = _scale(_amax(hidden_CD), _E4M3)
        hidden8_CD, self.hidden_DC = _cast_and_transpose(hidden_CD, self.hidden_scale, _E4M3)
        return _scaled_mm(hidden8_CD, self.hidden_scale, self.weight_VD, self.weight_scale, hidden_CD.dtype)

    def backward(self, grad_CV: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the last chunk's hidden states, and of the weight."""
        g8_CV, g8_VC = _cast_and_transpose(grad_CV, self.grad_scale, _E5M2)
        grad_hidden = _scaled_mm(g8_CV, self.grad_scale, self.weight_DV, self.weight_scale, grad_CV.dtype)
        return grad_hidden, _scaled_mm(g8_VC, self.grad_scale, self.hidden_DC, self.hidden_scale, grad_CV.dtype)


def _swiglu(gate_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) · up, its amax, and the amax of `gate_up`."""
    if TritonKernels.enabled:
        from sojourn.model.kernels.swiglu import swiglu_amax

        out, amax = swiglu_amax(gate_up)
        return out, *amax.flatten(1).amax(1).unbind()
    gate, up = gate_up.float().chunk(2, -1)
    out = (F.silu(gate) * up).to(gate_up.dtype)
    return out, _amax(out), _amax(gate_up)


def _swiglu_grad_bound(grad_MK: Tensor, down_amax: Tensor, gate_up_amax: Tensor) -> Tensor:
    """An upper bound of the amax of the SwiGLU gradient: the largest row sum of |grad| · |down| · |gate_up|, times the
    slope of silu (1.1 at most), with a margin for rounding. It is often hundreds of times too large, which E5M2 with
    its range of nine decades tolerates."""
    return 1.5 * grad_MK.abs().sum(-1, dtype=torch.float32).amax() * down_amax * gate_up_amax


def _swiglu_backward(grad: Tensor, gate_up: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `gate_up` in E5M2, row-major and transposed."""
    if TritonKernels.enabled:
        from sojourn.model.kernels.swiglu import swiglu_backward_fp8

        row_major, transposed = swiglu_backward_fp8(grad, gate_up, scale)
        return row_major, transposed
    gate, up = gate_up.float().chunk(2, -1)
    sigmoid, upstream = gate.sigmoid(), grad.float()
    grad_gate = upstream * up * sigmoid * (1 + gate * (1 - sigmoid))
    return _cast_and_transpose(torch.cat((grad_gate, upstream * gate * sigmoid), -1), scale, _E5M2)


def _split_qkv_rope(
    qkv_BTP: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    if TritonKernels.enabled:
        from sojourn.model.kernels.rope import split_qkv_rope

        query, key, value = split_qkv_rope(qkv_BTP, cos, sin, heads, kv_heads)
        return query, key, value
    query, key, value = qkv_BTP.unflatten(-1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], 2)
    return _rotate(query, cos, sin), _rotate(key, cos, sin), value.clone()


def _split_qkv_rope_backward(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of q, k and v side by side before RoPE, and its amax."""
    if TritonKernels.enabled:
        from sojourn.model.kernels.rope import split_qkv_rope_backward_amax

        grad, amax = split_qkv_rope_backward_amax(query, key, value, cos, sin)
        return grad, amax.amax()
    grad = torch.cat((_rotate(query, cos, -sin), _rotate(key, cos, -sin), value), 2).flatten(2)
    return grad, _amax(grad)


def _rotate(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    first, second = x_BTHD.float().chunk(2, -1)
    rotated_half = torch.cat((-second, first), -1)
    return (x_BTHD * cos_BTD[:, :, None] + rotated_half * sin_BTD[:, :, None]).to(x_BTHD.dtype)


def _amax(tensor: Tensor) -> Tensor:
    """Row by row first: torch.compile fuses that into the kernel that makes the rows."""
    return tensor.abs().amax(-1).amax()


def _scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """What the FP8 tensor is multiplied with to dequantize it."""
    return amax.float().clamp(min=1e-12) / torch.finfo(dtype).max


def _cast(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    fp8_max = torch.finfo(dtype).max
    return (tensor.float() * (1.0 / scale)).clamp(-fp8_max, fp8_max).to(dtype)


def _cast_and_transpose(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Row-major and transposed."""
    if TritonKernels.enabled:
        from sojourn.model.kernels.fp8_cast import cast_and_transpose

        row_major, transposed = cast_and_transpose(tensor, scale, dtype)
        return row_major, transposed
    row_major = _cast(tensor, scale, dtype)
    return row_major, row_major.t().contiguous()


def _cast_transposed(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if TritonKernels.enabled:
        from sojourn.model.kernels.fp8_cast import cast_transposed

        return cast_transposed(tensor, scale, dtype)
    return _cast(tensor, scale, dtype).t().contiguous()


def _scaled_mm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a · bᵀ, both contiguous along the summed dimension. Accumulates in fp32: `use_fast_accum` gains little."""
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=False)
