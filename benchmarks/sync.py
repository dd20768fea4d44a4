"""Sync beside rsync, over the same sshd, interleaved: 2,000 small files and 1 GB on loopback, and at 100 ms.

    python benchmarks/sync.py [--rounds 3]      (root on Linux; needs sshd and rsync)

Both sides' files are in memory (/dev/shm), so that a disk does not decide. Each of our runs connects anew, as rsync
does; at 100 ms the time on a connection that is open, which is how the verbs sync, stands beside it, and so does rsync
over an open control master. Writes benchmarks/results/sync-CPU-DATE.json.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from plain_sshd import PlainSshd, plain_sshd
from sojourn.remote.box_client import Box
from sojourn.remote.hosts import Host

MIB = 1 << 20
_ROOT = Path(__file__).resolve().parents[1]


def make_small(folder: Path) -> None:
    for number in range(2000):
        path = folder / f"folder-{number % 40}" / f"file-{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(100 + number * 37 % 12_000))


def make_file(path: Path, size: int) -> None:
    with path.open("wb") as file:
        for _ in range(size // MIB):
            file.write(os.urandom(MIB))


@contextlib.contextmanager
def distant(port: int, delay: float) -> Iterator[int]:
    """In a process of its own, which takes the CPU time of no side."""
    command = [sys.executable, str(_ROOT / "tests/slow_link.py"), "127.0.0.1", str(port), str(delay)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield int((child.stdout or sys.stdin).readline())
    finally:
        child.kill()
        child.wait()


class Bench:
    def __init__(self, server: PlainSshd, work: Path, rounds: int) -> None:
        self.server, self.work, self.rounds = server, work, rounds
        self.there = work / "there"
        self.results: dict[str, Any] = {}

    def compare(self, name: str, source: Path, host: Host, open_connection: bool) -> None:
        times: dict[str, list[float]] = {"ours": [], "rsync": []}
        ways: list[tuple[str, Callable[[], float]]] = [
            ("ours", lambda: self._ours(source, host)),
            ("rsync", lambda: self._rsync(source, host)),
        ]
        if open_connection:
            ways.append(("ours, connection open", lambda: self._ours_open(source, host)))
            ways.append(("rsync, control master open", lambda: self._rsync_open(source, host)))
        for _ in range(self.rounds):
            for way, run in ways:
                shutil.rmtree(self.there, ignore_errors=True)
                self.there.mkdir()
                shutil.rmtree(self.server.config / "cache", ignore_errors=True)
                times.setdefault(way, []).append(run())
        result: dict[str, Any] = {way: round(statistics.median(values), 3) for way, values in times.items()}
        result["times rsync"] = round(result["rsync"] / result["ours"], 2)
        if open_connection:
            result["times rsync, open"] = round(result["rsync"] / result["ours, connection open"], 2)
            result["times rsync, both open"] = round(
                result["rsync, control master open"] / result["ours, connection open"], 2
            )
        self.results[name] = result
        print(f"{name}: {result}", flush=True)

    def unchanged(self, source: Path, host: Host) -> None:
        self._ours(source, host)
        time.sleep(2.1)  # files changed in the last two seconds are hashed again
        self._ours(source, host)
        ours = statistics.median(self._ours(source, host) for _ in range(self.rounds))
        rsync = statistics.median(self._rsync(source, host) for _ in range(self.rounds + 1))
        self.results["2,000 small files, unchanged"] = {"ours": round(ours, 3), "rsync": round(rsync, 3)}
        print(f"unchanged: {self.results['2,000 small files, unchanged']}", flush=True)

    def _push(self, box: Box, source: Path) -> float:
        began = time.monotonic()
        box.push([(source, f"{self.there}/{source.name}")])
        return time.monotonic() - began

    def _ours(self, source: Path, host: Host) -> float:
        began = time.monotonic()
        with Box(host) as box:
            self._push(box, source)
            return time.monotonic() - began

    def _ours_open(self, source: Path, host: Host) -> float:
        with Box(host) as box:
            box.read_bytes("/nowhere")
            return self._push(box, source)

    def _shell(self, host: Host, *more: str) -> str:
        known = self.server.config / "known_hosts"
        options = [
            "-p",
            str(host.port),
            "-i",
            str(host.key),
            "-o",
            f"UserKnownHostsFile={known}",
            "-o",
            "BatchMode=yes",
        ]
        return " ".join(["ssh", "-F", "none", *options, *more])

    def _rsync(self, source: Path, host: Host, *more: str) -> float:
        began = time.monotonic()
        shell = self._shell(host, *more)
        subprocess.run(["rsync", "-a", "-e", shell, str(source), f"root@127.0.0.1:{self.there}/"], check=True)
        return time.monotonic() - began

    def _rsync_open(self, source: Path, host: Host) -> float:
        control = ["-o", f"ControlPath={self.work}/control", "-o", "ControlMaster=auto", "-o", "ControlPersist=60"]
        subprocess.run([*self._shell(host, *control).split(), "root@127.0.0.1", "true"], check=True)
        taken = self._rsync(source, host, *control)
        subprocess.run(
            [*self._shell(host, *control, "-O", "exit").split(), "root@127.0.0.1"],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        return taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    import asyncssh  # noqa: F401 -- a second for the import is not the transport's

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        work = Path(folder)
        (work / "sshd").mkdir()
        small, large, medium = work / "small", work / "large", work / "medium"
        make_small(small)
        make_file(large, 1024 * MIB)
        make_file(medium, 200 * MIB)
        with plain_sshd(work / "sshd") as server:
            os.environ["SOJOURN_CONFIG"] = str(server.config)
            host = replace(server.host, home=str(work / "home"))
            bench = Bench(server, work, rounds)
            bench.compare("2,000 small files, loopback", small, host, open_connection=False)
            bench.unchanged(small, host)
            bench.compare("1 GB, loopback", large, host, open_connection=False)
            with distant(host.port, 0.05) as port:
                far = replace(server.through(port), home=host.home)
                bench.compare("2,000 small files, 100 ms", small, far, open_connection=True)
                bench.compare("200 MB, 100 ms", medium, far, open_connection=True)
    date = datetime.date.today().isoformat()
    path = _ROOT / "benchmarks/results" / f"sync-CPU-{date}.json"
    about = {"date": date, "machine": platform.platform(), "cores": os.cpu_count(), "rounds": rounds, "unit": "seconds"}
    path.write_text(json.dumps({**about, "results": bench.results}, indent=2) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
