"""A job under the supervisor, with real processes and a trainer that does what its arguments say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sojourn.remote.box import supervisor

SUPERVISOR = Path(supervisor.__file__)
PATIENCE = 60.0  # seconds; a busy machine needs some of them
SHORT = {
    "heartbeat_seconds": 0.1, "poll_seconds": 0.05, "gpu_seconds": 0.1, "disk_seconds": 0.1, "backoff_seconds": 0.05,
    "shim_seconds": 0.1, "grace_seconds": 20, "min_free_bytes": 0, "stall_minutes": 0,
}  # fmt: skip

# Each argument is one action, in order. SIGTERM saves and exits 3, as `sojourn train` does.
TRAINER = """
import hashlib, json, os, signal, struct, subprocess, sys, time
from pathlib import Path

run = Path(os.environ["RUN"])
run.mkdir(parents=True, exist_ok=True)
job = Path(os.environ["SOJOURN_JOB"])

def status(state, step, message=""):
    facts = {"state": state, "step": step, "total_steps": 10, "message": message, "updated": time.time()}
    (run / ".status").write_text(json.dumps(facts))
    os.replace(run / ".status", run / "status.json")

def on_term(*_):
    print("saved at SIGTERM", flush=True)
    status("stopped", step, "stopped by SIGTERM")
    os._exit(3)

def safetensors(path, content=b"weights!"):
    head = json.dumps({"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + content)

def checkpoint(number):
    folder = run / "checkpoints" / f"step-{number:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model", "optimizer", "random"):
        safetensors(folder / f"{name}.safetensors")
    (folder / "state.json").write_text(json.dumps({"step": number}))
    files = [path for path in folder.iterdir() if path.name != "manifest.json"]
    manifest = {p.name: {"size": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for p in files}
    (folder / "manifest.json").write_text(json.dumps(manifest))

def final():
    (run / "final").mkdir(exist_ok=True)
    (run / "final/config.json").write_text("{}")
    safetensors(run / "final/model.safetensors")

step = 0
signal.signal(signal.SIGTERM, on_term)
print("began", os.getpid(), flush=True)
for word in sys.argv[1:]:
    what, _, value = word.partition(":")
    if what == "steps":
        for _ in range(int(value)):
            step += 1
            status("running", step)
            with open(run / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"kind": "train", "step": step, "loss": 1.0}) + "\\n")
            time.sleep(0.02)
    elif what == "resume":  # from the step where it crashed
        file = run / "metrics.jsonl"
        step = len(file.read_text().splitlines()) if file.exists() else 0
    elif what == "checkpoint":
        checkpoint(int(value))
    elif what == "final":
        final()
    elif what == "done":
        status("done", step)
    elif what == "print":
        print(value, flush=True)
    elif what == "ignore_term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif what == "hang":
        time.sleep(1000)
    elif what == "wait":  # until this file exists
        while not (job / value).exists():
            time.sleep(0.02)
    elif what == "child":  # left behind by its parent, in a session of its own
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    elif what == "first":  # exits with this code, but only for the first N attempts: first:N/CODE
        times, _, code = value.partition("/")
        file = run / "attempts"
        done = int(file.read_text()) if file.exists() else 0
        file.write_text(str(done + 1))
        if done < int(times):
            if code == "hang":
                time.sleep(1000)
            os._exit(int(code))
    elif what == "exit":
        print(f"exits with {value}", flush=True)
        sys.exit(int(value))
    elif what == "fill":  # the disk
        with open(run / "filling", "wb") as file:
            file.write(bytes(int(value)))
"""


class SupervisedJob:
    """`home` is the box's home; `spec` is written anew by `start`."""

    def __init__(self, home: Path, name: str = "t", **spec: Any) -> None:
        self.home, self.name = home, name
        self.folder = home / ".sojourn/jobs" / name
        self.run = home / "runs" / name
        (self.folder / "secrets").mkdir(parents=True, mode=0o700)
        self.trainer = home / "trainer.py"
        self.trainer.write_text(TRAINER)
        self.spec: dict[str, Any] = {
            "version": 1, "run": name, "home": str(home), "job": str(self.folder), "run_folder": str(self.run),
            "env": {"RUN": str(self.run)}, **SHORT, **spec,
        }  # fmt: skip

    def phases(self, *trainer: str, prepare: list[str] | None = None) -> SupervisedJob:
        train = {"name": "train", "argv": [sys.executable, str(self.trainer), *trainer], "restart": True}
        before = [{"name": "prepare", "argv": prepare}] if prepare else []
        self.spec["phases"] = [*before, train]
        return self

    def command(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, str(SUPERVISOR), words[0], str(self.folder), *words[1:]]
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=PATIENCE, **options)

    def write_spec(self) -> None:
        (self.folder / "spec.json").write_text(json.dumps(self.spec))

    def start(self, *words: str, **options: Any) -> int:
        self.write_spec()
        done = self.command("start", *words, **options)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def status(self) -> dict[str, Any]:
        return supervisor.read_status(self.folder)

    def record(self, name: str) -> dict[str, Any]:
        return supervisor.read_json(self.folder / f"{name}.json")

    def log(self, name: str = "train") -> str:
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def attempts(self) -> int:
        return self.log().count("began")

    def until(self, happened: Callable[[], Any], what: str = "it") -> Any:
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit:
            found = happened()
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(f"waited for {what}; {self.status()}\n{self.log('supervisor')}\n{self.log()}")

    def until_state(self, *states: str) -> dict[str, Any]:
        return self.until(lambda: (status := self.status())["state"] in states and status, " or ".join(states))

    def until_trainer(self) -> int:
        """Its pid, once it has printed something."""

        def pid() -> int | None:
            trainer = self.record("phase-train").get("trainer") or {}
            return trainer.get("pid") if supervisor.lives(trainer) and str(trainer["pid"]) in self.log() else None

        return int(self.until(pid, "a trainer"))

    def until_supervisor(self, other_than: int) -> int:
        def pid() -> int | None:
            found = self.record("supervisor")
            return found["pid"] if supervisor.lives(found) and found["pid"] != other_than else None

        return int(self.until(pid, "another supervisor"))

    def let(self, name: str) -> None:
        """What a trainer `wait`s for."""
        (self.folder / name).touch()

    def kill_everything(self) -> None:
        """SIGKILL to supervisor, shim and trainer, as when a container is stopped; also to those that have just been
        started and are in no record yet, or in none any more."""
        looks_without = 0
        while looks_without < 2:  # a process may be started behind one that was just looked at
            records = [self.record("supervisor"), self.record("shim")]
            alive = {record["pid"] for record in records if supervisor.lives(record)}
            alive |= {*supervisor.processes_of(self.folder), *self._by_command_line()}
            looks_without = 0 if alive else looks_without + 1
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _by_command_line(self) -> list[int]:
        marks, found = [b"\0".join([verb, os.fsencode(self.folder)]) for verb in (b"shim", b"start")], []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and any(mark in (entry / "cmdline").read_bytes() for mark in marks):
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        self.kill_everything()


def tool(folder: Path, name: str, code: str) -> None:
    """A program of this name."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\n{code}")
    (folder / name).chmod(0o755)


@contextmanager
def supervised_job(home: Path, name: str = "t", **spec: Any) -> Iterator[SupervisedJob]:
    if not sys.platform.startswith("linux"):
        pytest.skip("the supervisor runs on Linux boxes only")
    job = SupervisedJob(home, name, **spec)
    try:
        yield job
    finally:
        job.close()
