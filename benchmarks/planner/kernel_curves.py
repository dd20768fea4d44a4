"""The text of estimate/fit.toml as single kernels on one GPU give it, with first figures for what they cannot tell.

Everything else in estimate/ is derived from the code that runs.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

from sojourn.catalog.gpus import find_gpu

_FP8 = ("tflops", "tflops", "tflops_weight")

# What no kernel tells. [traffic], [launch] and [update] begin here and end where whole steps have them.
_ASSUMED = """
[attention_kernels]
# FlashAttention 2 over cuDNN on Hopper (measured on an H200: 6.218 and 3.178 ms). Elsewhere: attention over matmuls,
# relative to Hopper, by compute capability from which on: memory-efficient kernels before 8.0 (assumed);
# FlashAttention 2 on an A100 (its paper: 187 TFLOP/s, causal, 16k tokens); GeForce and workstation cards (assumed)
flash = 0.511
by_capability = { "7.0" = 0.5, "8.0" = 0.78, "8.6" = 0.9, "10.0" = 0.8, "12.0" = 0.9 }
# tokens of the documents that `sojourn doctor --measure` measures attention with
measured_length = 4096

[memory]
# assumed: share of transient tensors lost between the allocator's segments (measured on an H200: mostly 0 to 12 %);
# MiB of a CUDA context by compute capability (measured: 426 of a bare one on an RTX 6000 Ada, 747 to 849 with the
# kernels of a run on an H200), of NCCL's buffers, and of CUDA graphs (measured: 67 to 99)
fragmentation = 0.04
nccl_mib = 400
cuda_graph_mib = 80
context_mib = { "6.0" = 500, "8.0" = 650, "9.0" = 768, "10.0" = 850 }

[traffic]
# share of the bandwidth that elementwise kernels and a copy reach (measured on an H200, of so many GB/s): kernels lose
# more of a faster memory
share = 0.80
copy = 0.89
measured_gbs = 4800
# bytes moved, over those of compiled layers: by eager fused forwards, and by transformers' own eager forwards
eager_fused = 1.7
eager_plain = 3.0

[small]
# least microseconds of a layer's small kernels: of one adapter, of NF4 weights (times `again` with activation
# checkpointing); of the gradients of query and key norms, eager
adapter_compiled_us = 12
adapter_eager_us = 23
quantised_compiled_us = 21
quantised_eager_us = 56
again = 1.3
norms_eager_us = 200

[launch]
# milliseconds of a CPU to launch a layer's forward and backward: compiled, with trained weights (`plain`: by
# transformers' own forwards) or frozen ones, per adapter, and for NF4 weights; eager, per adapter, for query and key
# norms (all three times `plain`), for trained biases, and for NF4 weights; outside of layers, once per micro batch. Of
# a CPU that takes `usual_us` microseconds for a small operation, forward and backward
usual_us = 30
compiled_ms = 2.2
compiled_plain_ms = 1.4
compiled_frozen_ms = 1.3
compiled_adapter_ms = 0.17
compiled_quantised_ms = 3
# what FP8 adds per matmul, solved from one run of 110M: 65.1 ms a step, in which the GPU is busy for 46.9 ms
fp8_ms = 0.5
eager_ms = 2.3
adapter_ms = 0.43
norm_ms = 0.5
bias_ms = 0.3
plain = 1.2
quantised_ms = 4
pass_ms = 3
# factors of activation checkpointing; eager selective checkpointing calls Python for every operation
selective_compiled = 1.2
selective_eager = 3.3
full_compiled = 1.4
full_eager = 2.1
# assumed, of one CUDA graph replay (measured: less than 2.8)
replay_ms = 1

[update]
# milliseconds of clipping and the optimizer step, and microseconds more per tensor: of AdamW; of bitsandbytes, which
# waits for the GPU after each tensor; of one operation of Muon
step_ms = 1.2
tensor_us = 30
synced_us = 130
operation_us = 16
# bandwidth of bitsandbytes' 8-bit update, over that of other elementwise kernels
share_8bit = 0.2
# assumed, of the training loop between steps (measured: 3.3 in a run of 2.7M parameters)
loop_ms = 3

[links]
# share of a link's bandwidth that collectives reach: of NVLink (published: 80 % by all-gather and reduce-scatter on 8
# H200, 78 % by all-reduce on 8 A100), of PCIe (assumed: without peer-to-peer copies), of a network (assumed)
nvlink = 0.80
pcie = 0.45
network = 0.80
# assumed: GB/s between rented machines: 25 Gbit/s
network_gbs = 3.125
# assumed: shares of the work beside them that collectives overlap with, and of a micro batch that is its backward
hidden = 0.9
backward = 0.6
# bytes of memory that move for each byte that is communicated, and so take time from other kernels: fitted to published
# runs (benchmarks/published.py --folds: 4.5 from one half of them, 6 from the other)
copies = 4.5
# measured: 18.5 GB of a checkpoint copied from an H200 to its host in 0.347 s, 85 % of the bus's bandwidth
host = 0.85

[spread]
# assumed: by how much steps may be shorter or longer, as a share of matmuls and elementwise kernels, by what is known
# of the card; of attention so many times as much; of kernel launches and communication that were not measured there;
# at most, where something is known
measured = 0.08
published = 0.18
"data sheet" = 0.30
attention = 2.0
launch = 0.35
communication = 0.5
widest = 0.35
# and of starting, downloads, compilation and saves
other = 0.4

[decode]
# of the builtin engine: share of the bandwidth at which a step reads bf16 and quantized weights and KV caches, and
# microseconds that each request adds (measured on an H200, 7B shape: 257 tok/s at one request, 6,672 at 32, 21,485 at
# 128; in FP8 385, 9,946, 19,808)
share = 0.76
quantized_share = 0.57
request_us = 16

[seconds]
# assumed: starting Python and CUDA, compiling the first layer's graphs, MB/s of downloads and of a usual disk
start = 30
compile = 60
download_mbs = 30
disk_mbs = 500
"""


def fitted(points: dict[str, Any]) -> str:
    """The file's text."""
    card = find_gpu(str(points["device"]))
    peak, matmul = 1e12 * float(card.bf16_tflops or 0), _matmul(points["matmul"], 1e12 * float(card.bf16_tflops or 0))
    attention = _attention(points["attention"], peak)
    lines = [
        "# Written by `python -m benchmarks.planner.fit`; change that, or the measurements, not this file.",
        f"# Measurements: {points['device']}, {points['date']}, torch {points['versions']['torch']}.",
        "",
        "[matmul]",
        "# time = slowness · FLOPs / the GPU's dense rate + start; never faster than memory bandwidth allows",
        *(f"{key} = {value:.6g}" for key, value in matmul.items()),
        f"fp8_slowness = {_fp8(points['matmul_fp8'], 1e12 * float(card.fp8_tflops or 0)):.6g}  # of FP8 matmuls",
        "",
        "[attention]",
        "# share of the dense rate = peak · context / (context + half), less for head sizes below 128, and less for",
        "# variable-length kernels; forward and backward together have 3.5 times the forward's FLOPs",
        *(f"{key} = {value:.6g}" for key, value in attention.items()),
    ]
    return "\n".join(lines) + "\n" + _ASSUMED


def _matmul(rows: list[dict[str, Any]], peak: float) -> dict[str, float]:
    """Least squares of relative errors: time / ideal = slowness + start / ideal."""
    a11 = a12 = a22 = b1 = b2 = 0.0
    for row, way in product(rows, ("tflops", "tflops_input", "tflops_weight")):
        ideal = 2.0 * row["m"] * row["k"] * row["n"] / peak
        real = peak / (1e12 * row[way])
        x1, x2 = 1 / real, 1e-6 / ideal / real
        a11, a12, a22 = a11 + x1 * x1, a12 + x1 * x2, a22 + x2 * x2
        b1, b2 = b1 + x1, b2 + x2
    det = a11 * a22 - a12 * a12
    return {"slowness": (b1 * a22 - b2 * a12) / det, "start": 1e-6 * (a11 * b2 - a12 * b1) / det}


def _fp8(rows: list[dict[str, Any]], peak: float) -> float:
    """Two of three multiplications of a layer are like the first; `start` counts beside it, but is small here."""
    return float(sum(peak / (1e12 * row[way]) for row, way in product(rows, _FP8)) / (len(rows) * len(_FP8)))


def _attention(rows: list[dict[str, Any]], peak: float) -> dict[str, float]:
    def share(row: dict[str, Any]) -> float:
        forward = 2.0 * row["rows"] * row["heads"] * row["length"] ** 2 * row["head"]
        return float(3.5 * forward / (1e-3 * row["ms"]) / peak)

    wide = sorted((r for r in rows if r["head"] == 128 and r["kernel"] == "cudnn"), key=lambda r: int(r["length"]))
    (near, far), (t1, t2) = (share(wide[0]), share(wide[-1])), (wide[0]["length"], wide[-1]["length"])
    half = (far - near) * t1 * t2 / (near * t2 - far * t1)
    most = near * (t1 + half) / t1

    def by_length(row: dict[str, Any]) -> float:
        return float(most * row["length"] / (row["length"] + half))

    narrow = next(r for r in rows if r["head"] == 64)
    ragged = next(r for r in rows if r["kernel"] == "varlen")
    return {
        "peak": most, "half": half, "varlen": share(ragged) / by_length(ragged),
        "narrow": math.log(share(narrow) / by_length(narrow)) / math.log(64 / 128),
    }  # fmt: skip
