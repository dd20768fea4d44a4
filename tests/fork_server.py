"""Runs `sojourn` commands in processes of their own without waiting for imports.

Importing torch and transformers takes seconds of CPU time in every process. The server is a fresh Python beside the
tests that has imported them; it forks for every command. It computes nothing itself and has no threads, so that a fork
of it is as good as a new process. Garbage collections of a fork leave out what the server has imported: to look
through all of that would take longer than many a command.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import budget
from preloaded import MAIN, THREADS, become_new_process, preload, run_and_exit

needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")

_TIMEOUT = 240.0  # seconds for any command
_AFTER_FAILURE = 30.0  # seconds for the other ranks when one has failed


@dataclass(frozen=True)
class Command:
    """`preamble`: Python that runs before the command; it knows `rank`, `os` and `signal`. `fork_children`: Pythons
    that the command starts are forks of it, and run the preamble too. `output`: a file that gets all it prints."""

    id: int
    args: list[str]
    env: dict[str, str]
    cwd: str
    preamble: str = ""
    fork_children: bool = False
    code: str = MAIN
    output: str | None = None


class Child:
    """A forked command, used like a `subprocess.Popen` with text output."""

    def __init__(self, folder: Path, id: int, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._folder, self._id = folder, id

    def poll(self) -> int | None:
        exited = self._folder / f"{self._id}.exit"
        if self.returncode is None and exited.exists():
            self.returncode = int(exited.read_text())
        return self.returncode

    def wait(self, timeout: float = _TIMEOUT) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("sojourn", timeout)
            time.sleep(0.005)
        return self.returncode

    def communicate(self, timeout: float = _TIMEOUT) -> tuple[str, str]:
        self.wait(timeout)
        return self.stdout, self.stderr

    @property
    def stdout(self) -> str:
        return self._read("out")

    @property
    def stderr(self) -> str:
        return self._read("err")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self, suffix: str) -> str:
        """Nothing where it was killed before it opened the file."""
        path = self._folder / f"{self._id}.{suffix}"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


@dataclass(frozen=True)
class RanksOutcome:
    """How each rank of a run ended, and what it printed."""

    codes: list[int]
    said: list[str]

    def __str__(self) -> str:
        return "\n".join(f"--- rank {i}: exit code {code}\n{self.said[i][-3000:]}" for i, code in enumerate(self.codes))


class ForkServer:
    """The tests' end of it."""

    def __init__(self, folder: Path, python: Sequence[str] = (sys.executable,)) -> None:
        """`python`: perhaps that of `Preloaded`, which has imported everything."""
        self._folder = folder
        self._ids = itertools.count()
        path = {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *sys.path))}
        self._process = subprocess.Popen(
            [*python, "-c", "import fork_server; fork_server.serve()", str(folder)], cwd=folder,
            env={**os.environ, **THREADS, **path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        pid = self._process.stdout.readline()
        assert pid, "the fork server did not start"
        budget.count_server(int(pid))

    def start(
        self, *args: str, preamble: str = "", input: str = "", env: dict[str, str] | None = None,
        cwd: str | None = None, **options: Any,
    ) -> Child:  # fmt: skip
        """Starts `sojourn` with `args`. `env`, `cwd`: instead of this process's environment and current folder;
        `options`: see `Command`."""
        return self._send(list(args), input, env, cwd, preamble=preamble, **options)

    def popen(self, command: list[str], stdout: Any, stderr: int, env: dict[str, str], **options: Any) -> Child:
        """In the place of `subprocess.Popen(command, stdout=FILE, stderr=STDOUT, env=env)`; `options` as `start`'s."""
        assert command[0] == sys.executable and command[1] in ("-c", "-m") and stderr == subprocess.STDOUT
        code = command[2] if command[1] == "-c" else MAIN
        return self._send(command[3:], "", env, None, code=code, output=stdout.name, **options)

    def _send(self, args: list[str], input: str, env: dict[str, str] | None, cwd: str | None, **options: Any) -> Child:
        id = next(self._ids)
        (self._folder / f"{id}.in").write_text(input, encoding="utf-8")
        environment = {**(os.environ if env is None else env), **THREADS}
        command = Command(id, args, environment, cwd or str(Path.cwd()), **options)
        self._process.stdin.write(json.dumps(asdict(command)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the fork server has ended"
        return Child(self._folder, id, int(answer))

    def run(self, *args: str, timeout: float = _TIMEOUT, **options: Any) -> subprocess.CompletedProcess[str]:
        """`start`, then waits for its end."""
        child = self.start(*args, **options)
        out, err = child.communicate(timeout)
        return subprocess.CompletedProcess(args, child.returncode, out, err)

    def run_ranks(self, size: int, args: list[str], preamble: str = "", **env: str) -> RanksOutcome:
        """`sojourn train` on several ranks, as torchrun starts them. When one fails, the rest end within a while."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        common = {**os.environ, **ranks, "MASTER_PORT": str(port), **env}
        children = [
            self.start("train", *args, preamble=preamble, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(size)
        ]
        until, failed = time.monotonic() + _TIMEOUT, False
        while any(child.poll() is None for child in children):
            if not failed and any(child.returncode for child in children):
                until, failed = min(until, time.monotonic() + _AFTER_FAILURE), True
            if time.monotonic() > until:
                for child in children:
                    child.kill()
            time.sleep(0.005)
        return RanksOutcome([child.returncode for child in children], [one.stdout + one.stderr for one in children])

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)


def do_not_wait_for_the_disk() -> None:
    """From now on, `os.fsync` returns at once. It waits milliseconds, thousands of times in all, for what would matter
    after a power cut alone; a process that is killed loses nothing of what it has written."""

    def fsync(file: Any) -> None:
        os.fstat(file if isinstance(file, int) else file.fileno())  # an error where the file is closed

    os.fsync = fsync


def serve() -> None:
    """The server itself."""
    folder = Path(sys.argv[1])
    # Python 3.12 warns in every child of a process with threads, on its standard error.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    do_not_wait_for_the_disk()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.disable()
    preload()
    gc.freeze()
    print(os.getpid(), file=answers, flush=True)
    running: dict[int, int] = {}
    requests = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - select must see every line that is there
    while True:
        ready, _, _ = select.select([requests], [], [], 0.005 if running else None)
        if ready:
            line = requests.readline()
            if not line:
                break
            assert threading.active_count() == 1, "a process with threads must not be forked"
            command = Command(**json.loads(line))
            pid = _fork(command, folder)
            running[pid] = command.id
            print(pid, file=answers, flush=True)
        _reap(running, folder)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _reap(running: dict[int, int], folder: Path) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            id = running.pop(pid)
            part = folder / f"{id}.part"
            part.write_text(str(os.waitstatus_to_exitcode(status)))
            part.rename(folder / f"{id}.exit")
            for name in _modules_of(folder / f"{id}.modules"):  # those after it need not import them
                if name not in sys.modules:
                    with contextlib.suppress(Exception):
                        importlib.import_module(name)
            gc.freeze()


def _modules_of(file: Path) -> list[str]:
    """None where the process was killed before or while it wrote them."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return []


def _fork(command: Command, folder: Path) -> int:
    if pid := os.fork():
        return pid
    weakref.finalize._registry.clear()  # type: ignore[attr-defined] # torch's thousands, which a fork need not run
    gc.enable()
    create = os.O_CREAT | os.O_WRONLY | os.O_APPEND
    for number, (suffix, flags) in enumerate((("in", os.O_RDONLY), ("out", create), ("err", create))):
        path = command.output if command.output and number else folder / f"{command.id}.{suffix}"
        os.dup2(os.open(path, flags, 0o644), number)
    os.environ.clear()
    os.environ.update(command.env)
    os.chdir(command.cwd)
    if command.fork_children:
        _fork_children(command.preamble)
    return run_and_exit(command.args, command.preamble, folder / f"{command.id}.modules", command.code)


def _code_of(option: str, given: str) -> str:
    """What Python runs when it is started with `-c CODE` or `-m MODULE`."""
    if option == "-c" or given == "sojourn":
        return given if option == "-c" else MAIN
    return f"import runpy; runpy.run_module({given!r}, run_name='__main__', alter_sys=True)"


def _fork_children(preamble: str) -> None:
    """From now on, `subprocess.Popen` of this Python with `-m MODULE` or `-c CODE` forks this process instead."""
    real = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute(self: Any, args: Any, executable: Any, preexec: Any, close: Any, keep: Any, cwd: Any, env: Any,
                startupinfo: Any, flags: Any, shell: Any, *rest: Any) -> None:  # fmt: skip
        words = [str(word) for word in args] if isinstance(args, (list, tuple)) else []
        at = next((number for number, word in enumerate(words) if word in ("-m", "-c")), 0)
        if not at or words[0] != sys.executable or words[at : at + 2] == ["-m", "torch.distributed.run"]:
            return real(self, args, executable, preexec, close, keep, cwd, env, startupinfo, flags, shell, *rest)
        pipes, new_session = rest[:6], rest[11]
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(*pipes)
            return None
        become_new_process(pipes[0], pipes[3], pipes[5], keep)
        if new_session:
            os.setsid()
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        if cwd is not None:
            os.chdir(cwd)
        return run_and_exit(words[at + 2 :], preamble, code=_code_of(words[at], words[at + 1]))

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
