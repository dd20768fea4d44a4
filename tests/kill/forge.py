"""A trainer for every trial without waiting for imports: a process that has them all forks one whenever it is asked.

It is a fresh Python beside the tests, told what to do by lines of JSON, so that no thread of theirs is inherited; and
it never computes anything itself, so that a fork of it is as good as a new process.
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
class Order:
    """One call of `sojourn train`, and what is to befall it.

    `kill_after`: seconds from its start; with `kill_at_step`: from when the metrics tell of that step. `blows`: how
    each named disk call ends, see `blows.py`. `fill`: a folder whose disk is full `from` one step `until` another, but
    for the bytes to `leave`.
    """

    words: list[str]
    home: str
    run: str
    notes: str
    kill_after: float | None = None
    kill_at_step: int | None = None
    blows: dict[str, str] = field(default_factory=dict)
    note_calls: bool = False
    fill: dict[str, Any] | None = None
    base_from: str | None = None  # instead: make a tiny base of these chats in `home`
    learn: bool = False  # import what this child had to import, for those after it


@dataclass(frozen=True)
class Outcome:
    """`code`: of the exit, or -9 where it was killed."""

    code: int
    pid: int
    seconds: float
    said: str
    complained: str

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class Forge:
    """The tests' end of it."""

    def __init__(self, folder: Path) -> None:
        path = os.pathsep.join((str(Path(__file__).parent.parent), *sys.path))
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
        alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kill.forge", str(folder)], cwd=folder, env={**os.environ, **offline, **alone},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, order: Order) -> Outcome:
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the forge is gone"
        texts = {name: (self._folder / name).read_text("utf-8", "replace") for name in ("said", "complained")}
        return Outcome(**json.loads(answer), **texts)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)


def _serve(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_all()
    for line in sys.stdin:
        order = Order(**json.loads(line))
        assert threading.active_count() == 1, "a process with threads must not be forked"
        print(json.dumps(_trial(order, folder)), file=answers, flush=True)
        if order.learn:
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


def _trial(order: Order, folder: Path) -> dict[str, Any]:
    metrics = Path(order.run) / "metrics.jsonl"
    known = metrics.stat().st_size if metrics.exists() else 0
    for name in ("said", "complained"):
        (folder / name).write_text("")
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os._exit(_child(order, folder))
    since = began if order.kill_at_step is None else None
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        now = time.monotonic()
        if ended:
            return {"code": os.waitstatus_to_exitcode(status), "pid": pid, "seconds": now - began}
        if since is None and _tells_of(metrics, known, order.kill_at_step):
            since = now
        due = order.kill_after is not None and since is not None and now - since >= order.kill_after
        if due or now - began > _PATIENCE:
            os.kill(pid, signal.SIGKILL if due else signal.SIGABRT)  # one that hangs is no survivor
        time.sleep(_TICK)


def _tells_of(metrics: Path, known: int, step: int | None) -> bool:
    try:
        with metrics.open("rb") as file:
            file.seek(known)
            return f'"step": {step},'.encode() in file.read()
    except FileNotFoundError:
        return False


def _child(order: Order, folder: Path) -> int:
    for name, number in (("said", 1), ("complained", 2)):
        handle = os.open(folder / name, os.O_WRONLY)
        os.dup2(handle, number)
        os.close(handle)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ["SOJOURN_HOME"] = order.home
    os.chdir(order.home)
    try:
        if order.base_from is not None:
            from shared import make_base

            make_base(Path(order.base_from), Path(order.home), "llama")
            return 0
        return _train(order)
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        if order.learn:
            (folder / "modules").write_text(json.dumps(list(sys.modules)))
        sys.stdout.flush()
        sys.stderr.flush()


def _train(order: Order) -> int:
    """As `sojourn train` would, exit code and all."""
    from kill.blows import hit
    from sojourn.cli.main import main

    hit(order)
    sys.argv = ["sojourn", "train", *order.words]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
