"""Compiles the CPU backend and compares it with torch before it is used."""

from __future__ import annotations

import subprocess
import sys
from typing import Literal

import torch
from torch import Tensor

from sojourn.infer.engine.batch import build_arrays, to_device
from sojourn.infer.engine.block_pool import BLOCK
from sojourn.infer.engine.cpu.ops import CpuOps
from sojourn.infer.engine.decoder import AttentionSpec
from sojourn.infer.engine.ops_torch import TorchOps
from sojourn.infer.engine.request import Request
from sojourn.infer.engine.scheduler import Part
from sojourn.infer.sampling import SamplingParams

_MAX_ERROR = 1e-5  # relative
_MAX_ERROR_INT8 = 0.02


def open_cpu_ops(quantization: Literal["int8"] | None = None) -> CpuOps | None:
    """None, with a note, where it cannot be compiled or computes something else than torch."""
    try:
        ops = CpuOps(quantization)
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            wrong = next((check.__name__ for check in (_linear, _elementwise, _attention) if not check(ops)), None)
    except (OSError, subprocess.SubprocessError) as error:
        wrong = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if wrong is None:
        return ops
    print(
        f"note: the engine's CPU kernels failed their smoke test ({wrong.strip('_')}); using torch's, slower, "
        "and results may depend on the batch in the last bit",
        file=sys.stderr,
        flush=True,
    )
    return None


def _is_close(found: Tensor, expected: Tensor, error: float = _MAX_ERROR) -> bool:
    return bool(torch.linalg.vector_norm(found - expected) < error * torch.linalg.vector_norm(expected))


def _linear(ops: CpuOps) -> bool:
    """Of the weights that `ops` packs, and of bf16 ones."""
    x_TI, weight_OI, bias_O = torch.randn(29, 100), torch.randn(77, 100), torch.randn(77)
    error = _MAX_ERROR_INT8 if ops.quantization == "int8" else _MAX_ERROR
    return all(
        _is_close(ops.linear(x_TI, ops.pack(weight), bias_O), TorchOps().linear(x_TI, weight, bias_O), error)
        for weight in (weight_OI, weight_OI.bfloat16().float())
    )


def _elementwise(ops: CpuOps) -> bool:
    x_TD, weight_D, reference = 5 * torch.randn(3, 74), torch.randn(74), TorchOps()
    return _is_close(ops.rms_norm(x_TD, weight_D, 1e-5), reference.rms_norm(x_TD, weight_D, 1e-5)) and all(
        _is_close(ops.gated_act(x_TD, act), reference.gated_act(x_TD, act)) for act in ("silu", "gelu_tanh")
    )


def _attention(ops: CpuOps) -> bool:
    """One sequence of 300 tokens, its blocks in reverse order."""
    tokens, angles, norm_D = 300, torch.randn(300, 12), torch.randn(40)
    spec = AttentionSpec(4, 2, 40, 0.2, 270, 24, angles.cos(), angles.sin(), norm_D, norm_D, 1e-6)
    request, cpu = Request("", [0] * tokens, SamplingParams(), 0, 1), torch.device("cpu")
    request.blocks = list(range(-(-tokens // BLOCK), 0, -1))
    batch = to_device(build_arrays([Part(request, 0, tokens, False)], {}), cpu)
    qkv_TE, found = torch.randn(tokens, 8 * 40), []
    for own in (ops, TorchOps()):
        cache = own.new_cache(1 + len(request.blocks), spec, torch.float32, cpu)
        found.append(own.attention(own.rope_store(qkv_TE, cache, batch, spec), cache, batch, spec))
    return _is_close(*found)
