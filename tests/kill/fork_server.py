"""Forks training processes from a server that has imported everything, and kills them on request.

The server is a fresh Python that reads JSON lines, so that its children inherit no thread of the tests. It computes
nothing itself, so that a fork of it is as good as a new process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_TICK = 0.001
_PATIENCE = 120.0


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
    base_from: str | None = None  # instead: make a tiny base of these chats in `home`
    learn: bool = False  # import what this child had to import, for those after it


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


class ForkServer:
    """The tests' end of it."""

    def __init__(self, folder: Path) -> None:
        path = os.pathsep.join((str(Path(__file__).parent.parent), *sys.path))
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
        alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kill.fork_server", str(folder)], cwd=folder, env={**os.environ, **offline, **alone},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, spec: TrainCall) -> Outcome:
        self._process.stdin.write(json.dumps(asdict(spec)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the fork_server is gone"
        texts = {name: (self._folder / name).read_text("utf-8", "replace") for name in ("stdout", "stderr")}
        return Outcome(**json.loads(answer), **texts)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)


def _serve(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_all()
    for line in sys.stdin:
        spec = TrainCall(**json.loads(line))
        assert threading.active_count() == 1, "a process with threads must not be forked"
        print(json.dumps(_run_child(spec, folder)), file=answers, flush=True)
        if spec.learn:
            for name in json.loads((folder / "modules").read_text()):
                with contextlib.suppress(Exception):
                    importlib.import_module(name)


def _import_all() -> None:
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers  # noqa: F401

    import sojourn.cli.main
    import sojourn.train.loop  # noqa: F401

    torch.set_num_threads(1)


def _run_child(spec: TrainCall, folder: Path) -> dict[str, Any]:
    metrics = Path(spec.run) / "metrics.jsonl"
    known = metrics.stat().st_size if metrics.exists() else 0
    for name in ("stdout", "stderr"):
        (folder / name).write_text("")
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os._exit(_child(spec, folder))
    since = began if spec.kill_at_step is None else None
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        now = time.monotonic()
        if ended:
            return {"code": os.waitstatus_to_exitcode(status), "pid": pid, "seconds": now - began}
        if since is None and _has_step(metrics, known, spec.kill_at_step):
            since = now
        due = spec.kill_after is not None and since is not None and now - since >= spec.kill_after
        if due or now - began > _PATIENCE:
            os.kill(pid, signal.SIGKILL if due else signal.SIGABRT)  # a hang counts as a failure
        time.sleep(_TICK)


def _has_step(metrics: Path, known: int, step: int | None) -> bool:
    try:
        with metrics.open("rb") as file:
            file.seek(known)
            return f'"step": {step},'.encode() in file.read()
    except FileNotFoundError:
        return False


def _child(spec: TrainCall, folder: Path) -> int:
    for name, number in (("stdout", 1), ("stderr", 2)):
        handle = os.open(folder / name, os.O_WRONLY)
        os.dup2(handle, number)
        os.close(handle)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ["SOJOURN_HOME"] = spec.home
    os.chdir(spec.home)
    try:
        if spec.base_from is not None:
            from shared import make_base

            make_base(Path(spec.base_from), Path(spec.home), "llama")
            return 0
        return _train(spec)
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        if spec.learn:
            (folder / "modules").write_text(json.dumps(list(sys.modules)))
        sys.stdout.flush()
        sys.stderr.flush()


def _train(spec: TrainCall) -> int:
    """As `sojourn train` would, exit code and all."""
    from kill.faults import install_faults
    from sojourn.cli.main import main

    install_faults(spec)
    sys.argv = ["sojourn", "train", *spec.args]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
