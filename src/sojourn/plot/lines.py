"""Line charts as SVG, for pages that open anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from sojourn.plot.loss import ticks

Point = tuple[float, float]
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 230, 66, 28, 14
_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
_COLOURS = ("#2f6fb5", "#d9822b", "#2f8f6b", "#a3457a")


def lines_svg(title: str, lines: Sequence[tuple[str, Sequence[Point]]]) -> str:
    """Each line by its name. The texts' colour is the page's."""
    points = [point for _, line in lines for point in line]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    marks = ticks([y for _, y in points], 4)
    width, height = (right - left) or 1.0, (marks[-1] - marks[0]) or 1.0

    def place(point: Point) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - 8) * (point[0] - left) / width
        return x, _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * (point[1] - marks[0]) / height

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">']
    for mark in marks:
        y = place((left, mark))[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_label(mark, marks)}</text>')
    steps = [max(step, left) for step in ticks([left, right], 5) if step <= right]
    for step in steps:
        at = place((step, marks[0]))[0]
        anchor = "end" if at > _WIDTH - 30 else "middle"
        parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{_label(step, steps)}</text>')
    for number, (name, line) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, line))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{path}">')
        parts.append(f"<title>{escape(name)}</title></polyline>")
        if len(line) < 30:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in map(place, line)]
    return "".join([*parts, "</svg>"])


def legend(names: Sequence[str]) -> str:
    """The colours of the lines."""
    marks = (f'<span><i style="background:{_COLOURS[i % 4]}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<p class="legend">{"".join(marks)}</p>'


def _label(value: float, all_of_them: Sequence[float]) -> str:
    """With one unit for the axis, and as many digits as tell its numbers apart: 14.2k and 14.4k, 0.0001 as 1e-4."""
    largest = max(map(abs, all_of_them))
    if value == 0 or (largest >= 1e4 and abs(value) < 1000):
        return f"{value:g}"
    if largest < 1e-3:
        digits, _, power = f"{value:.3e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    unit, letter = next((found for found in _UNITS if largest >= found[0] * 10), (1.0, ""))
    distance = min((abs(b - a) for a, b in pairwise(all_of_them)), default=largest) / unit
    decimals = max(0, math.ceil(-math.log10(distance) - 1e-9)) if distance else 0
    return f"{value / unit:,.{decimals}f}{letter}"
