"""A real sshd on 127.0.0.1 with this machine's files, for tests of the transport; and its pinned key."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sojourn.remote.hosts import Host

_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
_CONFIG = """
{extra}
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
MaxStartups 100
UseDNS no
SetEnv HOME={folder}/home
LogLevel ERROR
"""

needs_sshd = pytest.mark.skipif(
    _SSHD is None or sys.platform == "win32" or os.geteuid() != 0,
    reason="needs root, and sshd (Debian: openssh-server)",
)


@dataclass
class PlainSshd:
    """`config`: for SOJOURN_CONFIG."""

    folder: Path
    config: Path
    host: Host
    process: subprocess.Popen[bytes]

    def through(self, port: int) -> Host:
        """The same server by another port, with its key pinned."""
        key = " ".join((self.folder / "host.pub").read_text().split()[:2])
        with (self.config / "known_hosts").open("a") as file:
            file.write(f"[127.0.0.1]:{port} {key}\n")
        return replace(self.host, port=port)


@contextlib.contextmanager
def plain_sshd(folder: Path, extra: str = "") -> Iterator[PlainSshd]:
    """`extra`: lines of its configuration, before the others. It logs to `log` in the folder."""
    for name in ("host", "client"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "client.pub", folder / "authorized")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    (folder / "home").mkdir()  # not the user's own: their ~/.bashrc may take long, or print
    (folder / "config").write_text(_CONFIG.format(folder=folder, port=port, extra=extra))
    Path("/run/sshd").mkdir(exist_ok=True)
    arguments = ["-D", "-E", str(folder / "log"), "-f", str(folder / "config")]
    process = subprocess.Popen([str(_SSHD), *arguments], stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        config = folder / "sojourn"
        config.mkdir()
        host = Host("box", "root", "127.0.0.1", port, key=str(folder / "client"), python=sys.executable)
        server = PlainSshd(folder, config, host, process)
        server.through(port)
        yield server
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as link:
                if link.recv(4) == b"SSH-":
                    return
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(0.02)
