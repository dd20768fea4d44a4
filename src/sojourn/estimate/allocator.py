"""From the bytes of tensors to the memory of the device: torch's caching allocator, CUDA context, cuBLAS workspace.

Rounding follows torch's CUDACachingAllocator: blocks of 512 bytes; tensors up to 1 MiB from segments of 2 MiB, up to 10
MiB from segments of 20 MiB, larger ones rounded to 2 MiB. The fragmentation of segments and the size of the context are
assumptions in fit.toml.
"""

from __future__ import annotations

from sojourn.estimate.constants import constants
from sojourn.estimate.workload import Workload

_BLOCK = 512
_MIB = 2**20
_SMALL, _SMALL_SEGMENT, _MIDDLE, _MIDDLE_SEGMENT, _LARGE_STEP = _MIB, 2 * _MIB, 10 * _MIB, 20 * _MIB, 2 * _MIB


def round_to_block(size: float) -> int:
    """Bytes that torch counts for a tensor of so many bytes."""
    return -(-int(size) // _BLOCK) * _BLOCK


def reserved_bytes(size: float, count: int) -> float:
    """Device memory of `count` tensors of `size` bytes."""
    each = round_to_block(size)
    if each <= _SMALL:
        return -(-each * count // _SMALL_SEGMENT) * _SMALL_SEGMENT
    if each < _MIDDLE:
        return -(-each * count // _MIDDLE_SEGMENT) * _MIDDLE_SEGMENT
    return float(count * (-(-each // _LARGE_STEP) * _LARGE_STEP))


def cublas_workspace(workload: Workload) -> int:
    """Counted by torch: 32 MiB from Hopper on, else 8 MiB, for each of the two threads that run matmuls (forward and
    backward)."""
    if workload.device_type != "cuda":
        return 0
    return 2 * (32 if workload.compute_capability >= (9, 0) else 8) * _MIB


def cuda_context(workload: Workload) -> int:
    """Not counted by torch: the CUDA context with the kernels that a run loads, NCCL's buffers, CUDA graphs."""
    if workload.device_type != "cuda":
        return 0
    more = int(constants()["memory"]["nccl_mib"]) if workload.world_size > 1 else 0
    more += int(constants()["memory"]["cuda_graph_mib"]) if workload.graph_memory else 0
    return context_bytes(workload.compute_capability) + more * _MIB


def context_bytes(compute_capability: tuple[int, int]) -> int:
    """Of a CUDA context with the kernels that a process of ours loads."""
    table = constants()["memory"]["context_mib"]
    known = sorted((tuple(int(part) for part in key.split(".")), value) for key, value in table.items())
    fitting = [value for capability, value in known if capability <= compute_capability]
    return int(fitting[-1] if fitting else known[0][1]) * _MIB


def fragmentation(persistent: list[tuple[float, int]], transient: float) -> float:
    """Bytes lost: to rounding of persistent tensors (bytes, count), and between segments of transient ones."""
    rounding = sum(reserved_bytes(size, count) - size * count for size, count in persistent)
    return rounding + float(constants()["memory"]["fragmentation"]) * transient
