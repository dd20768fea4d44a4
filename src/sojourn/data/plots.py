"""The data report as a plot: document lengths, languages and how full the rows are; and a histogram for the terminal.

Plain SVG, written here: three bar charts do not justify matplotlib (tens of megabytes) on a laptop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from unicodedata import east_asian_width

Bin = Mapping[str, int]  # from, to, documents
Panel = tuple[int, str]  # height in pixels, SVG

_WIDTH, _MARGIN = 720, 32
_INNER = _WIDTH - 2 * _MARGIN
_AXIS_WIDTH, _PLOT_HEIGHT = 52, 190
_BASELINE = 40 + _PLOT_HEIGHT
_MAX_LANGUAGES, _LEGEND_COLUMNS = 8, 5
_COLOURS = ("#2f6fb5", "#d9822b", "#2f9e77", "#b5519b", "#c9a227", "#5b57b8", "#3aa3c2", "#c44e52", "#8a8f98")
_EIGHTHS = " ▏▎▍▌▋▊▉"
_FIGURES = {
    "documents": "documents", "tokens": "tokens", "trained_tokens": "tokens trained on", "truncated": "too long",
    "duplicates": "exact duplicates",
}  # fmt: skip
_STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Noto Sans CJK SC", sans-serif;
         font-size: 13px; fill: #24292f; font-variant-numeric: tabular-nums }
  .page { fill: #ffffff } .title { font-size: 19px; font-weight: 600 } .head { font-size: 14px; font-weight: 600 }
  .soft { fill: #5f6873; font-size: 12px } .value { font-size: 17px; font-weight: 600 }
  .track { fill: #e7eaee } .grid { stroke: #e7eaee } .axis { stroke: #a5adb6 }
  .bar { fill: #2f6fb5 } .long { fill: #d9822b }
  .mark { stroke: #c2410c; stroke-width: 1.5; stroke-dasharray: 4 3 } .label { fill: #c2410c; font-size: 12px }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e9ed } .page { fill: #14181d } .soft { fill: #9aa4af } .track { fill: #2b323a }
    .grid { stroke: #2b323a } .axis { stroke: #5f6873 } .bar { fill: #5b9bdf } .long { fill: #e59a4f }
    .mark { stroke: #f28b54 } .label { fill: #f28b54 }
  }
"""


def report_svg(facts: Mapping[str, Any]) -> str:
    """The whole plot. A key that is missing or empty leaves its panel out."""
    title, top, body = str(facts.get("title") or "Data"), 72, ""
    panels = (
        _figures(facts),
        _lengths(facts.get("lengths") or [], facts.get("max_length")),
        _languages(facts.get("languages") or {}),
        _fill(facts.get("fill")),
    )
    for height, svg in panels:
        if height:
            body += f'<g transform="translate({_MARGIN} {top})">{svg}</g>\n'
            top += height + 28
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}">'
        f"<title>{_escape(title)}</title><style>{_STYLE}</style>"
        f'<rect class="page" width="{_WIDTH}" height="{top}" rx="8"/>'
        f"{_text(_MARGIN, 44, _shorten(title, 54), 'title')}{body}</svg>\n"
    )


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
    step = _INNER / max(len(given), 4)
    columns = ""
    for index, (count, name) in enumerate(given):
        value = f"{count:,}" if count < 10**9 else f"{count / 10**9:,.2f} billion"
        columns += _text(index * step, 16, value, "value") + _text(index * step, 36, name, "soft")
    return (36 if given else 0), columns


def _lengths(bins: Sequence[Bin], max_length: int | None) -> Panel:
    if not bins:
        return 0, ""
    top = _round_up(max(one["documents"] for one in bins))
    step = (_INNER - _AXIS_WIDTH) / len(bins)
    gap = min(12.0, step * 0.18)
    svg = _text(0, 14, "Documents by length in tokens", "head")
    for count in sorted({top * part // 4 for part in range(5)} if top >= 4 else range(top + 1)):
        y = _BASELINE - _PLOT_HEIGHT * count / top
        svg += (
            f'<line class="{"grid" if count else "axis"}" x1="{_AXIS_WIDTH}" x2="{_INNER}" y1="{y:.2f}" y2="{y:.2f}"/>'
        )
        svg += _text(_AXIS_WIDTH - 8, y + 4, _abbreviate(count), "soft", "end")
    for index, one in enumerate(bins):
        height = _PLOT_HEIGHT * one["documents"] / top
        svg += (
            f'<rect class="{"long" if max_length and one["from"] > max_length else "bar"}" '
            f'x="{_AXIS_WIDTH + index * step + gap / 2:.2f}" y="{_BASELINE - height:.2f}" '
            f'width="{step - gap:.2f}" height="{height:.2f}">'
            f"<title>{_format_range(one)} tokens: {one['documents']:,} documents</title></rect>"
        )
    names = [_abbreviate(one["to"]) for one in bins]
    every = max(1, -(-int(max(map(len, names)) * 7.2 + 8) // max(1, int(step))))  # label every bin, or every n-th
    for index, name in enumerate(names):
        if (len(names) - 1 - index) % every == 0:
            label = f"≤ {name}" if step >= 44 and every == 1 else name
            svg += _text(_AXIS_WIDTH + (index + 0.5) * step, _BASELINE + 18, label, "soft", "middle")
    return _BASELINE + 20, svg + (_max_length_line(bins, step, max_length) if max_length else "")


def _max_length_line(bins: Sequence[Bin], step: float, max_length: int) -> str:
    """Within its bin in proportion; at the right edge when all documents are shorter."""
    position = float(len(bins))
    for index, one in enumerate(bins):
        if max_length <= one["to"]:
            part = (max_length - one["from"] + 1) / (one["to"] - one["from"] + 1)
            position = index + min(max(part, 0.0), 1.0)
            break
    x = _AXIS_WIDTH + position * step
    left = x > _AXIS_WIDTH + (_INNER - _AXIS_WIDTH) / 2
    label = _text(x - 6 if left else x + 6, 34, f"max_length {max_length:,}", "label", "end" if left else "start")
    return f'<line class="mark" x1="{x:.2f}" x2="{x:.2f}" y1="26" y2="{_BASELINE}"/>{label}'


def _languages(shares: Mapping[str, float]) -> Panel:
    """A stacked bar and its legend; small languages are summed up as others."""
    total = sum(shares.values())
    if total <= 0:
        return 0, ""
    ranked = sorted(((code, share / total) for code, share in shares.items() if share > 0), key=lambda one: -one[1])
    if len(ranked) > _MAX_LANGUAGES + 1:
        ranked = [*ranked[:_MAX_LANGUAGES], ("others", sum(share for _, share in ranked[_MAX_LANGUAGES:]))]
    svg, x = _text(0, 14, "Languages", "head"), 0.0
    for index, ((code, share), colour) in enumerate(zip(ranked, _COLOURS, strict=False)):
        label = f"{'unknown' if code == '?' else _shorten(code, 9)} {_percent(share)}"
        left, y = index % _LEGEND_COLUMNS * _INNER / _LEGEND_COLUMNS, 74 + index // _LEGEND_COLUMNS * 22
        svg += (
            f'<rect class="share" x="{x:.2f}" y="28" width="{share * _INNER:.2f}" height="22" fill="{colour}">'
            f"<title>{_escape(code)} {_percent(share)}</title></rect>"
            f'<rect x="{left:.2f}" y="{y - 10}" width="11" height="11" rx="2" fill="{colour}"/>'
            f"{_text(left + 18, y, label)}"
        )
        x += share * _INNER
    return 74 + (len(ranked) - 1) // _LEGEND_COLUMNS * 22 + 4, svg


def _fill(fill: float | None) -> Panel:
    if fill is None:
        return 0, ""
    share = min(max(float(fill), 0.0), 1.0)
    return 46, (
        _text(0, 14, "Rows filled with tokens", "head")
        + _text(_INNER, 14, _percent(share), "", "end")
        + f'<rect class="track" y="28" width="{_INNER}" height="14" rx="3"/>'
        + f'<rect class="bar" y="28" width="{share * _INNER:.2f}" height="14" rx="3"/>'
    )


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    attributes = (f' class="{style}"' if style else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text x="{x:.2f}" y="{y:.2f}"{attributes}>{_escape(text)}</text>'


def _escape(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return escape("".join(c if c.isprintable() else " " for c in text))


def _shorten(text: str, most: int) -> str:
    """At most `most` letters wide; a wide character counts as 1.8."""
    left = float(most)
    for index, character in enumerate(text):
        left -= 1.8 if east_asian_width(character) in "WF" else 1
        if left < 0:
            return text[: max(index - 1, 0)] + "…"
    return text


def _format_range(one: Bin) -> str:
    return f"{one['from']:,}–{one['to']:,}" if one["from"] != one["to"] else f"{one['to']:,}"


def _abbreviate(number: int) -> str:
    """Powers of two in units of 1,024 (2048 is 2k); other large numbers with separators or in millions."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if number >= size and number % size == 0 and number & (number - 1) == 0:
            return f"{number // size}{letter}"
    for size, letter in ((10**9, "G"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:,}"


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
