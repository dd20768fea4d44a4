"""SSH by asyncssh: connecting, checking host keys, opening channels and forwards."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.remote.asyncssh_auth import authenticate_at_once, can_authenticate_at_once
from sojourn.remote.asyncssh_channel import (
    PACKET_BYTES,
    STDERR_BYTES,
    WINDOW_BYTES,
    AsyncsshChannel,
    Opening,
    new_session,
)
from sojourn.remote.asyncssh_loop import Loop, wait
from sojourn.remote.connection import (
    KEEPALIVE_COUNT,
    KEEPALIVE_SECONDS,
    Channel,
    ChannelRefused,
    CommandTimeout,
    Completed,
    ConnectionLost,
    auth_failed,
    command_line,
    connection_lost,
    no_pinned_key,
    unreachable,
)
from sojourn.remote.hosts import Host

if TYPE_CHECKING:
    import asyncssh

_CONNECT_ROUND_TRIPS = 4  # about: TCP, version, key exchange, authentication
_SURELY_FAR_SECONDS, _PINGS = 0.06, 4
_CIPHERS = ["aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "chacha20-poly1305@openssh.com", "aes128-ctr"]


def connect_asyncssh(
    host: Host, password: str | None, timeout: float, ahead: Sequence[Sequence[str]]
) -> AsyncsshConnection:
    import asyncssh

    began = time.monotonic()
    openings: list[Opening] = []
    try:
        opened = wait(_connect(host, password, timeout, ahead, openings), timeout + 1)
    except asyncssh.PermissionDenied as error:
        raise auth_failed(host, "" if "Permission denied" in str(error) else str(error)) from None
    except asyncssh.KeyImportError as error:
        raise UserError(f"{host.name}: the key cannot be used: {error}; load it into ssh-agent: ssh-add FILE") from None
    except (concurrent.futures.TimeoutError, asyncio.TimeoutError):
        raise unreachable(host, f"no answer within {timeout:g} seconds") from None
    except asyncssh.Error as error:
        if "authentication failures" in error.reason:  # an agent with many keys
            raise auth_failed(host, error.reason) from None
        raise unreachable(host, f"SSH failed: {error.reason or error}") from None
    except OSError as error:
        raise unreachable(host, os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)) from None
    return AsyncsshConnection(host, opened, time.monotonic() - began, openings)


async def _connect(
    host: Host, password: str | None, timeout: float, ahead: Sequence[Sequence[str]], openings: list[Opening]
) -> asyncssh.SSHClientConnection:
    """`openings` gets the channels for `ahead`."""
    from sojourn.remote.ssh_line import parse_address

    def open_ahead(connection: asyncssh.SSHClientConnection) -> None:
        openings[:] = [Opening(connection, command_line(argv), STDERR_BYTES) for argv in ahead]

    async def through_all() -> asyncssh.SSHClientConnection:
        tunnel: asyncssh.SSHClientConnection | None = None
        try:
            for line in host.jump:
                user, address, port = parse_address(line)
                tunnel = await _hop(host, user or host.user, address, port or 22, None, tunnel)
            return await _hop(host, host.user, host.address, host.port, password, tunnel, open_ahead)
        except BaseException:
            if tunnel is not None:
                tunnel.abort()
            raise

    return await asyncio.wait_for(through_all(), timeout)


async def _hop(
    host: Host,
    user: str,
    address: str,
    port: int,
    password: str | None,
    tunnel: asyncssh.SSHClientConnection | None,
    authenticating: Callable[[asyncssh.SSHClientConnection], None] = lambda connection: None,
) -> asyncssh.SSHClientConnection:
    import asyncssh

    from sojourn.remote.keys import host_key_changed, pinned_keys

    pinned = [asyncssh.import_public_key(key) for key in pinned_keys(address, port)]
    if not pinned:
        raise no_pinned_key(host, address, port)
    shown: list[asyncssh.SSHKey] = []
    at_once = False

    class Client(asyncssh.SSHClient):
        def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
            if at_once:
                authenticate_at_once(conn, authenticating)

        def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
            shown.append(key)
            return False

    options = {
        **_options(pinned),
        "username": user,
        "password": password,
        "tunnel": tunnel or (),
        "client_factory": Client,
    }
    attempts = _attempts(host, password)
    for index, attempt in enumerate(attempts):
        try:
            if attempt.get("client_keys"):
                attempt["client_keys"] = keys = asyncssh.load_keypairs(attempt["client_keys"])
                at_once = bool(keys) and can_authenticate_at_once(keys[0])
                if at_once:
                    with contextlib.suppress(asyncssh.ConnectionLost, asyncssh.ProtocolError):
                        return await asyncssh.connect(address, port, **options, **attempt)
            at_once = False  # also for a server that wants each answer read before the next request
            return await asyncssh.connect(address, port, **options, **attempt)
        except asyncssh.HostKeyNotVerifiable:
            raise (
                host_key_changed(host, address, port, _public_line(shown[-1]))
                if shown
                else no_pinned_key(host, address, port)
            ) from None
        except (asyncssh.PermissionDenied, asyncssh.KeyImportError):
            if index + 1 == len(attempts):
                raise
    raise AssertionError("unreachable")


def _options(pinned: list[asyncssh.SSHKey]) -> dict[str, Any]:
    """The same for every connection. `pinned`: the host's keys."""
    return {
        "config": None,
        "known_hosts": (pinned, [], []),
        "server_host_key_algs": [*dict.fromkeys(alg for key in pinned for alg in _algorithms(key)), *_host_key_algs()],
        "encryption_algs": _CIPHERS,
        "compression_algs": None,
        "keepalive_interval": KEEPALIVE_SECONDS,
        "keepalive_count_max": KEEPALIVE_COUNT,
        "gss_auth": False,
        "gss_kex": False,
    }


def _attempts(host: Host, password: str | None) -> list[dict[str, Any]]:
    """The host's key or ours first and alone, since servers close the connection after a few keys; then the agent and
    the user's. A password is sent once, and no key with it: each failure counts towards a lockout."""
    from sojourn.remote.keys import key_path

    if host.key and not expand_user(host.key).is_file():
        raise UserError(f"{host.name}: the key {host.key} does not exist; add the host again with another one")
    if password is not None:
        return [{"client_keys": None, "agent_path": None}]
    own = [expand_user(path) for path in (host.key, key_path()) if path]
    return [*({"client_keys": [str(key)], "agent_path": None} for key in own if key.is_file()), {}]


def _algorithms(key: asyncssh.SSHKey) -> list[str]:
    return [name.decode() for name in key.sig_algorithms if name != b"ssh-rsa"]


def _host_key_algs() -> list[str]:
    return [
        "ssh-ed25519",
        "ecdsa-sha2-nistp256",
        "ecdsa-sha2-nistp384",
        "ecdsa-sha2-nistp521",
        "rsa-sha2-512",
        "rsa-sha2-256",
    ]


def _public_line(key: asyncssh.SSHKey) -> str:
    return key.export_public_key().decode().strip()


class AsyncsshConnection:
    def __init__(
        self, host: Host, connection: asyncssh.SSHClientConnection, seconds: float, openings: list[Opening]
    ) -> None:
        """`seconds`: what making the connection took. `openings`: channels that are being opened, also over connections
        that have failed since."""
        self._host, self._connection = host, connection
        self._openings = [opening for opening in openings if opening.connection is connection]
        self._round_trip = seconds / (1 + len(host.jump)) / _CONNECT_ROUND_TRIPS
        self._pinged = threading.Event()
        self.takes_sockets = True
        asyncio.run_coroutine_threadsafe(self._ping(), Loop.get())

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        channel = self._open(command_line(argv, env), keep_stderr=None)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            with contextlib.suppress(ConnectionLost):  # it may end before it has read this; a lost link shows below
                channel.write(input)
            channel.write_eof()
            parts: list[bytes] = []
            while part := channel.read(1 << 20, deadline):
                parts.append(part)
            return Completed(channel.exit_code(deadline), b"".join(parts), channel.stderr)
        except TimeoutError:
            raise CommandTimeout(f"{self._host.name}: {argv[0]} did not end within {timeout:g} seconds") from None
        finally:
            channel.close()

    def open(self, argv: Sequence[str]) -> Channel:
        return self._open(command_line(argv), keep_stderr=STDERR_BYTES)

    def _open(self, command: str, keep_stderr: int | None) -> AsyncsshChannel:
        import asyncssh

        async def opened() -> Opening:
            waiting = [opening for opening in self._openings if opening.command == command and keep_stderr]
            if waiting:
                self._openings.remove(waiting[0])
            opening = waiting[0] if waiting else Opening(self._connection, command, keep_stderr)
            await opening.session.opened
            return opening

        try:
            opening = wait(opened())
        except asyncssh.ChannelOpenError as error:
            if self._connection.is_closed():
                raise connection_lost(self._host, error.reason) from None
            raise ChannelRefused(f"{self._host.name}: the box refuses another channel: {error.reason}") from None
        except (asyncssh.Error, OSError, asyncio.CancelledError) as error:
            raise connection_lost(self._host, str(error)) from None
        return AsyncsshChannel(self._host, opening.session, opening.mark)

    def open_socket(self, path: str) -> Channel | None:
        import asyncssh

        session = new_session(STDERR_BYTES)

        async def opened() -> None:
            await self._connection.create_unix_connection(
                lambda: session, path, encoding=None, window=WINDOW_BYTES, max_pktsize=PACKET_BYTES
            )

        try:
            wait(opened())
        except asyncssh.ChannelOpenError as error:
            if self._connection.is_closed():
                raise connection_lost(self._host, error.reason) from None
            self.takes_sockets = False
            return None
        except (asyncssh.Error, OSError, asyncio.CancelledError) as error:
            raise connection_lost(self._host, str(error)) from None
        return AsyncsshChannel(self._host, session, None)

    def forward(self, local_port: int, remote_port: int, remote_host: str = "127.0.0.1") -> int:
        import asyncssh

        async def listen() -> asyncssh.SSHListener:
            return await self._connection.forward_local_port("127.0.0.1", local_port, remote_host, remote_port)

        try:
            listener = wait(listen())
        except OSError as error:
            raise UserError(f"port {local_port} of this machine cannot be used: {error.strerror or error}") from None
        except asyncssh.Error as error:
            raise connection_lost(self._host, str(error)) from None
        return listener.get_port()

    async def _ping(self) -> None:
        """The least of several, since a busy machine answers late."""
        with contextlib.suppress(Exception):
            for _ in range(_PINGS):
                began = time.monotonic()
                # What asyncssh sends as its own keepalive; it has no public name for it.
                await self._connection._make_global_request(b"keepalive@openssh.com")
                self._round_trip = min(self._round_trip, time.monotonic() - began)
                self._pinged.set()

    def round_trip(self) -> float | None:
        """Measured in the background since the connection was made. What making it took is a guide until then, and
        enough for a box that is far away; for another one the answer comes soon."""
        if self._round_trip < _SURELY_FAR_SECONDS:
            self._pinged.wait(2 * _SURELY_FAR_SECONDS)
        return self._round_trip

    @property
    def is_closed(self) -> bool:
        return self._connection.is_closed()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            Loop.get().call_soon_threadsafe(self._connection.abort)
