"""The data report as a plot: document lengths, languages, how full the rows are; and a histogram for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sojourn.plot.svg import BASELINE, INNER, PLOT_HEIGHT, Panel, abbreviate, escape, page, shorten, text

Bin = Mapping[str, int]  # from, to, documents

_AXIS_WIDTH = 52
_MAX_LANGUAGES, _LEGEND_COLUMNS = 8, 5
_COLOURS = ("#2f6fb5", "#d9822b", "#2f9e77", "#b5519b", "#c9a227", "#5b57b8", "#3aa3c2", "#c44e52", "#8a8f98")
_EIGHTHS = " ▏▎▍▌▋▊▉"
_FIGURES = {
    "documents": "documents", "tokens": "tokens", "trained_tokens": "tokens trained on", "truncated": "too long",
    "duplicates": "exact duplicates",
}  # fmt: skip


def report_svg(facts: Mapping[str, Any]) -> str:
    """The whole plot. A key that is missing or empty leaves its panel out."""
    title = str(facts.get("title") or "Data")
    panels = (
        _figures(facts),
        _lengths(facts.get("lengths") or [], facts.get("max_length")),
        _languages(facts.get("languages") or {}),
        _fill(facts.get("fill")),
    )
    return page(title, panels)


def histogram_text(bins: Sequence[Bin], width: int = 40) -> list[str]:
    """The length histogram for the terminal, one line per bin."""
    most = max((one["documents"] for one in bins), default=0)
    names = [_format_range(one) for one in bins]
    name_width, digits = max(map(len, names), default=0), len(f"{most:,}")
    lines = []
    for name, one in zip(names, bins, strict=True):
        eighths = round(one["documents"] / max(most, 1) * width * 8) or int(one["documents"] > 0)
        bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        lines.append(f"{name:>{name_width}}  {bar:<{width}}  {one['documents']:>{digits},}")
    return lines


def _figures(facts: Mapping[str, Any]) -> Panel:
    """The counts, in columns."""
    given = [(int(facts[key]), name) for key, name in _FIGURES.items() if facts.get(key) is not None]
    step = INNER / max(len(given), 4)
    columns = ""
    for index, (count, name) in enumerate(given):
        value = f"{count:,}" if count < 10**9 else f"{count / 10**9:,.2f} billion"
        columns += text(index * step, 16, value, "value") + text(index * step, 36, name, "soft")
    return (36 if given else 0), columns


def _lengths(bins: Sequence[Bin], max_length: int | None) -> Panel:
    if not bins:
        return 0, ""
    top = _round_up(max(one["documents"] for one in bins))
    step = (INNER - _AXIS_WIDTH) / len(bins)
    gap = min(12.0, step * 0.18)
    svg = text(0, 14, "Documents by length in tokens", "head")
    for count in sorted({top * part // 4 for part in range(5)} if top >= 4 else range(top + 1)):
        y = BASELINE - PLOT_HEIGHT * count / top
        svg += (
            f'<line class="{"grid" if count else "axis"}" x1="{_AXIS_WIDTH}" x2="{INNER}" y1="{y:.2f}" y2="{y:.2f}"/>'
        )
        svg += text(_AXIS_WIDTH - 8, y + 4, abbreviate(count), "soft", "end")
    for index, one in enumerate(bins):
        height = PLOT_HEIGHT * one["documents"] / top
        svg += (
            f'<rect class="{"long" if max_length and one["from"] > max_length else "bar"}" '
            f'x="{_AXIS_WIDTH + index * step + gap / 2:.2f}" y="{BASELINE - height:.2f}" '
            f'width="{step - gap:.2f}" height="{height:.2f}">'
            f"<title>{_format_range(one)} tokens: {one['documents']:,} documents</title></rect>"
        )
    names = [abbreviate(one["to"]) for one in bins]
    every = max(1, -(-int(max(map(len, names)) * 7.2 + 8) // max(1, int(step))))  # label every bin, or every n-th
    for index, name in enumerate(names):
        if (len(names) - 1 - index) % every == 0:
            label = f"≤ {name}" if step >= 44 and every == 1 else name
            svg += text(_AXIS_WIDTH + (index + 0.5) * step, BASELINE + 18, label, "soft", "middle")
    return BASELINE + 20, svg + (_max_length_line(bins, step, max_length) if max_length else "")


def _max_length_line(bins: Sequence[Bin], step: float, max_length: int) -> str:
    """Within its bin in proportion; at the right edge when all documents are shorter."""
    position = float(len(bins))
    for index, one in enumerate(bins):
        if max_length <= one["to"]:
            part = (max_length - one["from"] + 1) / (one["to"] - one["from"] + 1)
            position = index + min(max(part, 0.0), 1.0)
            break
    x = _AXIS_WIDTH + position * step
    left = x > _AXIS_WIDTH + (INNER - _AXIS_WIDTH) / 2
    label = text(x - 6 if left else x + 6, 34, f"max_length {max_length:,}", "label", "end" if left else "start")
    return f'<line class="mark" x1="{x:.2f}" x2="{x:.2f}" y1="26" y2="{BASELINE}"/>{label}'


def _languages(shares: Mapping[str, float]) -> Panel:
    """A stacked bar and its legend; small languages are summed up as others."""
    total = sum(shares.values())
    if total <= 0:
        return 0, ""
    ranked = sorted(((code, share / total) for code, share in shares.items() if share > 0), key=lambda one: -one[1])
    if len(ranked) > _MAX_LANGUAGES + 1:
        ranked = [*ranked[:_MAX_LANGUAGES], ("others", sum(share for _, share in ranked[_MAX_LANGUAGES:]))]
    svg, x = text(0, 14, "Languages", "head"), 0.0
    for index, ((code, share), colour) in enumerate(zip(ranked, _COLOURS, strict=False)):
        label = f"{'unknown' if code == '?' else shorten(code, 9)} {_percent(share)}"
        left, y = index % _LEGEND_COLUMNS * INNER / _LEGEND_COLUMNS, 74 + index // _LEGEND_COLUMNS * 22
        svg += (
            f'<rect class="share" x="{x:.2f}" y="28" width="{share * INNER:.2f}" height="22" fill="{colour}">'
            f"<title>{escape(code)} {_percent(share)}</title></rect>"
            f'<rect x="{left:.2f}" y="{y - 10}" width="11" height="11" rx="2" fill="{colour}"/>'
            f"{text(left + 18, y, label)}"
        )
        x += share * INNER
    return 74 + (len(ranked) - 1) // _LEGEND_COLUMNS * 22 + 4, svg


def _fill(fill: float | None) -> Panel:
    if fill is None:
        return 0, ""
    share = min(max(float(fill), 0.0), 1.0)
    return 46, (
        text(0, 14, "Rows filled with tokens", "head")
        + text(INNER, 14, _percent(share), "", "end")
        + f'<rect class="track" y="28" width="{INNER}" height="14" rx="3"/>'
        + f'<rect class="bar" y="28" width="{share * INNER:.2f}" height="14" rx="3"/>'
    )


def _format_range(one: Bin) -> str:
    return f"{one['from']:,}–{one['to']:,}" if one["from"] != one["to"] else f"{one['to']:,}"


def _round_up(number: int) -> int:
    """The top of the count axis: divisible by 4, with few digits."""
    if number <= 4:
        return max(number, 1)
    size = 10 ** (len(str(number)) - 1)
    for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10):
        if step * size >= number and step * size % 4 == 0:
            return int(step * size)
    return -(-number // 4) * 4


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "< 0.1%"
