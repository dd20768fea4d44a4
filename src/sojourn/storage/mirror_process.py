"""A mirror in a process of its own, which can be abandoned.

A call to a hung network drive never returns and cannot be interrupted, not even by a kill. So the calls are made by a
child: where it does not answer, or when there is no time left, this process goes on without it. The child reads one
call a line from its standard input, and ends with it.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from sojourn.errors import RunFailed, UserError
from sojourn.storage.mirror import Mirror, MirrorDamaged, MirrorFailed
from sojourn.storage.open_mirror import open_mirror

_COPIES = ("put", "fetch")
_STALL = 60.0  # seconds
_COPY_STALL = 600.0  # without any byte read or written: to sync gigabytes to a slow drive takes minutes
_TICK = 0.1  # seconds
_ERRORS = {error.__name__: error for error in (UserError, RunFailed, MirrorFailed, MirrorDamaged)}


class MirrorProcess:
    """A `Mirror` whose calls are made by a child process."""

    def __init__(self, text: str, run_name: str) -> None:
        self._arguments = [text, run_name]
        self.location = open_mirror(text, run_name).location  # refuses what cannot be a mirror; touches no disk
        self._child: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._abandoned = threading.Event()

    def put(self, folder: Path, name: str) -> None:
        self._call("put", str(folder.absolute()), name)

    def put_file(self, file: Path, name: str) -> None:
        self._call("put_file", str(file.absolute()), name)

    def names(self, under: str) -> list[str]:
        return list(self._call("names", under))

    def fetch(self, name: str, into: Path) -> None:
        self._call("fetch", name, str(into.absolute()))

    def read(self, name: str) -> bytes | None:
        found = self._call("read", name)
        return None if found is None else base64.b64decode(found)

    def remove(self, name: str) -> None:
        self._call("remove", name)

    def set_aside(self, name: str) -> None:
        self._call("set_aside", name)

    def abandon(self) -> None:
        """Ends calls in other threads: they fail at once."""
        self._abandoned.set()

    def close(self) -> None:
        """The next call starts a new child."""
        self._abandoned.set()
        with self._lock:
            self._drop_child()
        self._abandoned.clear()

    def _call(self, name: str, *arguments: str) -> Any:
        with self._lock:
            try:
                child = self._child = self._child or self._start()
                if child.stdin is not None:
                    child.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
                answer = self._read_answer(child, _COPY_STALL if name in _COPIES else _STALL)
            except BaseException as error:
                self._drop_child()
                if isinstance(error, (OSError, ValueError)):
                    raise MirrorFailed(f"{self.location}: the process that mirrors has ended") from None
                raise
        if "error" in answer:
            raise _ERRORS.get(answer["kind"], MirrorFailed)(answer["error"])
        return answer["value"]

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "sojourn.storage.mirror_process", str(os.getpid()), *self._arguments]
        # In a session of its own: Ctrl-C in the terminal is the trainer's business.
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        self._answers = queue.SimpleQueue()
        threading.Thread(target=_read_lines, args=(child.stdout, self._answers), daemon=True).start()
        return child

    def _read_answer(self, child: subprocess.Popen[bytes], stall: float) -> dict[str, Any]:
        transferred, changed_at = -1, time.monotonic()
        while not self._abandoned.is_set():
            with contextlib.suppress(queue.Empty):
                return dict(json.loads(self._answers.get(timeout=_TICK)))
            count = _bytes_transferred(child.pid)
            if count != transferred:
                transferred, changed_at = count, time.monotonic()
            if time.monotonic() - changed_at > stall:
                raise MirrorFailed(
                    f"{self.location}: no answer for {stall:.0f} s; check that the drive, or the network, works"
                )
        raise MirrorFailed(f"{self.location}: did not finish in time")

    def _drop_child(self) -> None:
        """Not waited for: a child that waits for a hung drive cannot be killed."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(OSError):
                child.kill()
            with contextlib.suppress(OSError):
                if child.stdin is not None:
                    child.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)


def _read_lines(pipe: Any, into: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(OSError, ValueError), pipe:
        for line in io.BufferedReader(pipe):
            into.put(line)
    into.put(b"")  # which is no JSON: the child has ended


def _bytes_transferred(pid: int) -> int:
    """By the process so far; 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    except (OSError, ValueError, IndexError):
        return 0


def serve(mirror: Mirror, calls: IO[bytes], answers: IO[str]) -> None:
    """Until there are no more calls."""
    paths = {"put": 0, "put_file": 0, "fetch": 1}
    for line in calls:
        if not line.endswith(b"\n"):
            return  # the trainer was killed while it wrote
        name, *arguments = json.loads(line)
        values = [Path(value) if index == paths.get(name) else value for index, value in enumerate(arguments)]
        try:
            value = getattr(mirror, name)(*values)
            answer = {"value": base64.b64encode(value).decode() if isinstance(value, bytes) else value}
        except UserError as error:
            answer = {"kind": type(error).__name__, "error": str(error)}
        except Exception as error:
            answer = {"kind": "MirrorFailed", "error": f"{mirror.location}: {type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _main(trainer: str, text: str, run_name: str) -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):  # the trainer decides when to end
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed trainer's copy would meet the next one
    if os.name == "posix" and os.getppid() != int(trainer):
        return  # it was killed before this process could ask to end with it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        serve(open_mirror(text, run_name), sys.stdin.buffer, answers)
    except BrokenPipeError:
        os._exit(0)  # the trainer has just been killed; a usual end would complain of what cannot be flushed


if __name__ == "__main__":
    _main(*sys.argv[1:])
