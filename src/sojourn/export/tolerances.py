"""How far an export may be from its source, by the precision of its weights.

Measured with SmolLM2-135M-Instruct, the smallest real model at hand: a larger one loses less to rounding. Each row says
what a healthy export of that precision showed (relative error of all logits, worst position, mean KL divergence,
largest gap), and the limits are two to four times that. `benchmarks/export_tolerances.py` measures it again.

The same model with faults, unrounded: q and k of one layer not permuted 0.050, 0.21, 0.024, 0.54; two norms swapped
0.034, 0.10, 0.010, 0.65; two matrices swapped at least 0.15, 0.37, 0.25, 2.0. In bf16 the logits show all of
these. Below, rounding moves the logits of such a model as far, and `weights_check.py` shows them: a tensor that belongs
elsewhere has an error of 1.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True)
class Tolerance:
    """`error`: relative error of all compared logits together. `worst`: at a single position. `kl`: mean KL divergence
    in nats. `gap`: in nats, how sure the source may have been where another token is the likeliest. `weights`: relative
    error of a tensor."""

    error: float
    worst: float
    kl: float
    gap: float
    weights: float


# fp32: 6e-8, 1e-7, 3e-14, 0 in transformers; 6e-6, 3e-5, 4e-9, 0 in vLLM. llama.cpp keeps its KV cache in fp16.
_FP32 = Tolerance(2e-3, 1e-2, 1e-4, 0.05, 1e-5)
# 0.0005, 0.0013, 2e-6, 0 in transformers; 0.0007, 0.0024, 5e-6, 0 in llama.cpp; 0.0007, 0.0021, 4e-6, 0 in onnxruntime
_FP16 = Tolerance(1e-2, 3e-2, 1e-3, 0.1, 2e-3)
# 0.0028, 0.0073, 7e-5, 0.03 in fp32; a program that rounds activations as well has about twice that
_BF16 = Tolerance(1e-2, 4e-2, 2e-3, 0.25, 4e-3)
# q8_0: 0.013, 0.034, 0.0016, 0.11 in fp32; 0.023, 0.065, 0.0045, 0.48 in llama.cpp, which rounds activations to int8;
# int8: 0.023, 0.062, 0.0049, 0.48, weights 0.0065 in onnxruntime
_8_BITS = Tolerance(0.07, 0.2, 0.014, 1.5, 0.015)
# q5_1: 0.14, 0.27, 0.16, 4.0, q5_0: 0.11, 0.27, 0.11, 3.6 in fp32, the embedding too. One position may lose its argmax,
# however sure it was.
_5_BITS = Tolerance(0.3, 0.6, 0.4, inf, 0.08)
# q4_0: 0.21, 0.64, 0.41, 36, weights 0.104 in llama.cpp; nf4: 0.21, 0.65, 0.49, 31, weights 0.102 in transformers.
# int4: 0.20, 0.50, 0.40, 26, weights 0.092 in onnxruntime; q4_k_m: 0.087, 0.20, 0.066, 2.8, weights 0.052 in llama.cpp.
# Not measured: other K-quants, q4 of MLX; of the 8-bit row, q8 of MLX. q4_1 only from a base that was in it.
_4_BITS = Tolerance(0.5, 1.1, 1.2, inf, 0.16)
# fp8-vllm: 0.074, 0.31, 0.061 in transformers, activations rounded too. q6_k and the rows below are not measured:
# between the rows above, and beyond them
_6_BITS = Tolerance(0.15, 0.4, 0.1, inf, 0.04)
_3_BITS = Tolerance(0.8, 1.5, 3.0, inf, 0.32)
_2_BITS = Tolerance(1.2, 2.0, 6.0, inf, 0.5)

_BY_QUANTIZATION = {
    "fp32": _FP32, "f32": _FP32, "fp16": _FP16, "f16": _FP16, "bf16": _BF16,
    "auto": _BF16,  # the source's own dtype; merged weights are rounded to it
    "q8_0": _8_BITS, "q8": _8_BITS, "int8": _8_BITS, "q6_k": _6_BITS, "fp8": _6_BITS, "int8-dynamic": _6_BITS,
    "fp8-vllm": _6_BITS, "q5_0": _5_BITS, "q5_1": _5_BITS, "q5_k_s": _5_BITS, "q5_k_m": _5_BITS, "q4_0": _4_BITS,
    "q4_1": _4_BITS, "q4_k_s": _4_BITS, "q4_k_m": _4_BITS, "q4": _4_BITS, "int4": _4_BITS, "nf4": _4_BITS,
    # GPTQ moves rounding errors to other columns, AWQ scales from one tensor to another.
    "gptq": replace(_4_BITS, weights=0.35), "awq": replace(_4_BITS, weights=inf),
    "q3_k_s": _3_BITS, "q3_k_m": _3_BITS, "q3_k_l": _3_BITS, "q2_k": _2_BITS,
}  # fmt: skip


def find_tolerance(quantization: str) -> Tolerance:
    """A quantization that has no row yet is held to the strictest lossy one: better refused than believed."""
    return _BY_QUANTIZATION.get(quantization, _8_BITS)
