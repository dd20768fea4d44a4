"""What all kinds of text share in one language: its common words, and how sentences and lists are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tongue:
    names: Sequence[str]
    weekdays: Sequence[str]
    months: Sequence[str]
    objects: Sequence[str]
    things: Sequence[str]  # in their plural, where there is one
    listed: Callable[[Sequence[str]], str]
    space: str  # between sentences
    comma: str
    stop: str
