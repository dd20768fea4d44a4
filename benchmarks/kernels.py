"""Measures single kernels, from which plans are estimated, and alternatives: `python benchmarks/kernels.py OUT`.

On one NVIDIA GPU, warm; medians of interleaved repeats, so that the power limit affects all alike.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROUNDS, SECONDS = 5, 0.02  # rounds of all contenders; seconds per contender and round
SHAPES = [  # tokens, inputs, outputs: 110M, 875M, 7B and 1.5B
    *((32768, k, n) for k, n in ((768, 768), (768, 2304), (768, 4096), (2048, 768))), (4096, 768, 32000),
    *((32768, k, n) for k, n in ((2048, 2048), (2048, 6144), (2048, 11008), (5504, 2048))),
    *((8192, k, n) for k, n in ((3584, 3584), (3584, 18944), (18944, 3584))), (4096, 1536, 8960), (16384, 1536, 17920),
]  # fmt: skip
HEADS = [(32, 1024, 12, 64), (16, 2048, 16, 128), (1, 8192, 28, 128)]


def main() -> None:
    found: dict[str, Any] = {
        "note": "Single kernels in bf16, warm, medians; what plans fit their curves to.",
        "device": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__}, "matmul": [], "matmul_fp8": [], "fp8_cast": [], "attention": [],
    }  # fmt: skip
    parts = {"matmul": matmul, "matmul_fp8": matmul_fp8, "fp8_cast": fp8_cast}
    for name, measure in parts.items():
        for m, k, n in SHAPES:
            found[name].append({"m": m, "k": k, "n": n, **measure(m, k, n)})
            print(name, found[name][-1], flush=True)
            Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
    for row in (*(attention(*shape) for shape in HEADS), varlen_attention(16, 512, 28, 128)):
        found["attention"].append(row)
        print("attention", row, flush=True)
    found["copy_gbs"] = copy()
    print("copy", found["copy_gbs"], flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


def timed(contenders: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of one call of each."""
    counts = {}
    for name, call in contenders.items():
        call()
        counts[name] = max(3, round(SECONDS * 1e3 / _milliseconds(call, 3)))
    turns = [{name: _milliseconds(call, counts[name]) for name, call in contenders.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(turn[name] for turn in turns) for name in contenders}


def _milliseconds(call: Callable[[], Any], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / times


def _randn(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def matmul(m: int, k: int, n: int) -> dict[str, float]:
    """Forward, gradient of the input, gradient of the weight; each by cuBLAS and cuBLASLt."""
    x, weight, grad = _randn(m, k), _randn(n, k), _randn(m, n)
    calls = {"": lambda: x @ weight.t(), "_input": lambda: grad @ weight, "_weight": lambda: grad.t() @ x}

    def by(library: str, call: Callable[[], Any]) -> Callable[[], Any]:
        def chosen() -> Any:
            torch.backends.cuda.preferred_blas_library(library)
            return call()

        return chosen

    all_of = {f"{name}{end}": by(library, call) for name, call in calls.items()
              for library, end in (("cublas", ""), ("cublaslt", "_lt"))}  # fmt: skip
    times = timed(all_of)
    torch.backends.cuda.preferred_blas_library("default")
    return {f"tflops{name}": round(2 * m * k * n / 1e9 / took) for name, took in times.items()}


def matmul_fp8(m: int, k: int, n: int) -> dict[str, float]:
    one = torch.ones((), device="cuda")
    x, weight = _randn(m, k).to(torch.float8_e4m3fn), _randn(n, k).to(torch.float8_e4m3fn)
    grad_t, x_t = _randn(n, m).to(torch.float8_e5m2), _randn(k, m).to(torch.float8_e4m3fn)

    def gemm(a: Any, b: Any, fast: bool) -> Callable[[], Any]:
        return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    times = timed({
        "": gemm(x, weight, True), "_exact": gemm(x, weight, False),
        "_weight": gemm(grad_t, x_t, True), "_weight_exact": gemm(grad_t, x_t, False),
    })  # fmt: skip
    return {f"tflops{name}": round(2 * m * k * n / 1e9 / took) for name, took in times.items()}


def fp8_cast(m: int, k: int, n: int) -> dict[str, float]:
    """GB/s of our cast-and-transpose kernel by tile size, for the layer's inputs."""
    from sojourn.model.kernels import fp8_cast as kernel

    x, one = _randn(m, k), torch.ones((), device="cuda")
    row_major, transposed = kernel._empty_both(x, one, torch.float8_e4m3fn)

    def tiled(rows: int, columns: int, warps: int) -> Callable[[], Any]:
        grid = (-(-m // rows), -(-k // columns))
        return lambda: kernel._kernel[grid](
            x,
            x.stride(0),
            one,
            row_major,
            transposed,
            m,
            k,
            FP8_MAX=448.0,
            WRITE_ROW_MAJOR=True,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=warps,
        )

    sizes = [(64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 4), (128, 128, 8), (64, 256, 8)]
    times = timed({f"{rows}x{columns}/{warps}": tiled(rows, columns, warps) for rows, columns, warps in sizes})
    return {name: round(4 * m * k / 1e6 / took) for name, took in times.items()}


def attention(rows: int, length: int, heads: int, head: int) -> dict[str, Any]:
    """Forward and backward."""
    q, k, v = (_randn(rows, heads, length, head).requires_grad_() for _ in range(3))
    grad = _randn(rows, heads, length, head)

    def by(kernel: SDPBackend) -> Callable[[], Any]:
        def both() -> Any:
            with sdpa_kernel(kernel):
                made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(made, (q, k, v), grad)

        return both

    kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    times = timed({name: by(kernel) for name, kernel in kernels.items()})
    facts = {"rows": rows, "length": length, "heads": heads, "head": head, "kernel": "cudnn"}
    found = {**facts, "ms": round(times["cudnn"], 3), "ms_flash": round(times["flash"], 3)}
    with flash_attention_4() as installed:
        return {**found, "ms_flash_4": round(timed({"it": by(kernels["flash"])})["it"], 3)} if installed else found


@contextmanager
def flash_attention_4() -> Iterator[bool]:
    """Replaces torch's flash attention by FlashAttention-4; yields whether it is installed."""
    try:
        torch.nn.attention.activate_flash_attention_impl("FA4")
    except (ImportError, AttributeError, RuntimeError):
        yield False
        return
    try:
        yield True
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def varlen_attention(rows: int, length: int, heads: int, head: int) -> dict[str, Any]:
    """Documents end to end, by torch's variable-length attention."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (_randn(rows * length, heads, head).requires_grad_() for _ in range(3))
    cu_seqlens, grad = torch.arange(0, rows * length + 1, length, device="cuda", dtype=torch.int32), _randn(*q.shape)

    def both() -> Any:
        made = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, length, length, window_size=(-1, 0))
        return torch.autograd.grad(made, (q, k, v), grad)

    facts = {"rows": rows, "length": length, "heads": heads, "head": head, "kernel": "varlen"}
    return {**facts, "ms": round(timed({"varlen": both})["varlen"], 3)}


def copy() -> int:
    source, target = (torch.empty(2**30, device="cuda", dtype=torch.int8) for _ in range(2))
    return round(2 * 2**30 / 1e6 / timed({"copy": lambda: target.copy_(source)})["copy"])


if __name__ == "__main__":
    main()
