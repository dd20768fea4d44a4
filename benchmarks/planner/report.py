"""Planned against measured in a few numbers, for each half, and who is furthest off."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.planner.peers import COLUMN, COUNTS
from benchmarks.planner.replan import Row

_GIB = 2**30
_WORST = 6
_FAILED = 8  # that are named
_WIDTH = 149
HALVES = {"held out": True, "the other half": False}
# What is planned, and what it is held against.
_COLUMNS = {
    "allocated": "allocated", "device": "device", "step_seconds": "step_seconds", "known_seconds": "step_seconds",
}  # fmt: skip
_TITLES = {
    "allocated": "peak that torch counts", "device": "whole device", "step_seconds": "time of a step",
    "known_seconds": "time, the CPU's speed known",
}  # fmt: skip


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """By who plans and for which half: of each column the errors, and how many capped runs ran out of memory."""
    rows = [row for row in result["rows"] if "failed" not in row.get("measured", {"failed": ""})]
    halves = {half: [row for row in rows if row["held_out"] is held] for half, held in HALVES.items()}
    found = {f"sojourn, {half}": _ours(some, result["rows"], HALVES[half]) for half, some in halves.items()}
    for peer in sorted(result.get("peers", {})):
        for half, some in halves.items():
            answers = {row["name"]: row.get("peers", {}).get(peer) for row in some}
            found[f"{peer}, {half}"] = {COLUMN[peer]: errors(some, COLUMN[peer], answers)}
    return found


def _ours(rows: list[Row], everything: list[Row], held: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for column in _COLUMNS:
        found[column] = errors(rows, column, {row["name"]: row["planned"].get(column) for row in rows})
    capped = [row["capped"] for row in everything if row["held_out"] is held and "capped" in row]
    tried = [one for one in capped if "failed" not in one or one.get("out_of_memory")]
    found["capped"] = len(tried)
    found["false_fits"] = sum(bool(one.get("out_of_memory")) for one in tried)
    found["above_need"] = sum(_above(row) for row in rows)
    return found


def _above(row: Row) -> bool:
    """Whether the peak alone is more than there is on a card that is said to be enough, capped or not."""
    peak, plan = row["measured"].get("allocated"), row["planned"]
    return peak is not None and peak > plan["enough"] - plan["context"]


def errors(rows: list[Row], column: str, plans: dict[str, Any]) -> dict[str, Any] | None:
    """Shares of what was measured: the mean, the 95th percentile and the worst, whichever way they go; None: nothing to
    compare."""
    apart = {}
    for row in rows:
        real, plan = row["measured"].get(_COLUMNS[column]), plans.get(row["name"])
        if real and plan:
            apart[row["name"]] = plan / real - 1
    if not apart:
        return None
    sizes = sorted(map(abs, apart.values()))
    worst = max(apart, key=lambda name: abs(apart[name]))
    return {
        "cases": len(apart), "mean": sum(sizes) / len(sizes), "p95": sizes[math.ceil(0.95 * len(sizes)) - 1],
        "worst": apart[worst], "worst_case": worst, "bias": sum(apart.values()) / len(apart),
    }  # fmt: skip


def line(row: Row) -> str:
    """A case that has ended: measured of planned, and where its time went."""
    found, plan = row["measured"], row["planned"]
    said = f"{row['name']:<24}"
    if "failed" in found:
        out = "RAN OUT OF MEMORY: " if found.get("out_of_memory") else "failed: "
        return f"{said}{out}{found['failed']}"[:_WIDTH]
    for title, column in (("", "allocated"), ("device ", "device")):
        if found.get(column):
            said += f" {title}{found[column] / _GIB:6.2f}/{plan[column] / _GIB:6.2f} GiB"
            said += f" {plan[column] / found[column] - 1:+6.1%}"
    if "step_seconds" in found:
        said += f"  {1e3 * found['step_seconds']:7.1f}"
        said += f"/{1e3 * plan['step_seconds']:7.1f}" if plan["step_seconds"] else ""
        said += " ms"
        said += f" {plan['step_seconds'] / found['step_seconds'] - 1:+6.1%}" if plan["step_seconds"] else ""
    capped = row.get("capped")
    if capped is not None:
        said += "  cap " + ("OOM" if capped.get("out_of_memory") else "failed" if "failed" in capped else "ok")
    parts = [f"{found[name]:.1f}" for name in ("opened", "first_seconds", "quiet") if name in found]
    return f"{said}  {' + '.join(parts)} s" if parts else said


def lines(result: dict[str, Any]) -> list[str]:
    """For a screen."""
    rows = result["rows"]
    failed = [row for row in rows if "failed" in row.get("measured", {})]
    done = [row for row in rows if "measured" in row and row not in failed]
    said = ["", f"{len(done)} cases measured, {len(failed)} failed, {len(rows) - len(done) - len(failed)} not run"]
    said += [f"  {line(row)}" for row in failed[:_FAILED]]
    said += ["", f"{'planned against measured':<60}{'cases':>6}{'mean':>9}{'95 %':>9}{'worst':>9}"]
    for who, found in result["report"].items():
        for column in _COLUMNS:
            one = found.get(column)
            if one is not None:
                sizes = f"{one['mean']:>9.1%}{one['p95']:>9.1%}{one['worst']:>+9.1%}"
                said.append(f"{f'{who}: {_TITLES[column]}':<60}{one['cases']:>6}{sizes}  {one['worst_case']}")
        if found.get("capped"):
            share = f"{found['false_fits']} of {found['capped']}"
            said.append(f"{who}: {share} ran out of memory where the plan says that they fit")
        if found.get("above_need"):
            said.append(f"{who}: {found['above_need']} peaks above the memory that the plan calls enough")
    said += ["", *(f"{peer} counts {COUNTS[peer]}" for peer in sorted(result.get("peers", {})))]
    return [*said, *_groups(done), *_offenders(done, "allocated"), *_offenders(done, "step_seconds")]


def _groups(rows: list[Row]) -> list[str]:
    """Which way plans err, by what the runs have in common."""
    said = ["", f"{'sojourn, by':<34}{'cases':>6}   {'memory':>15}   {'time':>15}   (mean either way, and mean)"]
    for key in ("method", "compiled", "checkpointing", "optimizer", "fused"):
        for value in sorted({str(row["case"][key]) for row in rows}):
            some = [row for row in rows if str(row["case"][key]) == value]
            both = []
            for column in ("allocated", "step_seconds"):
                one = errors(some, column, {row["name"]: row["planned"][column] for row in some})
                both.append(f"{one['mean']:>6.1%} {one['bias']:>+7.1%}" if one else "")
            said.append(f"{key + ' ' + value:<34}{len(some):>6}   {both[0]:>15}   {both[1]:>15}")
    return said


def _offenders(rows: list[Row], column: str) -> list[str]:
    apart = {
        row["name"]: (row["planned"][column] / row["measured"][column] - 1, row)
        for row in rows
        if row["planned"][column] and row["measured"].get(column)
    }
    scale, unit = (_GIB, "GiB") if column == "allocated" else (1e-3, "ms")
    said = ["", f"furthest off in {'memory' if column == 'allocated' else 'time'}:"] if apart else []
    for name in sorted(apart, key=lambda name: -abs(apart[name][0]))[:_WORST]:
        off, row = apart[name]
        where = _moments(row) if column == "allocated" else _parts(row)
        said.append(f"  {name:<26}{off:>+7.1%}   {row['planned'][column] / scale:,.2f} {unit} planned, "
                    f"{row['measured'][column] / scale:,.2f} measured   {where}")  # fmt: skip
    return said


def _moments(row: Row) -> str:
    """The planned peak's moment, and what was counted in each phase."""
    real = row["measured"].get("phases", {})
    counted = [f"{name} {real[name] / _GIB:.2f}" for name in ("forward", "gradients", "update") if name in real]
    return ", ".join([row["planned"]["moment"], *counted])


def _parts(row: Row) -> str:
    """The largest planned parts of a step."""
    parts: dict[str, float] = row["planned"].get("parts", {})
    return ", ".join(f"{name} {1e3 * parts[name]:.1f}" for name in sorted(parts, key=lambda name: -parts[name])[:3])
