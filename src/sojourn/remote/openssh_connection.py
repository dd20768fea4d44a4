"""SSH by an `ssh` child, where ~/.ssh/config needs it: ProxyCommand, hardware keys, Kerberos. Also used for bulk data.

Host keys are checked against our own pinned ones. On POSIX a control master carries all channels over one connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO, cast

from sojourn.errors import UserError
from sojourn.remote.connection import (
    KEEPALIVE_COUNT,
    KEEPALIVE_SECONDS,
    Channel,
    CommandTimeout,
    Completed,
    OutputMark,
    auth_failed,
    command_line,
    connection_lost,
    no_pinned_key,
    unreachable,
)
from sojourn.remote.hosts import Host

_POSIX = os.name == "posix"
_SSH_FAILED = 255
_SHELL_SECONDS, _CONNECT_ROUND_TRIPS = 0.3, 9  # about
_READ_AHEAD = 64  # blocks
_UNREACHABLE = re.compile(
    "timed out|refused|No route|unreachable|Could not resolve|not known|Connection closed|Connection reset|banner"
)


def ssh_program() -> str | None:
    from shutil import which

    return which("ssh")


def ssh_options(host: Host, timeout: float) -> list[str]:
    """For `ssh`, without the destination; never asks anything, never accepts a key that is not pinned."""
    from sojourn.remote.keys import key_path, known_hosts_name, known_hosts_path

    given = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": _quoted(known_hosts_path()),
        "GlobalKnownHostsFile": os.devnull if _POSIX else "none",
        "HostKeyAlias": known_hosts_name(host.address, host.port),
        "UpdateHostKeys": "no",
        "CheckHostIP": "no",
        "ConnectTimeout": str(max(1, round(timeout))),
        "ServerAliveInterval": str(round(KEEPALIVE_SECONDS)),
        "ServerAliveCountMax": str(KEEPALIVE_COUNT),
        "Ciphers": "^aes128-gcm@openssh.com",
        "Compression": "no",
        "EscapeChar": "none",
        "LogLevel": "ERROR",
    }
    # A host that the user did not name by ~/.ssh/config is reached without it.
    options = ["-F", "none"] if host.transport == "asyncssh" else []
    options += [part for name, value in given.items() for part in ("-o", f"{name}={value}")]
    options += [part for option in host.options for part in ("-o", option)]
    if host.key:
        options += ["-i", host.key]
    elif key_path().is_file():
        options += ["-i", str(key_path())]
    options += ["-p", str(host.port), "-l", host.user]
    if host.jump:
        options += ["-J", ",".join(host.jump)]
    return options


def _quoted(path: Path) -> str:
    return f'"{path}"' if " " in str(path) else str(path)


def destination(host: Host) -> list[str]:
    return ["--", host.config_name or f"{host.user}@{host.address}"]


def connect_openssh(host: Host, timeout: float) -> OpensshConnection:
    from sojourn.remote.keys import pinned_keys

    if ssh_program() is None:
        raise UserError(f"{host.name}: this host needs the ssh program, which is not installed; install OpenSSH")
    if not pinned_keys(host.address, host.port):
        raise no_pinned_key(host, host.address, host.port)
    connection = OpensshConnection(host, timeout)
    connection.check()
    return connection


class OpensshConnection:
    def __init__(self, host: Host, timeout: float, share: bool = _POSIX) -> None:
        self._host, self._timeout = host, timeout
        self._ssh = [str(ssh_program()), *ssh_options(host, timeout)]
        self._control: Path | None = None
        self._round_trip = 0.0
        self._children: list[subprocess.Popen[bytes]] = []
        if share:
            # A socket's path has at most about 100 bytes, so it is not in the configuration folder.
            self._folder = tempfile.TemporaryDirectory(prefix="sjn-", dir="/tmp")
            name = hashlib.sha256(host.name.encode()).hexdigest()[:8]
            self._control = Path(self._folder.name) / name
            self._ssh += ["-o", "ControlMaster=auto", "-o", f"ControlPath={self._control}", "-o", "ControlPersist=60"]

    def check(self) -> None:
        channel = self._open(["true"])
        began = time.monotonic()
        code = channel.wait(self._timeout + 5)
        self._round_trip = max(0.0, time.monotonic() - began - _SHELL_SECONDS) / _CONNECT_ROUND_TRIPS
        if code == _SSH_FAILED:
            raise self._failure(channel.stderr, before=True)

    def _failure(self, stderr: bytes, before: bool = False) -> UserError:
        text = stderr.decode(errors="replace").strip()
        last = text.splitlines()[-1] if text else "no answer"
        if "REMOTE HOST IDENTIFICATION HAS CHANGED" in text or "Host key verification failed" in text:
            from sojourn.remote.keys import host_key_changed

            return host_key_changed(self._host, self._host.address, self._host.port, _shown_key(text))
        if not before:
            return connection_lost(self._host, last)
        if "Permission denied" in text or "authentication" in text.lower():
            return auth_failed(self._host, last)
        return unreachable(self._host, last)

    def _open(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> OpensshChannel:
        mark = OutputMark()
        command = [*self._ssh, "-T", *destination(self._host), mark.mark(command_line(argv, env))]
        flags = getattr(subprocess, "CREATE_NO_WINDOW", 0)
        # A session of its own: Ctrl-C in the terminal is for us to answer, not for every child.
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=_POSIX,
            creationflags=flags,
        )
        _widen(child.stdin)
        self._children = [other for other in self._children if other.poll() is None] + [child]
        return OpensshChannel(self, child, mark)

    takes_sockets = False

    def open_socket(self, path: str) -> Channel | None:
        return None

    def open(self, argv: Sequence[str]) -> Channel:
        return self._open(argv)

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        channel = self._open(argv, env)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            channel.write_all(input)
            parts = []
            while part := channel.read(1 << 20, deadline):
                parts.append(part)
            code = channel.wait(None if deadline is None else max(0.1, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            raise CommandTimeout(f"{self._host.name}: {argv[0]} did not end within {timeout:g} seconds") from None
        finally:
            channel.close()
        if code == _SSH_FAILED:
            raise self._failure(channel.stderr)
        return Completed(code, b"".join(parts), channel.stderr)

    def forward(self, local_port: int, remote_port: int, remote_host: str = "127.0.0.1") -> int:
        port = local_port or _free_port()
        if not _is_free(port):
            raise UserError(f"port {port} of this machine is in use; give another one")
        spec = f"127.0.0.1:{port}:{remote_host}:{remote_port}"
        own = [self._ssh[0], *ssh_options(self._host, self._timeout), "-o", "ExitOnForwardFailure=yes"]
        child = subprocess.Popen(
            [*own, "-N", "-L", spec, *destination(self._host)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=_POSIX,
        )
        self._children.append(child)
        until = time.monotonic() + self._timeout
        while child.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
            if not _is_free(port):
                return port
        child.kill()
        _, text = child.communicate()
        raise self._failure(text)

    def round_trip(self) -> float | None:
        return self._round_trip

    def close(self) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                stop = [*self._ssh, "-O", "exit", *destination(self._host)]
                subprocess.run(stop, capture_output=True, timeout=5, check=False)
        for child in self._children:
            with contextlib.suppress(OSError):
                child.kill()
                child.wait(5)
        if self._control is not None:
            self._folder.cleanup()


class OpensshChannel:
    """A thread reads ahead, since a read of a pipe cannot be interrupted on Windows."""

    def __init__(self, connection: OpensshConnection, child: subprocess.Popen[bytes], mark: OutputMark) -> None:
        self._connection, self._child, self._mark = connection, child, mark
        self._in, self._out, self._err = (cast(BinaryIO, end) for end in (child.stdin, child.stdout, child.stderr))
        self._blocks: queue.Queue[bytes] = queue.Queue(_READ_AHEAD)
        self._closed = False
        self._stderr = bytearray()
        self._rest = b""
        self._threads = [threading.Thread(target=self._read_out, daemon=True), threading.Thread(target=self._read_err)]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def _read_out(self) -> None:
        block = b"-"
        while block and not self._closed:
            try:
                block = os.read(self._out.fileno(), 1 << 18)
            except (OSError, ValueError):
                block = b""
            while not self._closed:
                with contextlib.suppress(queue.Full):
                    self._blocks.put(block, timeout=0.5)
                    break

    def _read_err(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while block := os.read(self._err.fileno(), 1 << 14):
                self._stderr += block
                del self._stderr[: -(1 << 16)]

    @property
    def stderr(self) -> bytes:
        return bytes(self._stderr)

    def read(self, most: int, deadline: float | None = None) -> bytes:
        while not self._rest:
            data = self._take(deadline)
            if not data:
                self._rest = self._mark.at_end()
                break
            self._rest = self._mark.strip(data)
        part, self._rest = self._rest[:most], self._rest[most:]
        return part

    def _take(self, deadline: float | None) -> bytes:
        while True:
            with contextlib.suppress(queue.Empty):
                block = self._blocks.get(timeout=0.1)
                if not block:
                    self._blocks.put(b"")
                    if self.wait(5) == _SSH_FAILED:
                        raise self._connection._failure(self.stderr)
                return block
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._in.write(view) or 0 :]
        except (OSError, ValueError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(2)
            raise self._connection._failure(self.stderr) from None

    def write_all(self, data: bytes) -> None:
        """And the end of it, while output is read: a command may answer before it has read everything."""

        def send() -> None:
            with contextlib.suppress(UserError, OSError, ValueError):
                self.write(data)
            with contextlib.suppress(OSError):
                self._in.close()

        threading.Thread(target=send, daemon=True).start()

    def wait(self, timeout: float | None) -> int:
        code = _wait_for(self._child, timeout)
        self._threads[1].join(1)
        return code

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._in.close()
        if self._child.poll() is None:
            self._child.terminate()


def _wait_for(child: subprocess.Popen[bytes], timeout: float | None) -> int:
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            return child.wait(0.1)
        except subprocess.TimeoutExpired:
            if until is not None and time.monotonic() > until:
                raise


def _widen(pipe: IO[bytes] | None) -> None:
    """A pipe of 1 MiB, where the system can: a sixteenth of the switches between us and ssh."""
    if pipe is not None and sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    """Asked by binding: a connection would reach the service on the box."""
    with socket.socket() as probe:
        if _POSIX:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _shown_key(text: str) -> str:
    """Of ssh's warning: `The fingerprint for the ED25519 key sent by the remote host is\\nSHA256:…`."""
    found = re.search(r"SHA256:\S+", text)
    return found[0].rstrip(".") if found else "unknown"
