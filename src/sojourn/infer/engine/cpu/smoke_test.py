"""Compiles the CPU backend and compares it with torch before it is used."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sojourn.infer.engine.cpu.ops import BLOCK, CpuOps

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
    x_TI, weight_OI, bias_O = torch.randn(29, 100), torch.randn(77, 100), torch.randn(77)
    bf16 = weight_OI.bfloat16().float()
    pairs = [
        (weight_OI, CpuOps(), _MAX_ERROR),
        (bf16, CpuOps(), _MAX_ERROR),
        (weight_OI, CpuOps("int8"), _MAX_ERROR_INT8),
    ]
    return all(
        _is_close(own.linear(x_TI, own.pack(weight), bias_O), F.linear(x_TI, weight, bias_O), error)
        for weight, own, error in pairs
    )


def _elementwise(ops: CpuOps) -> bool:
    x_TD, weight_D = 5 * torch.randn(3, 74), torch.randn(74)
    gate, up = x_TD.chunk(2, -1)
    return (
        _is_close(ops.rms_norm(x_TD, weight_D, 1e-5), F.rms_norm(x_TD, (74,), weight_D, 1e-5))
        and _is_close(ops.gated_act(x_TD, "silu"), F.silu(gate) * up)
        and _is_close(ops.gated_act(x_TD, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up)
    )


def _attention(ops: CpuOps) -> bool:
    """One sequence of 300 tokens, its blocks in reverse order."""
    tokens, half = 300, 12
    angles = torch.randn(tokens, half)
    spec = SimpleNamespace(
        heads=4, kv_heads=2, head_dim=40, scale=0.2, window=None, rotary_dim=2 * half, cos_PR=angles.cos(),
        sin_PR=angles.sin(), q_norm_D=None, k_norm_D=None, eps=0.0,
    )  # fmt: skip
    blocks, positions = -(-tokens // BLOCK), torch.arange(tokens, dtype=torch.int32)
    batch = SimpleNamespace(
        positions_T=positions,
        slots_T=(blocks - 1 - positions // BLOCK) * BLOCK + positions % BLOCK,
        starts_S1=torch.tensor([0, tokens], dtype=torch.int32),
        context_S=torch.tensor([tokens], dtype=torch.int32),
        block_table_SB=torch.arange(blocks - 1, -1, -1, dtype=torch.int32)[None],
    )
    qkv_TE, cache = torch.randn(tokens, 8 * 40), ops.new_cache(blocks, spec, torch.float32, torch.device("cpu"))
    found = ops.attention(ops.rope_store(qkv_TE, cache, batch, spec), cache, batch, spec)
    query, key, value = qkv_TE.view(tokens, 8, 40).transpose(0, 1).split((4, 2, 2))
    cos, sin = angles.cos(), angles.sin()
    query, key = (
        torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1)
        for x in (query, key)
        for a, b in [(x[..., :half], x[..., half : 2 * half])]
    )
    key, value = key.repeat_interleave(2, 0), value.repeat_interleave(2, 0)
    expected = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, scale=0.2)
    return _is_close(found, expected[0].transpose(0, 1).flatten(1))
