"""What a GPU sustains, in FLOP/s and bytes per second: matmuls, attention, memory, links between GPUs.

The curves of fit.toml were measured on one H200. Another card has its own sustained figures in the catalogue
(`Gpu.matmul_tflops`, …); where nobody has published any, the H200's share of the data sheet is assumed.
"""

from __future__ import annotations

import math

from sojourn.catalog.gpus import Gpu
from sojourn.estimate.constants import constants
from sojourn.estimate.workload import Workload

_TENSOR_CORES = (7, 0)  # older ones have none


def has_rate(gpu: Gpu) -> bool:
    """Some vendors publish no FLOP/s; then the time of a run cannot be estimated."""
    return any((gpu.bf16_tflops, gpu.fp16_tflops, gpu.fp32_tflops, gpu.matmul_tflops))


def matmul_rate(precision: str, gpu: Gpu) -> float:
    """FLOP/s that large matmuls sustain in a compute dtype."""
    dense, half = _dense(precision, gpu), _dense("bf16", gpu)
    if gpu.matmul_tflops is None:
        return dense / float(constants()["matmul"]["slowness"])
    return 1e12 * gpu.matmul_tflops * dense / half


def fp8_rate(gpu: Gpu) -> float:
    """FLOP/s that FP8 matmuls sustain: as much more than in bf16 as on the card that was measured."""
    curve = constants()["matmul"]
    gain = float(curve["slowness"]) / float(curve["fp8_slowness"])
    return gain * matmul_rate("bf16", gpu) * (gpu.fp8_tflops or 0.0) / (gpu.bf16_tflops or 1.0)


def _dense(precision: str, gpu: Gpu) -> float:
    """FLOP/s of the data sheet."""
    known = {"bf16": gpu.bf16_tflops, "fp16": gpu.fp16_tflops, "fp32": gpu.tf32_tflops or gpu.fp32_tflops}
    tflops = known[precision] or gpu.fp16_tflops or gpu.fp32_tflops or gpu.matmul_tflops or 5.0
    if gpu.capability is not None and gpu.capability < _TENSOR_CORES:
        tflops = gpu.fp32_tflops or tflops
    return 1e12 * tflops


def attention_rate(workload: Workload, gpu: Gpu, seen: float) -> float:
    """FLOP/s of attention over documents of `seen` tokens, forward and backward together."""
    curve = constants()["attention"]
    narrow = (min(128, workload.model.head_dim) / 128) ** curve["narrow"]
    return float(_attention_peak(workload, gpu) * seen / (seen + curve["half"]) * narrow)


def _attention_peak(workload: Workload, gpu: Gpu) -> float:
    """Of endless documents and heads of 128. The curve is of cuDNN's kernels on Hopper, over its matmuls; `flash` was
    measured with the flash-attn package."""
    curve, kernels = constants()["attention"], constants()["attention_kernels"]
    packed = workload.is_packed and workload.attention_backend.varlen
    if gpu.capability is not None and gpu.capability[0] == 9:
        share = curve["varlen"] if packed else kernels["flash"] if workload.attention == "flash_attention_2" else 1.0
        other = 1.0
    else:  # the same FlashAttention 2 for all rows
        share, other = curve["varlen"] / kernels["flash"] if packed else 1.0, _kernels_of(gpu)
    if gpu.attention_tflops is not None and workload.precision != "fp32":
        length = kernels["measured_length"]
        return float(share * 1e12 * gpu.attention_tflops * (length + curve["half"]) / length)
    best = curve["peak"] * float(constants()["matmul"]["slowness"]) * matmul_rate(workload.precision, gpu)
    return float(best * share * other)


def _kernels_of(gpu: Gpu) -> float:
    """Attention over matmuls on an architecture, relative to Hopper."""
    shares, capability = constants()["attention_kernels"]["by_capability"], gpu.capability or (0, 0)
    older = [float(name) for name in shares if float(name) <= capability[0] + capability[1] / 10]
    return float(shares[f"{max(older):.1f}"]) if older else 1.0


def memory_rate(gpu: Gpu) -> float:
    """Bytes per second of elementwise kernels."""
    traffic = constants()["traffic"]
    if gpu.copy_gbs is not None:
        return 1e9 * gpu.copy_gbs * float(traffic["share"]) / float(traffic["copy"])
    lost = (traffic["copy"] - traffic["share"]) * gpu.bandwidth_gbs / traffic["measured_gbs"]
    return float(max(0.5, traffic["copy"] - lost)) * 1e9 * gpu.bandwidth_gbs


def link_rate(workload: Workload, gpu: Gpu) -> float:
    """Bytes per second that collectives reach, in one direction; a ring is as fast as its slowest link."""
    links, pcie = constants()["links"], float(constants()["links"]["pcie"]) * (gpu.pcie_gbs or 8.0)
    if workload.nodes > 1:
        network = workload.network_gbs or float(links["network_gbs"])
        return 1e9 * min(float(links["network"]) * network, _within(workload, gpu, pcie))
    return 1e9 * _within(workload, gpu, pcie)


def _within(workload: Workload, gpu: Gpu, pcie: float) -> float:
    """GB/s within a machine. Two cards are taken to have no bridge, since somebody has to have bought it."""
    here, peers = math.ceil(workload.world_size / workload.nodes), gpu.nvlink_peers or 0
    if gpu.allreduce_gbs is not None:
        return gpu.allreduce_gbs
    if gpu.nvlink_gbs is not None and peers >= here and peers > 2:
        return float(constants()["links"]["nvlink"]) * gpu.nvlink_gbs / 2
    return pcie
