"""A data report as a picture: how long the documents are, in which languages, and how full the rows are.

Plain SVG with system fonts: it opens in any browser, on a light or a dark background, and needs no library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from unicodedata import east_asian_width

WIDTH = 720
MARGIN = 32
INNER = WIDTH - 2 * MARGIN
AXIS = 52
PLOT = 190
LANGUAGES_SHOWN = 8
COLOURS = ("#2f6fb5", "#d9822b", "#2f9e77", "#b5519b", "#c9a227", "#5b57b8", "#3aa3c2", "#c44e52", "#8a8f98")
BLOCKS = " ▏▎▍▌▋▊▉█"

_STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Noto Sans CJK SC", sans-serif;
         font-size: 13px; fill: #24292f; font-variant-numeric: tabular-nums }
  .page { fill: #ffffff } .title { font-size: 19px; font-weight: 600 } .head { font-size: 14px; font-weight: 600 }
  .soft { fill: #5f6873; font-size: 12px } .value { font-size: 17px; font-weight: 600 }
  .track { fill: #e7eaee } .grid { stroke: #e7eaee } .axis { stroke: #a5adb6 }
  .bar { fill: #2f6fb5 } .long { fill: #d9822b }
  .mark { stroke: #c2410c; stroke-width: 1.5; stroke-dasharray: 4 3 } .told { fill: #c2410c; font-size: 12px }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e9ed } .page { fill: #14181d } .soft { fill: #9aa4af } .track { fill: #2b323a }
    .grid { stroke: #2b323a } .axis { stroke: #5f6873 } .bar { fill: #5b9bdf } .long { fill: #e59a4f }
    .mark { stroke: #f28b54 } .told { fill: #f28b54 }
  }
"""


def report_svg(facts: Mapping[str, Any]) -> str:
    """The whole picture. A key that is missing or empty leaves its part out."""
    panels = [
        _figures(facts),
        _lengths(facts.get("lengths") or [], facts.get("max_length")),
        _languages(facts.get("languages") or {}),
        _fill(facts.get("fill")),
    ]
    return histogram_svg(str(facts.get("title") or "Data"), [panel for panel in panels if panel[0]])


def histogram_svg(title: str, panels: Sequence[tuple[int, str]]) -> str:
    """Panels one below the other, each a height and what is drawn in it from its own upper left corner."""
    top, parts = 72, []
    for height, drawn in panels:
        parts.append(f'<g transform="translate({MARGIN} {top})">{drawn}</g>')
        top += height + 28
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}">'
        f"<title>{_safe(title)}</title><style>{_STYLE}</style>"
        f'<rect class="page" width="{WIDTH}" height="{top}" rx="8"/>'
        + _text(MARGIN, 44, _shortened(title, 54), "title")
        + "\n".join(parts)
        + "</svg>\n"
    )


def histogram_text(lengths: Sequence[Mapping[str, int]], width: int = 40) -> list[str]:
    """The same histogram for the terminal, a line a bin."""
    counts = [_count(one) for one in lengths]
    names = [_range(one) for one in lengths]
    most = max(counts, default=0)
    wide, digits = max(map(len, names), default=0), len(f"{most:,}")
    bars = [_blocks(count / max(most, 1), width) for count in counts]
    return [
        f"{name:>{wide}}  {bar:<{width}}  {count:>{digits},}"
        for name, bar, count in zip(names, bars, counts, strict=True)
    ]


def _figures(facts: Mapping[str, Any]) -> tuple[int, str]:
    """The numbers, in columns."""
    words = {"documents": "documents", "tokens": "tokens", "trained_tokens": "trained on"}
    words |= {"truncated": "cut", "duplicates": "exact duplicates"}
    given = [(_figure(int(facts[key])), word) for key, word in words.items() if facts.get(key) is not None]
    step = INNER / max(len(given), 4)
    drawn = [
        _text(place * step, 16, value, "value") + _text(place * step, 36, word, "soft")
        for place, (value, word) in enumerate(given)
    ]
    return (36 if given else 0), "".join(drawn)


def _lengths(lengths: Sequence[Mapping[str, int]], max_length: int | None) -> tuple[int, str]:
    if not lengths:
        return 0, ""
    most = max(map(_count, lengths))
    ceiling = _round_up(most)
    ground = 40 + PLOT
    step = (INNER - AXIS) / len(lengths)
    drawn = [_text(0, 14, "Documents by length in tokens", "head"), _scale(ceiling, ground)]
    gap = min(12.0, step * 0.18)
    for place, one in enumerate(lengths):
        tall = PLOT * _count(one) / ceiling
        kind = "long" if max_length and one["from"] > max_length else "bar"
        drawn.append(
            f'<rect class="{kind}" x="{AXIS + place * step + gap / 2:.2f}" y="{ground - tall:.2f}" '
            f'width="{step - gap:.2f}" height="{tall:.2f}">'
            f"<title>{_range(one)} tokens: {_count(one):,} documents</title></rect>"
        )
    drawn += _under(lengths, step, ground + 18)
    if max_length:
        drawn.append(_mark(lengths, step, max_length, ground))
    return ground + 20, "".join(drawn)


def _scale(ceiling: int, ground: int) -> str:
    """Lines behind the bars, with their counts."""
    lines = []
    ticks = sorted({ceiling * part // 4 for part in range(5)} if ceiling >= 4 else set(range(ceiling + 1)))
    for count in ticks:
        y = ground - PLOT * count / ceiling
        lines.append(
            f'<line class="{"grid" if count else "axis"}" x1="{AXIS}" x2="{INNER}" y1="{y:.2f}" y2="{y:.2f}"/>'
            + _text(AXIS - 8, y + 4, _brief(count), "soft", "end")
        )
    return "".join(lines)


def _under(lengths: Sequence[Mapping[str, int]], step: float, y: float) -> list[str]:
    """The upper end of each bin, or of every second or third where there is no room."""
    names = [_brief(one["to"]) for one in lengths]
    every = max(1, -(-int(max(map(len, names)) * 7.2 + 8) // max(1, int(step))))
    last = len(names) - 1
    return [
        _text(AXIS + (place + 0.5) * step, y, f"≤ {name}" if step >= 44 and every == 1 else name, "soft", "middle")
        for place, name in enumerate(names)
        if (last - place) % every == 0
    ]


def _mark(lengths: Sequence[Mapping[str, int]], step: float, max_length: int, ground: int) -> str:
    """Where max_length cuts: within its bin in proportion, at the right edge when all documents are shorter."""
    place = float(len(lengths))
    for number, one in enumerate(lengths):
        if max_length <= one["to"]:
            part = (max_length - one["from"] + 1) / (one["to"] - one["from"] + 1)
            place = number + min(max(part, 0.0), 1.0)
            break
    x = AXIS + place * step
    end = x > AXIS + (INNER - AXIS) / 2
    label = f"max_length {max_length:,}"
    return f'<line class="mark" x1="{x:.2f}" x2="{x:.2f}" y1="26" y2="{ground}"/>' + _text(
        x - 6 if end else x + 6, 34, label, "told", "end" if end else "start"
    )


def _languages(shares: Mapping[str, float]) -> tuple[int, str]:
    """A stacked bar and its legend; what is beyond the largest goes together."""
    total = sum(shares.values())
    if total <= 0:
        return 0, ""
    ranked = sorted(((code, share / total) for code, share in shares.items() if share > 0), key=lambda one: -one[1])
    if len(ranked) > LANGUAGES_SHOWN + 1:
        ranked = [*ranked[:LANGUAGES_SHOWN], ("others", sum(share for _, share in ranked[LANGUAGES_SHOWN:]))]
    drawn, x = [_text(0, 14, "Languages", "head")], 0.0
    for (code, share), colour in zip(ranked, COLOURS, strict=False):
        drawn.append(
            f'<rect class="share" x="{x:.2f}" y="28" width="{share * INNER:.2f}" height="22" fill="{colour}">'
            f"<title>{_safe(code)} {_percent(share)}</title></rect>"
        )
        x += share * INNER
    across = 5
    for place, ((code, share), colour) in enumerate(zip(ranked, COLOURS, strict=False)):
        left, y = place % across * INNER / across, 74 + place // across * 22
        drawn.append(f'<rect x="{left:.2f}" y="{y - 10}" width="11" height="11" rx="2" fill="{colour}"/>')
        name = "not told" if code == "?" else _shortened(code, 9)
        drawn.append(_text(left + 18, y, f"{name} {_percent(share)}"))
    return 74 + (len(ranked) - 1) // across * 22 + 4, "".join(drawn)


def _fill(fill: float | None) -> tuple[int, str]:
    if fill is None:
        return 0, ""
    share = min(max(float(fill), 0.0), 1.0)
    return 46, (
        _text(0, 14, "Rows filled with tokens", "head")
        + _text(INNER, 14, _percent(share), "", "end")
        + f'<rect class="track" y="28" width="{INNER}" height="14" rx="3"/>'
        + f'<rect class="bar" y="28" width="{share * INNER:.2f}" height="14" rx="3"/>'
    )


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    look = f' class="{kind}"' if kind else ""
    side = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.2f}" y="{y:.2f}"{look}{side}>{_safe(words)}</text>'


def _safe(words: str) -> str:
    """Escaped, and without the control characters that XML cannot hold."""
    return escape("".join(c if c.isprintable() else " " for c in words))


def _shortened(words: str, most: int) -> str:
    """No wider than `most` letters; a wide character takes the room of almost two."""
    room = float(most)
    for place, character in enumerate(words):
        room -= 1.8 if east_asian_width(character) in "WF" else 1
        if room < 0:
            return words[: max(place - 1, 0)] + "…"
    return words


def _count(one: Mapping[str, int]) -> int:
    return int(one["documents"])


def _range(one: Mapping[str, int]) -> str:
    return f"{one['from']:,}–{one['to']:,}" if one["from"] != one["to"] else f"{one['to']:,}"


def _brief(number: int) -> str:
    """Powers of two as people say them (2048 is 2k), other large numbers with separators or in millions."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if number >= size and number % size == 0 and number & (number - 1) == 0:
            return f"{number // size}{letter}"
    for size, letter in ((10**9, "G"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:,}"


def _figure(number: int) -> str:
    return f"{number:,}" if number < 10**9 else f"{number / 10**9:,.2f} billion"


def _round_up(number: int) -> int:
    """The next number with one round digit, so that the scale reads well."""
    if number <= 4:
        return max(number, 1)
    size = 10 ** (len(str(number)) - 1)
    for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10):
        if step * size >= number and step * size % 4 == 0:
            return int(step * size)
    return -(-number // 4) * 4


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "< 0.1%"


def _blocks(share: float, width: int) -> str:
    """A bar in eighths of a character; something, where there is something."""
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    return "█" * (eighths // 8) + (BLOCKS[eighths % 8] if eighths % 8 else "")
