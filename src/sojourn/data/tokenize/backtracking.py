"""Finds patterns that a regular expression engine may need exponential time for: a repeated group whose content can
itself match in several ways, such as (a+)+ or (a|a)*."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"\\.|\[(?:\\.|\[:\^?\w+:\]|[^\]\\])(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]"  # an escape, a class
    r"|\((?:\?(?:<?[=!]|<\w+>|P<\w+>|>|[a-zA-Z-]*:))?|\)|\|"
    r"|(?P<repeat>[*+?]|\{\d*,?\d*\})[?+]?|.",
    re.DOTALL,
)
_MOST = 10  # repetitions that are no danger


def may_backtrack(pattern: str) -> bool:
    stack = [_Group()]
    last: _Group | None = None  # the group that ended just before
    for match in _TOKEN.finditer(pattern):
        text = match[0]
        if match["repeat"] and match["repeat"] != "{}":
            least, most = _bounds(match["repeat"])
            if last is not None and most > _MOST and last.is_ambiguous:
                return True
            stack[-1].is_ambiguous |= least != most
            last = None
        elif text.startswith("(") and not text.startswith("(?#"):
            stack.append(_Group())
            last = None
        elif text == ")" and len(stack) > 1:
            last = stack.pop()
            stack[-1].is_ambiguous |= last.is_ambiguous
        else:
            stack[-1].is_ambiguous |= text == "|"
            last = None
    return False


class _Group:
    is_ambiguous = False


def _bounds(repeat: str) -> tuple[int, float]:
    if repeat in "*+?":
        return (1 if repeat == "+" else 0), 1 if repeat == "?" else float("inf")
    low, comma, high = repeat[1:-1].partition(",")
    least = int(low or 0)
    return least, float("inf") if comma and not high else int(high or least)
