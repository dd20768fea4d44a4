"""One SSH connection to a host, with many channels; whoever speaks SSH below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sojourn.errors import UserError


class ConnectionLost(UserError):
    """The link broke; what was under way on the box may go on there."""


class HostUnreachable(UserError):
    """No answer, or no SSH server."""


class AuthFailed(UserError):
    """Neither key nor password was accepted."""


class HostKeyChanged(UserError):
    """The box shows another host key than the one that was pinned."""


@dataclass(frozen=True)
class Completed:
    code: int
    stdout: bytes
    stderr: bytes


class Channel(Protocol):
    """A command on the box with binary streams."""

    def read(self, most: int) -> bytes:
        """At least one byte; none at the end."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class Connection(Protocol):
    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Completed: ...

    def open(self, argv: Sequence[str]) -> Channel: ...

    def forward(self, local_port: int, remote_port: int, remote_host: str = "127.0.0.1") -> int:
        """Listens on 127.0.0.1; the port that it got, which is another one where `local_port` is 0."""

    def close(self) -> None: ...
