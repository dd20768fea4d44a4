"""Whether a row did the same computation as the reference, and the line that tells about it.

Three things are compared: each loss of the first steps, those after that in the mean, as the noise of few bits grows
with time, and the length of the first gradient. That is the sharpest test: a model of random weights says much the same
whatever it attends to, but its gradient does not.
"""

from __future__ import annotations

import math
from typing import Any

Row = dict[str, Any]

COMPARED_STEPS = 20  # afterwards the noise of bf16 has grown too far for a single loss
_LOSS = {"fp32": 1e-4, "bf16": 0.02}
_GRADIENT = {"fp32": 1e-3, "bf16": 0.05}


def compare(row: Row, reference: Row, precision: str) -> None:
    """Adds to `row`: its largest differences, whether they are within the noise of `precision`, and its gain."""
    if "losses" not in row:
        return
    if row.get("another"):
        row |= {"gain": row["tokens_per_second"] / reference["tokens_per_second"], "note": "another model"}
        return
    shared = [step for step in reference["losses"] if step in row["losses"]]
    apart = {int(step): _apart(row["losses"][step], reference["losses"][step]) for step in shared}
    loss = max((one for step, one in apart.items() if step <= COMPARED_STEPS), default=math.inf)
    later = [one for step, one in apart.items() if step > COMPARED_STEPS]
    curve = sum(later) / len(later) if later else 0.0
    gradient = _apart(row["first_gradient"], reference["first_gradient"])
    same = max(loss, curve) <= _LOSS[precision] and gradient <= _GRADIENT[precision]
    row |= {
        "difference": _known(loss), "curve_difference": _known(curve) if later else None,
        "gradient_difference": _known(gradient), "same": same,
        "gain": row["tokens_per_second"] / reference["tokens_per_second"] if same else None,
    }  # fmt: skip
    if row is reference:
        row["note"] = "the reference"
    elif not same:
        later_too = f", later losses by {curve:.1e} in the mean" if later else ""
        row["note"] = f"differs (its first gradient by {gradient:.1e}{later_too})"


def _apart(one: float | None, other: float | None) -> float:
    """Infinitely far where one of them is no number."""
    if one is None or other is None or not math.isfinite(one) or not math.isfinite(other):
        return math.inf
    return abs(one - other) / max(abs(other), 1e-12)


def _known(number: float) -> float | None:
    """JSON has no infinity."""
    return number if math.isfinite(number) else None


def head(name: str) -> str:
    return f"{name:<48}{'tok/s':>12}{'×':>8}{'peak GiB':>10}{'loss differs':>14}"


def line(row: Row) -> str:
    speed = f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else ""
    gain = f"{row['gain']:.2f}" if row.get("gain") else ""
    memory = f"{row['peak_memory'] / 2**30:.2f}" if "peak_memory" in row else ""
    apart = f"{row['difference']:.1e}" if row.get("difference") is not None else ""
    return f"{row['title']:<48}{speed:>12}{gain:>8}{memory:>10}{apart:>14}  {row.get('note', '')}".rstrip()


def best(rows: list[Row]) -> Row | None:
    """Our fastest row against the fastest peer, among those that did the same computation, or as much of one."""
    fair = [row for row in rows if row.get("same") or (row.get("another") and "losses" in row)]
    ours, peers = ([row for row in fair if (row["role"] == "sojourn") is mine] for mine in (True, False))
    if not ours or not peers:
        return None
    one, other = (max(group, key=lambda row: float(row["tokens_per_second"])) for group in (ours, peers))
    return {
        "ours": one["name"], "peer": other["name"], "gain": one["tokens_per_second"] / other["tokens_per_second"],
        "memory": one["peak_memory"] / other["peak_memory"],
        "says": f"{one['title']} is {one['tokens_per_second'] / other['tokens_per_second']:.2f} times as fast as "
        f"{other['title']}, in {one['peak_memory'] / other['peak_memory']:.2f} of its memory",
    }  # fmt: skip
