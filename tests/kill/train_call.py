"""`sojourn train` in a process of its own, with faults inside it, and killed on request."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fork_server import Child, ForkServer

_TICK = 0.001
_TIMEOUT = 120.0


@dataclass(frozen=True)
class TrainCall:
    """One call of `sojourn train`, with its faults.

    `kill_after`: seconds from its start; with `kill_at_step`: from when that step is in the metrics. `faults`: how each
    named disk call ends, see `faults.py`. `fill`: a folder whose disk is full `from` one step `until` another, except
    for the bytes to `leave`.
    """

    args: list[str]
    home: str
    run: str
    log: str
    kill_after: float | None = None
    kill_at_step: int | None = None
    faults: dict[str, str] = field(default_factory=dict)
    log_calls: bool = False
    fill: dict[str, Any] | None = None

    def start(self, server: ForkServer, **env: str) -> Child:
        """Without waiting for it."""
        preamble = f"from kill.faults import install_faults\ninstall_faults(**{asdict(self)})"
        given = {**os.environ, "SOJOURN_HOME": self.home, "TOKENIZERS_PARALLELISM": "false", **env}
        return server.start("train", *self.args, preamble=preamble, env=given, cwd=self.home)

    def run_with(self, server: ForkServer) -> Outcome:
        """Runs it to its end, however that is."""
        metrics = Path(self.run) / "metrics.jsonl"
        known = metrics.stat().st_size if metrics.exists() else 0
        began = time.monotonic()
        child = self.start(server)
        since = began if self.kill_at_step is None else None
        while child.poll() is None:
            now = time.monotonic()
            if since is None and _has_step(metrics, known, self.kill_at_step):
                since = now
            due = self.kill_after is not None and since is not None and now - since >= self.kill_after
            if due or now - began > _TIMEOUT:
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(signal.SIGKILL if due else signal.SIGABRT)  # a hang counts as a failure
            time.sleep(_TICK)
        return Outcome(child.returncode, child.pid, time.monotonic() - began, child.stdout, child.stderr)


@dataclass(frozen=True)
class Outcome:
    """`code`: of the exit, or -9 where it was killed."""

    code: int
    pid: int
    seconds: float
    stdout: str
    stderr: str

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


def _has_step(metrics: Path, known: int, step: int | None) -> bool:
    try:
        with metrics.open("rb") as file:
            file.seek(known)
            return f'"step": {step},'.encode() in file.read()
    except FileNotFoundError:
        return False
