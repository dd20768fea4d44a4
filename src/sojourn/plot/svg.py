"""Plots as plain SVG: a few bars and lines do not justify matplotlib (tens of megabytes) on a laptop."""

from __future__ import annotations

import html
from collections.abc import Iterable
from unicodedata import east_asian_width

Panel = tuple[int, str]  # height in pixels, SVG

_WIDTH, _MARGIN = 720, 32
INNER = _WIDTH - 2 * _MARGIN
PLOT_HEIGHT = 190
BASELINE = 40 + PLOT_HEIGHT
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


def page(title: str, panels: Iterable[Panel], heading: bool = True) -> str:
    """The panels that have a height, one below the other. `heading`: False where the page around it has one."""
    top, body = 72 if heading else 20, ""
    for height, svg in panels:
        if height:
            body += f'<g transform="translate({_MARGIN} {top})">{svg}</g>\n'
            top += height + 28
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
        f'<rect class="page" width="{_WIDTH}" height="{top}" rx="8"/>'
        f"{text(_MARGIN, 44, shorten(title, 54), 'title') if heading else ''}{body}</svg>\n"
    )


def text(x: float, y: float, content: str, style: str = "", anchor: str = "start") -> str:
    attributes = (f' class="{style}"' if style else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text x="{x:.2f}" y="{y:.2f}"{attributes}>{escape(content)}</text>'


def escape(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return html.escape("".join(c if c.isprintable() else " " for c in text))


def shorten(text: str, most: int) -> str:
    """At most `most` letters wide; a wide character counts as 1.8."""
    left = float(most)
    for index, character in enumerate(text):
        left -= 1.8 if east_asian_width(character) in "WF" else 1
        if left < 0:
            return text[: max(index - 1, 0)] + "…"
    return text


def abbreviate(number: int) -> str:
    """Powers of two in units of 1,024 (2048 is 2k); other large numbers with separators or in millions."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if number >= size and number % size == 0 and number & (number - 1) == 0:
            return f"{number // size}{letter}"
    for size, letter in ((10**9, "G"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:,}"
