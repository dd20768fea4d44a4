"""A rented box: a real sshd in a network, mount and pid namespace of its own, with a root folder of its own.

The root folder is an overlay on this machine's, so the box has its programs and libraries; /root, /tmp and what is
written anywhere are its own. It has a fake nvidia-smi, a platform's folders, and a shutdown that records its calls.
Its image's Python, with torch, is /root/miniconda3/bin/python; the project's own sources are hidden from it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

PASSWORD = "canary-password-7391"
NOT_STARTED = "before the supervisor"
_NEEDED = ("ip", "unshare", "nsenter", "sshd", "ssh-keygen", "chpasswd", "mount")
_NUMBERS = itertools.count()
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SOURCES = Path(__file__).resolve().parents[1] / "src"

_NVIDIA_SMI = """#!/usr/bin/env python3
import json, sys
gpu = json.load(open("/etc/fake-gpu.json"))
if gpu.get("lost"):
    print("Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.  Reboot the system to recover it")
    sys.exit(15)
for word in sys.argv[1:]:
    if word.startswith("--query-gpu="):
        fields = word.split("=", 1)[1].split(",")
        nounits = any("nounits" in other for other in sys.argv)
        units = {"memory.total": " MiB", "memory.used": " MiB", "memory.free": " MiB", "utilization.gpu": " %"}
        cell = lambda f: str(gpu.get(f, "[N/A]")) + ("" if nounits else units.get(f, ""))
        for index in range(gpu.get("count", 1)):
            print(", ".join(str(index) if f == "index" else cell(f) for f in fields))
        sys.exit(0)
print("NVIDIA-SMI (fake)  Driver Version: 550.54  CUDA Version: 12.4")
"""
_GPU = {
    "name": "NVIDIA GeForce RTX 4090", "memory.total": 24564, "memory.used": 10, "memory.free": 24554, "count": 1,
    "utilization.gpu": 97, "driver_version": "550.54", "compute_cap": "8.9",
    "temperature.gpu": 61, "power.draw": "300.00",
    "ecc.errors.uncorrected.volatile.total": 0, "uuid": "GPU-fake-0", "pci.bus_id": "00000000:01:00.0",
}  # fmt: skip
_SHUTDOWN = """#!/bin/sh
echo "$(date +%s) shutdown $*" >> /var/log/shutdown-calls
"""
_SSHD = """
Port 22
HostKey /etc/ssh/box_ed25519
PermitRootLogin yes
PasswordAuthentication yes
KbdInteractiveAuthentication no
UsePAM no
PrintMotd no
MaxSessions 100
MaxStartups 100
UseDNS no
AllowTcpForwarding yes
PidFile /run/box-sshd.pid
Subsystem sftp internal-sftp
SetEnv OMP_NUM_THREADS=1
"""
_START = """
set -e
read go
mount -t proc proc {root}/proc
ip link set lo up
cd {root}
exec chroot {root} /usr/bin/env -i PATH={path} HOME=/root /usr/sbin/sshd -D -e -f /etc/ssh/box_config
"""


def why_no_box() -> str | None:
    """Why none can be made here."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a box of namespaces can be made only by root on Linux"
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)} (Debian: openssh-server, iproute2, util-linux)" if missing else None


needs_box = pytest.mark.skipif(why_no_box() is not None, reason=str(why_no_box()))


def _installed_from() -> Path:
    """The sources of an editable installation, which the image's Python would find."""
    given = distribution("sojourn").read_text("direct_url.json") or "{}"
    return Path(json.loads(given).get("url", str(_SOURCES.parent)).removeprefix("file://")) / "src"


@dataclass
class RemoteBox:
    """`platform_folders`: made at the start, so that the platform is recognised by them."""

    folder: Path
    platform_folders: tuple[str, ...] = ("/root/autodl-tmp", "/root/autodl-fs", "/root/autodl-pub")
    password: str = PASSWORD
    number: int = field(default_factory=lambda: (os.getpid() * 7 + next(_NUMBERS)) % 16_000)
    _process: subprocess.Popen[bytes] | None = None
    _mounts: list[Path] = field(default_factory=list)

    @property
    def root(self) -> Path:
        """Its root folder, as this machine sees it."""
        return self.folder / "root"

    @property
    def address(self) -> str:
        return f"10.{200 + self.number // 4000}.{self.number % 4000 // 16}.{self.number % 16 * 16 + 2}"

    @property
    def ssh_line(self) -> str:
        return f"ssh -p 22 root@{self.address}"

    @property
    def _link(self) -> str:
        return f"sjb{self.number}"

    def make(self) -> None:
        """The root folder; `boot` starts it."""
        disk = self.folder / "disk"
        self._mount(disk, "-t", "tmpfs", "-o", "size=6g", "none")
        for name in ("upper", "work"):
            (disk / name).mkdir()
        options = f"lowerdir=/,upperdir={disk / 'upper'},workdir={disk / 'work'}"
        self._mount(self.root, "-t", "overlay", "-o", options, "overlay")
        for name, mode in (("root", "700"), ("tmp", "1777"), ("run", "755")):
            self._mount(self.root / name, "-t", "tmpfs", "-o", f"size=4g,mode={mode}", "none")
        self._mount(self.root / "dev", "--rbind", "/dev")
        self._bind_environment()
        (self.root / "run" / "sshd").mkdir()
        for folder in self.platform_folders:
            (self.root / folder.lstrip("/")).mkdir(parents=True)
        self._write("usr/bin/nvidia-smi", _NVIDIA_SMI, 0o755)
        for name in ("usr/bin/shutdown", "usr/sbin/shutdown"):
            self._write(name, _SHUTDOWN, 0o755)
        self.set_gpu()
        self._write("etc/ssh/box_config", _SSHD)
        self._write("etc/hostname", "box\n")
        python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
        for name in ("python", "python3"):
            self._write(f"root/miniconda3/bin/{name}", python, 0o755)
        self.new_host_key()
        self.set_password(self.password)

    def _bind_environment(self) -> None:
        """The image's Python is the one that runs the tests; the project's own sources are hidden."""
        for prefix in dict.fromkeys((Path(sys.base_prefix).resolve(), Path(sys.prefix))):
            inside = self.root / str(prefix).lstrip("/")
            if not (inside / "bin").is_dir():
                self._mount(inside, "--bind", str(prefix))
        for sources in {_SOURCES, _installed_from()}:
            hidden = self.root / str(sources).lstrip("/")
            if hidden.is_dir():
                self._mount(hidden, "-t", "tmpfs", "none")

    def _mount(self, target: Path, *arguments: str) -> None:
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", *arguments, str(target)], check=True, capture_output=True)
        subprocess.run(["mount", "--make-rprivate", str(target)], check=True, capture_output=True)
        self._mounts.append(target)

    def _write(self, name: str, text: str, mode: int = 0o644) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)

    def set_gpu(self, **changes: object) -> None:
        """What nvidia-smi shows; `lost=True`: it fails."""
        self._write("etc/fake-gpu.json", json.dumps({**_GPU, **changes}))

    def set_password(self, password: str) -> None:
        line = f"root:{password}\n".encode()
        subprocess.run(["chroot", str(self.root), "chpasswd"], input=line, check=True, capture_output=True)

    def new_host_key(self) -> None:
        key = self.root / "etc/ssh/box_ed25519"
        for path in (key, key.with_suffix(".pub")):
            path.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)

    def boot(self) -> None:
        script = _START.format(root=self.root, path=_PATH)
        command = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "sh", "-c", script]
        log = (self.folder / "sshd.log").open("ab")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        log.close()
        self._connect_network(self._process.pid)
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.close()
        self._wait_for_sshd()

    def _connect_network(self, pid: int) -> None:
        while Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
            time.sleep(0.01)
        mine = self.address.rpartition(".")[0] + f".{self.number % 16 * 16 + 1}"
        enter = ["nsenter", "--target", str(pid), "--net"]
        for command in (
            ["ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", str(pid)],
            ["ip", "addr", "add", f"{mine}/28", "dev", self._link],
            ["ip", "link", "set", self._link, "up"],
            [*enter, "ip", "addr", "add", f"{self.address}/28", "dev", "eth0"],
            [*enter, "ip", "link", "set", "eth0", "up"],
        ):
            subprocess.run(command, check=True, capture_output=True)

    def connect_to(self, other: RemoteBox) -> None:
        """A private network between two boxes."""
        pids = [str(box._process.pid) for box in (self, other) if box._process is not None]
        names = [f"sjp{self.number}", f"sjq{self.number}"]
        commands = [
            [
                "ip",
                "link",
                "add",
                names[0],
                "netns",
                pids[0],
                "type",
                "veth",
                "peer",
                "name",
                names[1],
                "netns",
                pids[1],
            ]
        ]
        for pid, name, last in zip(pids, names, (1, 2), strict=True):
            enter = ["nsenter", "--target", pid, "--net", "ip"]
            commands += [
                [*enter, "addr", "add", f"10.199.7.{last}/24", "dev", name],
                [*enter, "link", "set", name, "up"],
            ]
        for command in commands:
            subprocess.run(command, check=True, capture_output=True)

    def _wait_for_sshd(self) -> None:
        import socket

        until = time.monotonic() + 60
        while True:
            try:
                with socket.create_connection((self.address, 22), timeout=1) as link:
                    if link.recv(4) == b"SSH-":
                        return
            except OSError:
                pass
            assert time.monotonic() < until, (self.folder / "sshd.log").read_text()
            time.sleep(0.05)

    def power_off(self) -> None:
        """All its processes end at once; its disks stay."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
            subprocess.run(["ip", "link", "del", self._link], check=False, capture_output=True)

    def reboot(self) -> None:
        self.power_off()
        self.boot()

    def cut(self) -> int:
        """Every SSH session ends, as if the network had reset it; what was detached goes on. How many there were."""
        return self.kill("sshd: root")

    def kill(self, text: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to its processes with `text` in their command line; how many there were."""
        found = self.processes(text)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(found)

    def status_of(self, run: str) -> dict[str, Any]:
        """What the supervisor says of a run."""
        path = self.root / "root/autodl-tmp/.sojourn/jobs" / run / "status.json"
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError):
            return {}

    def phase_of(self, run: str) -> str:
        status = self.status_of(run)
        return str(status.get("phase") or NOT_STARTED) if status else NOT_STARTED

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Packets go nowhere."""
        subprocess.run(["ip", "link", "set", self._link, "down"], check=True)
        try:
            yield
        finally:
            subprocess.run(["ip", "link", "set", self._link, "up"], check=True)

    def processes(self, text: str = "") -> list[int]:
        """Of the box, with `text` in their command line; pids as this machine counts them."""
        if self._process is None:
            return []
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self._is_inside(entry):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if text in line:
                        found.append(int(entry.name))
        return found

    def _is_inside(self, entry: Path) -> bool:
        assert self._process is not None
        mine = Path(f"/proc/{self._process.pid}/ns/pid_for_children").readlink()
        return (entry / "ns" / "pid").readlink() == mine

    def shutdown_calls(self) -> list[str]:
        path = self.root / "var/log/shutdown-calls"
        return path.read_text().splitlines() if path.exists() else []

    def remove(self) -> None:
        self.power_off()
        for target in reversed(self._mounts):
            subprocess.run(["umount", "--lazy", "--recursive", str(target)], check=False, capture_output=True)
        self._mounts.clear()


@contextlib.contextmanager
def remote_box(folder: Path, platform_folders: tuple[str, ...] | None = None) -> Iterator[RemoteBox]:
    """A box that runs. `platform_folders`: AutoDL's unless given; empty is a machine of unknown kind."""
    reason = why_no_box()
    if reason is not None:
        pytest.skip(reason)
    given = {} if platform_folders is None else {"platform_folders": platform_folders}
    box = RemoteBox(folder, **given)
    try:
        box.make()
        box.boot()
        yield box
    finally:
        box.remove()


def files_with(text: str, *folders: Path) -> list[Path]:
    """Small files in which it stands."""
    found = []
    for folder in folders:
        for path in folder.rglob("*"):
            if (
                path.is_file()
                and not path.is_symlink()
                and ".pyenv" not in path.parts
                and path.stat().st_size < 1 << 24
            ):
                found += [path] if text.encode() in path.read_bytes() else []
    return found
