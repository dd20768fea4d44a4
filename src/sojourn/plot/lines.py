"""Line charts as SVG, for pages that open anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sojourn.plot.loss import ticks
from sojourn.plot.svg import abbreviate

Point = tuple[float, float]
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 220, 62, 24, 12
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
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(mark)}</text>')
    for part in range(5):
        x = left + width * part / 4
        at = place((x, marks[0]))[0]
        anchor = "start" if part == 0 else "end" if part == 4 else "middle"
        parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{abbreviate(round(x))}</text>')
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


def _number(value: float) -> str:
    return abbreviate(round(value)) if abs(value) >= 10_000 else f"{value:.4g}"
