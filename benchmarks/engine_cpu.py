"""The engine's CPU operations beside torch's, on the shapes of SmolLM2-135M.

    python -m benchmarks.engine_cpu [--rows 1,16] [--busy]

Every round measures ours and torch's in turn; the table has the fastest of all rounds. The matrices of a shape take
more memory together than caches hold, as in a model: each is read from memory. `--busy`: CPU time of one thread, for a
machine that others use too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from sojourn.infer.engine.block_pool import BLOCK
from sojourn.infer.engine.cpu.ops import CpuOps

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "LM head": (49152, 576)}
BYTES = 100e6  # of all copies of a matrix
clock = time.perf_counter


def fastest(functions: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Milliseconds."""
    best = dict.fromkeys(functions, float("inf"))
    for function in functions.values():
        function()
    end = clock() + seconds
    while clock() < end:
        for name, function in functions.items():
            start = clock()
            function()
            best[name] = min(best[name], 1e3 * (clock() - start))
    return best


def stream_read() -> float:
    """GB/s of a sum over more memory than caches hold."""
    x = torch.ones(100_000_000)
    return x.numel() * 4e-6 / fastest({"sum": x.sum}, 2.0)["sum"]


def _each(function: Callable[..., object], x: torch.Tensor, matrices: list[object]) -> None:
    for matrix in matrices:
        function(x, matrix)


def linears(rows_list: list[int], seconds: float) -> None:
    fp32, int8 = CpuOps(), CpuOps("int8")
    print(
        "| shape | rows | torch ms | fp32 ms | bf16 ms | int8 ms | torch/fp32 | fp32/int8 | fp32 GB/s | fp32 GFLOP/s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, (outputs, inputs) in SHAPES.items():
        copies = max(1, round(BYTES / (4 * outputs * inputs)))
        weights = [torch.randn(outputs, inputs) for _ in range(copies)]
        packed = {
            "fp32": [fp32.pack(w) for w in weights],
            "bf16": [fp32.pack(w.bfloat16()) for w in weights],
            "int8": [int8.pack(w) for w in weights],
        }
        for rows in rows_list:
            x = torch.randn(rows, inputs)
            functions = {"torch": partial(_each, F.linear, x, weights)}
            functions |= {kind: partial(_each, fp32.linear, x, matrices) for kind, matrices in packed.items()}
            ms = {kind: value / copies for kind, value in fastest(functions, seconds).items()}
            rates = (4e-6 * outputs * inputs / ms["fp32"], 2e-6 * rows * outputs * inputs / ms["fp32"])
            cells = [f"{value:.3f}" for value in ms.values()]
            cells += [f"{ms['torch'] / ms['fp32']:.2f}", f"{ms['fp32'] / ms['int8']:.2f}", *(f"{r:.1f}" for r in rates)]
            print(f"| {name} | {rows} | {' | '.join(cells)} |", flush=True)


def attention(seconds: float) -> None:
    ops = CpuOps()
    spec = SimpleNamespace(heads=9, kv_heads=3, head_dim=64, scale=0.125, window=None)
    print("\n| attention: sequences | queries | context | ours ms | torch SDPA ms | torch/ours |")
    print("|---|---|---|---|---|---|")
    for sequences, queries, context in ((1, 1, 512), (1, 1, 4096), (16, 1, 512), (1, 512, 512), (1, 256, 2048)):
        blocks = -(-context // BLOCK)
        cache = ops.new_cache(sequences * blocks, spec, torch.float32, torch.device("cpu"))
        for tensor in cache:
            tensor.normal_()
        batch = SimpleNamespace(
            starts_S1=torch.arange(0, sequences * queries + 1, queries, dtype=torch.int32),
            context_S=torch.full((sequences,), context, dtype=torch.int32),
            block_table_SB=torch.randperm(sequences * blocks).view(sequences, blocks).int(),
        )
        query = torch.randn(sequences * queries, 9, 64)
        key, value = (torch.randn(sequences, 9, context, 64) for _ in range(2))
        mask = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
        options = {"is_causal": True} if queries == context else {"attn_mask": mask}
        heads = query.view(sequences, queries, 9, 64).transpose(1, 2)
        ours = partial(ops.attention, query, cache, batch, spec)
        ms = fastest(
            {"ours": ours, "torch": partial(F.scaled_dot_product_attention, heads, key, value, **options)}, seconds
        )
        cells = (f"{ms['ours']:.3f}", f"{ms['torch']:.3f}", f"{ms['torch'] / ms['ours']:.2f}")
        print(f"| {sequences} | {queries} | {context} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,256,512")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row of a table")
    parser.add_argument("--busy", action="store_true", help="CPU time of one thread")
    args = parser.parse_args()
    if args.busy:
        global clock
        clock, args.threads = time.thread_time, 1
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{args.threads} threads, stream read {stream_read():.1f} GB/s, torch {torch.__version__}\n")
    linears([int(rows) for rows in args.rows.split(",")], args.seconds)
    attention(args.seconds)


if __name__ == "__main__":
    main()
