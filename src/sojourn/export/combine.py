"""How several adapters become one change of the weights: a weighted sum, TIES (arXiv 2306.01708), DARE (arXiv
2311.03099).

An adapter's task vector is the change that it makes to the weights it adapts, times its weight. TIES trims each task
vector to its largest values, elects a sign for every weight, and averages the values that have it. DARE drops values at
random and rescales the rest; the sum is linear.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Method = Literal["linear", "ties", "dare"]
_DENSITY: dict[str, float] = {"linear": 1.0, "ties": 0.2, "dare": 0.1}  # the papers' own: the top 20 %, p = 0.9
_BLOCK_ROWS = 64  # rows that share a random seed, however the rows are read
_HIGH_BITS = 15  # of the 31 bits of a positive float: the first histogram's


@dataclass(frozen=True)
class Combine:
    """`density`: the share of a task vector that TIES or DARE keeps."""

    method: Method = "linear"
    density: float = 1.0
    seed: int = 0

    def describe(self) -> str:
        return self.method if self.method == "linear" else f"{self.method}, density {self.density:g}"


def parse_combine(method: str, density: float | None, seed: int = 0) -> Combine:
    if method not in get_args(Method):
        known = list(get_args(Method))
        raise UserError(
            f"--combine: no “{printable(method)}”{did_you_mean(method, known)}; there are: {', '.join(known)}"
        )
    if density is not None and method == "linear":
        raise UserError("--density: linear keeps every value; add --combine ties or --combine dare")
    return Combine(method, _DENSITY[method] if density is None else density, seed)  # type: ignore[arg-type]


def trim_threshold(task_vector: Callable[[], Iterable[Tensor]], density: float) -> float:
    """The smallest magnitude among the largest values of a task vector: `density` of all of them. `task_vector` gives
    its pieces, in fp32, as often as it is called. Exact, in the memory of one piece: positive floats are ordered as
    their bits are, so two histograms of bits find it."""
    import torch

    low_bits = 31 - _HIGH_BITS
    counts = torch.zeros(1 << _HIGH_BITS, dtype=torch.int64)
    for piece in task_vector():
        counts += torch.bincount(_bits(piece) >> low_bits, minlength=counts.numel())
    kept = max(1, round(int(counts.sum()) * density))
    high, above = _bin_of(counts, kept)
    lower = torch.zeros(1 << low_bits, dtype=torch.int64)
    for piece in task_vector():
        bits = _bits(piece)
        inside = bits[bits >> low_bits == high]
        lower += torch.bincount(inside & ((1 << low_bits) - 1), minlength=lower.numel())
    low, _ = _bin_of(lower, kept - above)
    return float(torch.tensor((high << low_bits) | low, dtype=torch.int32).view(torch.float32))


def _bits(piece: Tensor) -> Tensor:
    import torch

    return piece.abs().reshape(-1).view(torch.int32)


def _bin_of(counts: Tensor, kept: int) -> tuple[int, int]:
    """The bin of the kept-th largest value, and how many values lie in the bins above it."""
    from_top = counts.flip(0).cumsum(0)
    index = int((from_top >= kept).nonzero()[0])
    above = int(from_top[index - 1]) if index else 0
    return counts.numel() - 1 - index, above


def ties(vectors: list[Tensor], thresholds: list[float]) -> Tensor:
    """Trim, elect sign, disjoint mean. Thresholds are those of the vectors as they are here, weights included."""
    import torch

    trimmed = torch.stack([torch.where(v.abs() >= t, v, 0.0) for v, t in zip(vectors, thresholds, strict=True)])
    sign = trimmed.sum(0).sign()
    agrees = (trimmed.sign() == sign) & (trimmed != 0)
    return (trimmed * agrees).sum(0) / agrees.sum(0).clamp(min=1)


def dare_mask(name: str, adapter: int, start: int, stop: int, columns: int, combine: Combine) -> Tensor:
    """Which values of these rows are kept: the same ones, whichever rows are asked for together."""
    import torch

    first, last = start // _BLOCK_ROWS, -(-stop // _BLOCK_ROWS)
    blocks = []
    for block in range(first, last):
        key = zlib.crc32(f"{combine.seed} {adapter} {name} {block}".encode())
        random = torch.rand((_BLOCK_ROWS, columns), generator=torch.Generator().manual_seed(key))
        blocks.append(random < combine.density)
    offset = start - first * _BLOCK_ROWS
    return torch.cat(blocks)[offset : offset + stop - start]
