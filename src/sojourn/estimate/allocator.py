"""From what tensors take to what the device loses: torch's allocator, the CUDA context and the libraries' workspaces.

Rounding follows torch's CUDACachingAllocator: tensors in steps of 512 bytes, small ones (to 1 MiB) out of segments of 2
MiB, middling ones (to 10 MiB) out of segments of 20 MiB, larger ones in steps of 2 MiB. The share lost between
segments, and the context's size, are assumptions kept in fit.toml until they are measured.
"""

from __future__ import annotations

from sojourn.estimate.constants import constants
from sojourn.estimate.workload import Workload

_BLOCK = 512
_MIB = 2**20
_SMALL, _SMALL_SEGMENT, _MIDDLE, _MIDDLE_SEGMENT, _LARGE_STEP = _MIB, 2 * _MIB, 10 * _MIB, 20 * _MIB, 2 * _MIB


def rounded(size: float) -> int:
    """What a tensor of so many bytes is counted as."""
    return -(-int(size) // _BLOCK) * _BLOCK


def segments(size: float, count: int) -> float:
    """What `count` tensors of `size` bytes take from the device."""
    each = rounded(size)
    if each <= _SMALL:
        return -(-each * count // _SMALL_SEGMENT) * _SMALL_SEGMENT
    if each < _MIDDLE:
        return -(-each * count // _MIDDLE_SEGMENT) * _MIDDLE_SEGMENT
    return float(count * (-(-each // _LARGE_STEP) * _LARGE_STEP))


def workspace(work: Workload) -> int:
    """cuBLAS' own, inside what torch counts: 32 MiB from Hopper on, else 8 MiB, for each thread that multiplies: the
    backward has one of its own."""
    if work.device_type != "cuda":
        return 0
    return 2 * (32 if work.compute_capability >= (9, 0) else 8) * _MIB


def context(work: Workload) -> int:
    """The CUDA context with the kernels that a run loads, outside what torch counts."""
    if work.device_type != "cuda":
        return 0
    table = constants()["memory"]["context_mib"]
    known = sorted((tuple(int(part) for part in key.split(".")), value) for key, value in table.items())
    fitting = [value for capability, value in known if capability <= work.compute_capability]
    more = int(constants()["memory"]["nccl_mib"]) if work.world_size > 1 else 0
    more += int(constants()["memory"]["recorded_mib"]) if work.graph_memory else 0
    return (int(fitting[-1] if fitting else known[0][1]) + more) * _MIB


def lost(tensors: list[tuple[float, int]], changing: float) -> float:
    """To rounding, of the tensors that stay (bytes, count), and between segments, of what comes and goes."""
    to_rounding = sum(segments(size, count) - size * count for size, count in tensors)
    return to_rounding + float(constants()["memory"]["lost_of_changing"]) * changing
