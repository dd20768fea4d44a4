"""The loss of a run over its steps: `loss.svg`, and the same for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

from sojourn.plot.svg import BASELINE, INNER, PLOT_HEIGHT, abbreviate, page, text

Point = tuple[float, float]  # step, loss
_AXIS = 52
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # dots of a character: 4 rows of 2


def loss_points(metrics: Iterable[Mapping[str, Any]], kind: str) -> list[Point]:
    """Of metrics.jsonl: `kind` is train or eval. Losses that are no finite number are left out."""
    found = [(line.get("step"), line.get("loss")) for line in metrics if line.get("kind") == kind]
    points = [(float(step), float(loss)) for step, loss in found if _is_number(step) and _is_number(loss)]
    return sorted(points)


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) < 1e15 and math.isfinite(value)


def loss_svg(title: str, train: Sequence[Point], held_out: Sequence[Point]) -> str:
    points = [*train, *held_out]
    if not points:
        return page(title, [(20, text(0, 14, "no step has been logged yet", "soft"))])
    last, marks = max(step for step, _ in points) or 1.0, ticks([loss for _, loss in points], 5)
    low, high = marks[0], marks[-1]

    def place(point: Point) -> tuple[float, float]:
        x = _AXIS + (INNER - _AXIS) * point[0] / last
        return x, BASELINE - PLOT_HEIGHT * (point[1] - low) / (high - low)

    svg = text(0, 14, "Loss by step", "head")
    for tick in marks:
        y = place((0.0, tick))[1]
        kind = "axis" if tick == low else "grid"
        svg += f'<line class="{kind}" x1="{_AXIS}" x2="{INNER}" y1="{y:.2f}" y2="{y:.2f}"/>'
        svg += text(_AXIS - 8, y + 4, f"{tick:.4g}", "soft", "end")
    for step in sorted({round(last * part / 4) for part in range(5)}):
        svg += text(place((step, low))[0], BASELINE + 18, abbreviate(step), "soft", "middle")
    svg += _line(map(place, _binned(train, last, INNER - _AXIS)), "#2f6fb5", "training")
    svg += _line(map(place, held_out), "#d9822b", "held-out")
    legend = f"training {train[-1][1]:.4f}" if train else ""
    legend += f"{' · ' if train else ''}held-out {held_out[-1][1]:.4f}" if held_out else ""
    return page(title, [(BASELINE + 20, svg + text(INNER, 14, f"{legend} at step {last:,.0f}", "soft", "end"))])


def _line(places: Iterable[tuple[float, float]], colour: str, name: str) -> str:
    path = [f"{x:.2f},{y:.2f}" for x, y in places]
    if not path:
        return ""
    points = f'fill="none" stroke="{colour}" stroke-width="1.6" points="{" ".join(path)}"'
    dots = [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in (one.split(",") for one in path)]
    return f"<polyline {points}><title>{name}</title></polyline>" + ("".join(dots) if len(path) < 40 else "")


def _binned(points: Sequence[Point], last: float, bins: int) -> list[Point]:
    """At most `bins` points: means of neighbours."""
    groups: dict[int, list[Point]] = {}
    for point in points:
        groups.setdefault(min(bins - 1, int(point[0] / last * bins)), []).append(point)
    return [(_mean(step for step, _ in group), _mean(loss for _, loss in group)) for group in groups.values()]


def _mean(values: Iterable[float]) -> float:
    given = list(values)
    return sum(given) / len(given)


def ticks(values: Sequence[float], most: int) -> list[float]:
    """Round numbers from below the least value to above the greatest."""
    low, high = min(values), max(values)
    spread = (high - low) or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(spread / most))
    step = next(size * part for part in (1, 2, 5, 10, 20) if size * part * most >= spread)
    first, end = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(end, first + 1) + 1)]


def loss_text(train: Sequence[Point], width: int = 64, height: int = 12, braille: bool = True) -> list[str]:
    """The training loss in lines of characters; `braille`: eight dots in each, for terminals that show them."""
    if not train:
        return []
    across, down = (2, 4) if braille else (1, 1)
    last, columns, rows = train[-1][0] or 1.0, width * across, height * down
    points = _binned(train, last, columns)
    high, low = max(loss for _, loss in points), min(loss for _, loss in points)
    spread = (high - low) or 1.0
    places = [(int(s / last * (columns - 1)), round((high - loss) / spread * (rows - 1))) for s, loss in points]
    cells = [[0] * width for _ in range(height)]
    for x, y in [*places, *(dot for one, other in pairwise(places) for dot in _between(one, other))]:
        cells[y // down][x // across] |= _BRAILLE[y % 4][x % 2] if braille else 1
    lines = []
    for number, row in enumerate(cells):
        label = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}.get(number, "")
        drawn = "".join(chr(0x2800 + cell) if braille and cell else "*" if cell else " " for cell in row)
        lines.append(f"{label:>9} {'┤' if braille else '|'}{drawn.rstrip()}")
    return [*lines, f"{'step':>9}  {0:<{width // 2}}{f'{last:,.0f}':>{width - width // 2}}"]


def _between(one: tuple[int, int], other: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of a straight line."""
    (x, y), (to_x, to_y) = one, other
    count = max(abs(to_x - x), abs(to_y - y), 1)
    return [(x + (to_x - x) * i // count, y + (to_y - y) * i // count) for i in range(1, count)]
