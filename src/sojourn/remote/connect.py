"""Opens the connection to a host, by asyncssh or OpenSSH."""

from __future__ import annotations

from collections.abc import Sequence

from sojourn.remote.connection import CONNECT_SECONDS, Connection
from sojourn.remote.hosts import Host


def connect(
    host: Host,
    password: str | None = None,
    timeout: float = CONNECT_SECONDS,
    ahead: Sequence[Sequence[str]] = (),
) -> Connection:
    """`ahead`: commands that will be opened first. Where the transport can, their channels are asked for while
    authentication is under way.

    Raises HostUnreachable, AuthFailed, HostKeyChanged, or UserError where the host's key was never pinned."""
    if host.transport == "openssh":
        from sojourn.remote.openssh_connection import connect_openssh

        return connect_openssh(host, timeout)
    from sojourn.remote.asyncssh_connection import connect_asyncssh

    return connect_asyncssh(host, password, timeout, ahead)
