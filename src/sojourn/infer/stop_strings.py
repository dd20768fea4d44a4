"""Stop strings: a text that comes in pieces ends before the first of them, wherever the pieces are divided."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """`stopped` is set once a stop string has come; neither it nor anything after it is given out."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""  # the beginning of a stop string, perhaps
        self.stopped = False

    def add(self, piece: str) -> str:
        """The text that can be given out by now."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back and is no stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
