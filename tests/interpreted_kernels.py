"""The engine's Triton kernels in Triton's interpreter, on a CPU: a program that tests/test_engine_cuda.py runs, with
TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from triton.runtime import interpreter

from sojourn.infer.engine.batch import StepBatch
from sojourn.infer.engine.cuda import kernels
from sojourn.infer.engine.cuda.ops import CudaOps
from sojourn.infer.engine.decoder import AttentionSpec
from sojourn.infer.engine.ops_torch import TorchOps
from sojourn.infer.sampling import Sampler, SamplingParams, SamplingRow
from sojourn.infer.top_tokens import keep_top
from sojourn.model.kernels import quantized_linear


def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    assert error < 1e-5, f"{name}: relative error {error}"


def quantized_weights() -> None:
    errors = {"fp8": 0.03, "int8": 0.01, "nf4": 0.1}
    for kind, (tokens, outputs, inputs, tiling) in (
        (kind, case)
        for kind in errors
        for case in ((1, 70, 320, None), (3, 128, 256, quantized_linear.Tiling(16, 2, 2, 1, 3)))
    ):
        weight, x, bias = torch.randn(outputs, inputs), torch.randn(tokens, inputs), torch.randn(outputs)
        packed = quantized_linear.quantize(weight, kind)
        plain = quantized_linear.dequantize(packed, torch.float32)
        assert float((plain - weight).norm() / weight.norm()) < errors[kind], kind
        added = torch.randn(tokens, outputs)
        expected = F.linear(x, plain, bias) + added
        check(kind, quantized_linear.linear(x, packed, bias, added, tiling), expected)
        assert not quantized_linear._counters(x.device).any(), "a program has left its counter"
        again = quantized_linear.quantize(plain, kind)
        assert kind == "fp8" or torch.equal(again.chunks, packed.chunks), f"{kind}: quantizing twice"


def bitsandbytes_weights() -> None:
    from bitsandbytes.nn import Linear4bit

    from sojourn.infer.runtimes.quantized_weights import dequantize_4bit

    layer = Linear4bit(128, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=True)
    layer.load_state_dict({"weight": torch.randn(64, 128)})
    theirs = dequantize_4bit(layer.to("cpu").weight)
    ours = quantized_linear.dequantize(quantized_linear.quantize(theirs, "nf4"), torch.float32)
    assert float((ours - theirs).norm() / theirs.norm()) < 3e-3  # bf16 codes, fp16 scales


def expert_weights() -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    from sojourn.model.kernels.gather_sum import gather_sum
    from sojourn.model.kernels.nf4 import dequantize, quantized_args
    from sojourn.model.kernels.nf4_dequant import dequantize_nf4
    from sojourn.model.mxfp4 import mxfp4_parameter

    for shape in ((192, 128), (5, 448), (96, 72), (100, 65)):
        for double_quant in (True, False):
            packed, state = quantize_4bit(torch.randn(shape), compress_statistics=double_quant, quant_type="nf4")
            ours = dequantize_nf4(torch.float32, packed, *quantized_args(state), *shape)
            check(f"NF4 of {shape}", ours, dequantize_4bit(packed, state))
    blocks, scales = torch.randint(0, 256, (3, 8, 5, 16)).byte(), torch.randint(118, 123, (3, 8, 5)).byte()
    stored = mxfp4_parameter(blocks, scales, torch.float32)
    args = (torch.float32, stored.data, *quantized_args(stored.quant_state), 24, 160)
    check("MXFP4", dequantize_nf4(*args), dequantize(*args))
    rows, of_tokens = torch.randn(60, 1100), torch.randint(0, 60, (20, 3))
    check("sum of rows", gather_sum(rows, of_tokens), rows[of_tokens].sum(1))


def rope_of_separate_heads() -> None:
    from sojourn.model.kernels.qkv_rope import apply_rope
    from sojourn.model.kernels.rope import rope

    for heads, kv_heads, size in ((6, 2, 16), (3, 3, 24)):
        query = torch.randn(2, heads, 7, size).transpose(1, 2).requires_grad_()  # its heads lie apart
        key = torch.randn(2, 7, kv_heads, size).requires_grad_()
        angles = torch.rand(2, 7, size // 2).repeat(1, 1, 2)
        cos_sin = angles.cos(), angles.sin()
        found, expected = rope(query, key, *cos_sin, 1), apply_rope(query, key, *cos_sin)
        upstream = [torch.randn(2, 7, size, n).transpose(2, 3) for n in (heads, kv_heads)]
        gradients = (torch.autograd.grad(made, (query, key), upstream) for made in (found, expected))
        for ours, theirs in zip((*found, *next(gradients)), (*expected, *next(gradients)), strict=True):
            check(f"RoPE, heads of {size}", ours, theirs)


def weighted_swiglu() -> None:
    from sojourn.model.kernels.experts import weighted_swiglu as by_torch
    from sojourn.model.kernels.swiglu import weighted_swiglu as by_triton

    for width in (24, 1500):  # the second needs two blocks
        inputs = [torch.randn(9, 2 * width).requires_grad_(), torch.rand(9).requires_grad_()]
        upstream = torch.randn(9, width)
        outputs = [function(*inputs) for function in (by_triton, by_torch)]
        gradients = [torch.autograd.grad(made, inputs, upstream) for made in outputs]
        ours, theirs = ((output, *found) for output, found in zip(outputs, gradients, strict=True))
        for name, one, other in zip(("output", "gate and up", "weights"), ours, theirs, strict=True):
            check(f"weighted SwiGLU, {name}", one, other)


def step() -> None:
    """Two sequences of one token, over blocks; a window; norms of queries and keys; half of a head is rotated."""
    cos, sin = torch.randn(64, 4), torch.randn(64, 4)
    spec = AttentionSpec(4, 2, 16, 0.3, 20, 8, cos, sin, torch.rand(16), torch.rand(16), 1e-5)
    batch = StepBatch(
        torch.zeros(2, dtype=torch.int32), torch.tensor([40, 3]), torch.tensor([3 * 16 + 8, 4 * 16 + 3]),
        torch.tensor([0, 1, 2]), torch.tensor([41, 4]), torch.tensor([[1, 2, 3], [4, 0, 0]], dtype=torch.int32),
        torch.tensor([0, 1]), None, None, 2, 1, 41,
    )  # fmt: skip
    ours, theirs = CudaOps(), TorchOps()
    caches = [torch.randn(2, 5 * 16, 2, 16)]
    caches.append(caches[0].clone())
    qkv = torch.randn(2, 8 * 16)
    queries = [ops.rope_store(qkv, cache, batch, spec) for ops, cache in zip((ours, theirs), caches, strict=True)]
    check("query", *queries)
    check("cache", *caches)
    pairs = zip((ours, theirs), queries, caches, strict=True)
    check("attention", *(ops.attention(query, cache, batch, spec) for ops, query, cache in pairs))
    x, weight, norm = torch.randn(1, 96), torch.randn(80, 96), torch.rand(96)
    check("norm", kernels.rms_norm(x, norm, 1e-5), theirs.rms_norm(x, norm, 1e-5))
    for activation in ("silu", "gelu_tanh"):
        check(activation, kernels.gated_act(x, activation), theirs.gated_act(x, activation))
        gated = theirs.gated_act(F.linear(x, weight), activation)
        check("matvec", kernels.matvec(x, weight, activation=activation), gated)
    added = torch.randn(1, 80)
    check("matvec", kernels.matvec(x, weight, torch.ones(80), added.clone()), F.linear(x, weight) + 1 + added)


def top_tokens() -> None:
    for limits in ({"top_p": 0.9}, {"top_k": 7}, {"top_k": 20, "top_p": 0.5}):
        others = [SamplingParams(temperature=1.0, **one) for one in (limits, {"top_p": 0.3}, {})]
        sampler = Sampler([SamplingRow(params, [], 0) for params in others], 300, "cpu")
        probs = (2 * torch.randn(3, 300)).softmax(-1)
        kept, ids = sampler._most_likely(probs)
        expected = torch.zeros_like(probs).scatter_(1, ids, kept) > 0
        found = keep_top(probs, sampler._top_k if sampler._limits_k else None, sampler._top_p)
        assert torch.equal(found > 0, expected), limits
        assert torch.equal(found[expected], probs[expected])


def accept_new_numpy() -> None:
    """Before Triton 3.8 the interpreter converts arrays of one element to int, which numpy refuses since 2.4."""
    patch = interpreter._patch_lang_tensor

    def patch_index(tensor: object, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_index


if __name__ == "__main__":
    torch.manual_seed(0)
    accept_new_numpy()
    for part in (
        quantized_weights,
        bitsandbytes_weights,
        expert_weights,
        rope_of_separate_heads,
        weighted_swiglu,
        step,
        top_tokens,
    ):
        part()
        print(part.__name__)
