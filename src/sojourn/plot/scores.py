"""Scores with confidence intervals as SVG: of several models side by side, or over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sojourn.plot.loss import ticks
from sojourn.plot.svg import BASELINE, INNER, PLOT_HEIGHT, Panel, abbreviate, shorten, text

_AXIS = 60
_COLOUR = "#2f6fb5"


@dataclass(frozen=True)
class Score:
    """`low` and `high` may be NaN. `step`: where it belongs on a time axis."""

    label: str
    value: float
    low: float
    high: float
    step: int | None = None


def scores_panel(title: str, scores: Sequence[Score]) -> Panel:
    """A line over steps where all have one, else a point a model."""
    shown = [score for score in scores if math.isfinite(score.value)]
    if not shown:
        return 0, ""
    ends = [value for one in shown for value in (one.value, one.low, one.high) if math.isfinite(value)]
    marks = ticks(ends, 4)
    low, high = marks[0], marks[-1]
    steps = [one.step for one in shown if one.step is not None]
    over_steps = len(steps) == len(shown) > 1
    svg = text(0, 14, f"{title} by step" if over_steps else title, "head")

    def place_y(value: float) -> float:
        return BASELINE - PLOT_HEIGHT * (value - low) / (high - low)

    def place_x(at: int) -> float:
        if over_steps and max(steps) > min(steps):
            return _AXIS + 16 + (INNER - _AXIS - 32) * (steps[at] - min(steps)) / (max(steps) - min(steps))
        return _AXIS + (INNER - _AXIS) * (at + 0.5) / len(shown)

    for mark in marks:
        kind, y = "axis" if mark == low else "grid", place_y(mark)
        svg += f'<line class="{kind}" x1="{_AXIS}" x2="{INNER}" y1="{y:.2f}" y2="{y:.2f}"/>'
        svg += text(_AXIS - 8, y + 4, f"{mark:.4g}", "soft", "end")
    if over_steps:
        points = " ".join(f"{place_x(at):.2f},{place_y(one.value):.2f}" for at, one in enumerate(shown))
        svg += f'<polyline fill="none" stroke="{_COLOUR}" stroke-width="1.6" points="{points}"/>'
    width = int((INNER - _AXIS) / len(shown) / 7.5)
    for at, one in enumerate(shown):
        x, y = place_x(at), place_y(one.value)
        if math.isfinite(one.low) and math.isfinite(one.high):
            ends_y = f'y1="{place_y(one.low):.2f}" y2="{place_y(one.high):.2f}"'
            svg += f'<line x1="{x:.2f}" x2="{x:.2f}" {ends_y} stroke="{_COLOUR}" stroke-width="1.6" opacity="0.55"/>'
        svg += f'<circle cx="{x:.2f}" cy="{y:.2f}" r="4" fill="{_COLOUR}"/>'
        label = abbreviate(one.step) if over_steps and one.step is not None else shorten(one.label, max(width, 3))
        svg += text(x, BASELINE + 18, label, "soft", "middle")
    return BASELINE + 20, svg
