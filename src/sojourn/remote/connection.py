"""One SSH connection to a host, with many channels; whoever speaks SSH below it."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sojourn.errors import UserError
from sojourn.remote.hosts import Host

CONNECT_SECONDS = 15.0
# A dead link is noticed after (KEEPALIVE_COUNT + 1) * KEEPALIVE_SECONDS without an answer.
KEEPALIVE_SECONDS = 4.0
KEEPALIVE_COUNT = 2
FAR_SECONDS = 0.03  # a round trip from which on it pays to save some
MOST_BANNER_BYTES = 1 << 20
_UNLIKE_IN_SHELLS = frozenset("\\'!\n\r\t")


class ConnectionLost(UserError):
    """The link broke; what was under way on the box may go on there."""

    code = 1


class HostUnreachable(UserError):
    """No answer, or no SSH server."""

    code = 1


class AuthFailed(UserError):
    """Neither key nor password was accepted."""


class HostKeyChanged(UserError):
    """The box shows another host key than the one that was pinned."""


class CommandTimeout(UserError):
    """A command on the box took longer than it was given; the link itself is good."""

    code = 1


class ChannelRefused(UserError):
    """The SSH server allows no more channels on this connection (MaxSessions)."""

    code = 1


class CommandRefused(UserError):
    """The SSH server has opened a channel, but runs no command in it."""

    code = 1


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

    @property
    def stderr(self) -> bytes:
        """The last 64 KiB of what the command has written there."""


class Runner(Protocol):
    """A connection or a box."""

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Completed: ...


class Connection(Runner, Protocol):
    @property
    def takes_sockets(self) -> bool:
        """False where `open_socket` is known to give None."""

    def open(self, argv: Sequence[str]) -> Channel: ...

    def open_socket(self, path: str) -> Channel | None:
        """To a Unix socket on the box; None where this SSH cannot, or the server does not allow it."""

    def forward(self, local_port: int, remote_port: int, remote_host: str = "127.0.0.1") -> int:
        """Listens on 127.0.0.1; the port that it got, which is another one where `local_port` is 0."""

    def round_trip(self) -> float | None:
        """Seconds that a message and its answer take; None where that is not known."""

    def close(self) -> None: ...


def no_pinned_key(host: Host, address: str, port: int) -> UserError:
    return UserError(
        f"{host.name}: no host key is pinned for {address} port {port}; add the host first: "
        f'sojourn host add {host.name} "{host.ssh_line}"'
    )


def unreachable(host: Host, reason: str) -> HostUnreachable:
    return HostUnreachable(
        f"{host.name}: {host.address} port {host.port} cannot be reached: {reason}; is the box running? "
        f"sojourn host check {host.name}"
    )


def connection_lost(host: Host, reason: str = "") -> ConnectionLost:
    return ConnectionLost(f"{host.name}: the connection is lost{f': {reason}' if reason else ''}")


def auth_failed(host: Host, reason: str = "") -> AuthFailed:
    return AuthFailed(
        f"{host.name}: {host.user}@{host.address} port {host.port} accepts neither our key nor the password"
        f"{f' ({reason})' if reason else ''}; give its password once: sojourn host add {host.name} "
        f'"{host.ssh_line}" --replace'
    )


def command_line(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """For the login shell on the box, which may be bash, dash, fish or csh: what these read differently goes through
    printf and sh."""
    words = [*(["env", *(f"{name}={value}" for name, value in env.items())] if env else []), *argv]
    if any("\0" in word for word in words):
        raise ValueError("a command cannot contain a NUL byte")
    if not any(_UNLIKE_IN_SHELLS & set(word) for word in words):
        return shlex.join(words)
    octal = "".join(f"\\0{byte:03o}" for byte in shlex.join(words).encode("utf-8", "surrogateescape"))
    return f'exec sh -c \'eval "$(printf %b "{octal}")"\''


class OutputMark:
    """Login scripts may print a banner on stdout before the command runs. The command prints a mark first, and readers
    drop everything up to it."""

    def __init__(self) -> None:
        self._mark = f"sojourn-{secrets.token_hex(8)}"
        self._before: bytearray | None = bytearray()

    def mark(self, command: str) -> str:
        return f"echo {self._mark}; {command}"

    def strip(self, data: bytes) -> bytes:
        """What of the next `data` comes after the mark."""
        if self._before is None:
            return data
        self._before += data
        found = self._before.find(self._mark.encode() + b"\n")
        if found >= 0:
            rest = bytes(self._before[found + len(self._mark) + 1 :])
            self._before = None
            return rest
        if len(self._before) > MOST_BANNER_BYTES:
            raise UserError(
                f"the login shell on the box prints more than {MOST_BANNER_BYTES:,} bytes before any command"
            )
        return b""

    def at_end(self) -> bytes:
        """What came without a mark, from a shell that runs only its own commands for example."""
        rest = bytes(self._before or b"")
        self._before = None
        return rest
