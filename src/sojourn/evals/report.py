"""Results of an evaluation as lines, as JSON, as a page of HTML and as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sojourn.evals.compare import Result
from sojourn.evals.intervals import Estimate
from sojourn.plot.loss import loss_text
from sojourn.plot.scores import Score, scores_panel
from sojourn.plot.svg import Panel, page

_STYLE = """
body { font-family: system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #24292f }
table { border-collapse: collapse; margin: 1rem 0 2rem } th, td { padding: .3rem .8rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr { border-bottom: 1px solid #e7eaee }
td { font-variant-numeric: tabular-nums } svg { max-width: 100%; height: auto }
@media (prefers-color-scheme: dark) { body { color: #e6e9ed; background: #14181d } tr { border-color: #2b323a } }
"""
_HEADER = "<tr><th>model</th><th>value</th><th>interval</th>{}</tr>"
_DIFFERENCE = "<th>difference from the first</th><th>interval</th>"
_PLOTTED = 3  # steps that make a curve


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """NaN, which JSON does not have, as null."""
    rows = []
    for one in results:
        row = asdict(one)
        row |= {key: _number(value) for key, value in row.pop("estimate").items()}
        difference = row.pop("difference")
        row["difference"] = None if difference is None else {key: _number(v) for key, v in difference.items()}
        rows.append(row)
    return rows


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def as_lines(results: Sequence[Result]) -> list[str]:
    """A table for each data set or task, and a curve over the checkpoints of a run."""
    lines = []
    for (what, metric), group in _groups(results).items():
        lines.append(f"{what}: {metric.replace('_', ' ')} ({group[0].examples:,} examples)")
        lines += [f"  {line}" for line in [*_table([_cells(one) for one in group]), *_curve(group)]]
    return lines


def _groups(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    groups: dict[tuple[str, str], list[Result]] = {}
    for one in results:
        groups.setdefault((one.what, one.metric), []).append(one)
    return groups


def _cells(one: Result) -> list[str]:
    cells = [label(one), format_value(one.estimate.value, one.kind), _interval(one.estimate, one.kind)]
    if one.difference is not None:
        sign = "+" if one.difference.value >= 0 else "−"
        value = format_value(abs(one.difference.value), one.kind)
        cells += [f"{sign}{value}", _interval(one.difference, one.kind)]
    return cells


def label(one: Result) -> str:
    return one.model if one.step is None else f"{one.model} step {one.step}"


def format_value(value: float, kind: str) -> str:
    if math.isnan(value):
        return "–"
    return (
        f"{100 * value:.1f} %"
        if kind in ("share", "mean")
        else f"{value:.2f}"
        if kind == "perplexity"
        else f"{value:.4f}"
    )


def _interval(estimate: Estimate, kind: str) -> str:
    if math.isnan(estimate.low):
        return ""
    low, high = (format_value(end, kind).removesuffix(" %") for end in (estimate.low, estimate.high))
    return f"[{low}, {high}]".replace("-", "−")


def _table(rows: list[list[str]]) -> list[str]:
    columns = max(map(len, rows))
    filled = [row + [""] * (columns - len(row)) for row in rows]
    widths = [max(len(row[at]) for row in filled) for at in range(columns)]
    return [
        "  ".join(cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in
                  enumerate(zip(row, widths, strict=True))).rstrip()
        for row in filled
    ]  # fmt: skip


def as_html(results: Sequence[Result], title: str) -> str:
    """One page without other files."""
    body, name = "", html.escape(title)
    for (what, metric), group in _groups(results).items():
        heading = f"{what}: {metric.replace('_', ' ')}"
        body += f"<h2>{html.escape(heading)}</h2><p>{group[0].examples:,} examples; 95 % confidence intervals</p>"
        body += page(heading, [_panel(metric, group)], heading=False)
        has_difference = any(one.difference is not None for one in group)
        body += f"<table>{_HEADER.format(_DIFFERENCE if has_difference else '')}"
        for one in group:
            body += f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in _cells(one))}</tr>"
        body += "</table>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    head += f"<style>{_STYLE}</style>"
    return f"<!doctype html><html><head>{head}</head><body><h1>{name}</h1>{body}</body></html>\n"


def as_svg(results: Sequence[Result], title: str) -> str:
    """The plots alone, one below the other."""
    groups = _groups(results).items()
    return page(title, [_panel(f"{what}: {metric}", group) for (what, metric), group in groups])


def _panel(title: str, group: Sequence[Result]) -> Panel:
    scores = [Score(label(r), r.estimate.value, r.estimate.low, r.estimate.high, r.step) for r in group]
    return scores_panel(title.replace("_", " "), scores)


def _curve(group: Sequence[Result]) -> list[str]:
    """For the terminal: the value over the steps of one run."""
    points = [(float(one.step), one.estimate.value) for one in group if one.step is not None]
    is_curve = len({one.model for one in group}) == 1 and len(points) == len(group) >= _PLOTTED
    return loss_text(sorted(points)) if is_curve and all(math.isfinite(value) for _, value in points) else []
