"""What an export says while it works."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def start(self, what: str, total: int) -> None:
        """`what` begins: so many bytes (or steps) in all."""
        ...

    def advance(self, count: int, is_new: bool = True) -> None:
        """`is_new`: written by this call, not by one that was interrupted."""
        ...

    def say(self, line: str) -> None:
        """A line for the user, such as a fallback."""
        ...


class NoProgress:
    def start(self, what: str, total: int) -> None:
        pass

    def advance(self, count: int, is_new: bool = True) -> None:
        pass

    def say(self, line: str) -> None:
        pass
