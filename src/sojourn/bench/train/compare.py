"""Whether a row did the same computation as the reference, and its line in the table.

Three things are compared: each loss of the first steps; the later losses in the mean, since rounding noise grows with
time; and the first gradient norm, the sharpest test: the loss of a randomly initialised model hardly depends on what it
attends to, but its gradient does.
"""

from __future__ import annotations

import math
from typing import Any

Row = dict[str, Any]

COMPARED_STEPS = 20  # afterwards bf16 rounding noise is too large to compare single losses
_LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 0.02}
_GRAD_TOLERANCE = {"fp32": 1e-3, "bf16": 0.05}


def compare(row: Row, reference: Row, precision: str) -> None:
    """Adds to `row`: its largest relative differences, whether they are within tolerance, and its speed-up."""
    if "losses" not in row:
        return
    if row.get("different_model"):
        row |= {"gain": row["tokens_per_second"] / reference["tokens_per_second"], "note": "a different model"}
        return
    shared = [step for step in reference["losses"] if step in row["losses"]]
    differences = {int(step): _relative(row["losses"][step], reference["losses"][step]) for step in shared}
    loss = max((value for step, value in differences.items() if step <= COMPARED_STEPS), default=math.inf)
    later = [value for step, value in differences.items() if step > COMPARED_STEPS]
    curve = sum(later) / len(later) if later else 0.0
    gradient = _relative(row["first_grad_norm"], reference["first_grad_norm"])
    same = max(loss, curve) <= _LOSS_TOLERANCE[precision] and gradient <= _GRAD_TOLERANCE[precision]
    row |= {
        "difference": _finite_or_none(loss), "curve_difference": _finite_or_none(curve) if later else None,
        "gradient_difference": _finite_or_none(gradient), "same": same,
        "gain": row["tokens_per_second"] / reference["tokens_per_second"] if same else None,
    }  # fmt: skip
    if row is reference:
        row["note"] = "the reference"
    elif not same:
        suffix = f", later losses by {curve:.1e} in the mean" if later else ""
        row["note"] = f"differs (first gradient norm by {gradient:.1e}{suffix})"


def _relative(value: float | None, expected: float | None) -> float:
    """The relative difference; infinite where either is missing or not finite."""
    if value is None or expected is None or not math.isfinite(value) or not math.isfinite(expected):
        return math.inf
    return abs(value - expected) / max(abs(expected), 1e-12)


def _finite_or_none(number: float) -> float | None:
    """JSON has no infinity."""
    return number if math.isfinite(number) else None


def format_header(name: str) -> str:
    return f"{name:<48}{'tok/s':>12}{'×':>8}{'peak GiB':>10}{'loss differs':>14}"


def format_row(row: Row) -> str:
    speed = f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else ""
    gain = f"{row['gain']:.2f}" if row.get("gain") else ""
    memory = f"{row['peak_memory'] / 2**30:.2f}" if "peak_memory" in row else ""
    difference = f"{row['difference']:.1e}" if row.get("difference") is not None else ""
    return f"{row['title']:<48}{speed:>12}{gain:>8}{memory:>10}{difference:>14}  {row.get('note', '')}".rstrip()


def best_against_peer(rows: list[Row]) -> Row | None:
    """Our fastest row against the fastest peer, of rows with the same losses or a different model of that size."""
    comparable = [row for row in rows if row.get("same") or (row.get("different_model") and "losses" in row)]
    ours, peers = ([row for row in comparable if (row["runner"] == "sojourn") is mine] for mine in (True, False))
    if not ours or not peers:
        return None
    our, peer = (max(group, key=lambda row: float(row["tokens_per_second"])) for group in (ours, peers))
    return {
        "ours": our["name"], "peer": peer["name"], "gain": our["tokens_per_second"] / peer["tokens_per_second"],
        "memory": our["peak_memory"] / peer["peak_memory"],
        "message": f"{our['title']} is {our['tokens_per_second'] / peer['tokens_per_second']:.2f} times as fast as "
        f"{peer['title']}, in {our['peak_memory'] / peer['peak_memory']:.2f} of its memory",
    }  # fmt: skip
