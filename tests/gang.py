"""Several processes that train one run together, without waiting for imports: a process that has them all forks a gang
whenever it is asked. It is a fresh Python beside the tests and never computes anything itself, so that a fork of it is
as good as a new process. Where one of a gang ends badly, the rest get a while and are then killed, as torchrun does it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

import budget

needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")

KNOWN = ("torch", "transformers", "peft", "sojourn", "deepspeed", "safetensors", "tokenizers", "bitsandbytes")
_PATIENCE, _WHILE = 240.0, 30.0


@dataclass(frozen=True)
class Order:
    """`wrong`: Python that every process runs before it trains; it knows its `rank`."""

    size: int
    words: list[str]
    home: str
    wrong: str = ""
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    codes: list[int]
    said: list[str]

    def __str__(self) -> str:
        return "\n".join(f"--- process {i}: {code}\n{self.said[i][-3000:]}" for i, code in enumerate(self.codes))


class Gang:
    """The tests' end of it."""

    def __init__(self, folder: Path) -> None:
        alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(sys.path)}
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gang", str(folder)], cwd=folder, env={**os.environ, **offline, **alone},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        budget.count_server(self._process.pid)

    def run(self, size: int, words: list[str], wrong: str = "", **env: str) -> Outcome:
        order = Order(size, words, os.environ["SOJOURN_HOME"], wrong, env)
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the gang's maker is gone"
        said = [(self._folder / f"said-{rank}").read_text("utf-8", "replace") for rank in range(size)]
        return Outcome(json.loads(answer), said)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)


def _serve(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_all()
    for line in sys.stdin:
        assert threading.active_count() == 1, "a process with threads must not be forked"
        print(json.dumps(_train(Order(**json.loads(line)), folder)), file=answers, flush=True)
        known = folder / "modules"  # not where the first process was ended at once
        for name in json.loads(known.read_text()) if known.exists() else []:  # those after it need not import them
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)


def _import_all() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    with contextlib.suppress(ImportError):
        import deepspeed  # noqa: F401
    torch.set_num_threads(1)


def _train(order: Order, folder: Path) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = [_fork(order, rank, port, folder) for rank in range(order.size)]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + _PATIENCE
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                found, status = _wait(pid)
                if found:
                    codes[pid] = status
                    if status:
                        deadline = min(deadline, time.monotonic() + _WHILE)
        if time.monotonic() > deadline:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def _wait(pid: int) -> tuple[bool, int]:
    done, status = os.waitpid(pid, os.WNOHANG)
    return done == pid, os.waitstatus_to_exitcode(status) if done == pid else 0


def _fork(order: Order, rank: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        out = os.open(folder / f"said-{rank}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order.size, "LOCAL_WORLD_SIZE": order.size,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SOJOURN_HOME": order.home}  # fmt: skip
        os.environ.update({key: str(value) for key, value in where.items()} | order.env)
        os.chdir(order.home)
        known: dict[str, Any] = {"rank": rank, "os": os, "signal": signal}
        exec(order.wrong, known)  # noqa: S102
        from sojourn.cli.main import main

        sys.argv = ["sojourn", "train", *order.words]
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        if rank == 0:
            (folder / "modules").write_text(
                json.dumps([name for name in sys.modules if name.partition(".")[0] in KNOWN])
            )
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
