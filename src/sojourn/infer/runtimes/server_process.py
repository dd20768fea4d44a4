"""Another program's HTTP server as a child process, on a Unix socket that only this user can open."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed, UserError
from sojourn.infer.runtimes.managed_environment import ends_with_parent

_START_SECONDS = 900
_REQUEST_SECONDS = 600
_STOP_SECONDS = 3
_LOG_LINES = 15
_NOISE = ("nanobind", " - leaked", " - ... skipped", "See https://nanobind")  # after an end that is not vLLM's own
_BORING = ("Traceback", "raise ", "File ", "~", "^", "INFO", "DEBUG")


class ServerProcess:
    """`title`: of the program, for messages. `command`: starts it, listening at the socket that it is given. Returns
    when `/health` answers; raises RunFailed, and shows the end of its log, where it does not."""

    def __init__(self, title: str, command: Callable[[Path], list[str]], environment: dict[str, str]) -> None:
        import httpx

        self.title, self._end = title, ""
        self._folder = Path(tempfile.mkdtemp(prefix="sojourn-server-"))
        self._log, self.socket = self._folder / "log.txt", self._folder / "s.sock"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*ends_with_parent(), *command(self.socket)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, cwd=self._folder, start_new_session=True,
            )  # fmt: skip
        transport = httpx.HTTPTransport(uds=str(self.socket))
        self._client = httpx.Client(transport=transport, base_url="http://server", timeout=_REQUEST_SECONDS)
        try:
            self._wait_until_healthy()
        except BaseException:
            self.close()
            raise

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self._failure(f"{self.title} could not open it (exit code {self._process.returncode})")
            if self.is_healthy():
                return
            time.sleep(0.3)
        raise self._failure(f"{self.title} did not answer within {_START_SECONDS} s")

    def is_healthy(self) -> bool:
        import httpx

        try:
            return bool(self._client.get("/health", timeout=5).status_code == 200)
        except httpx.TransportError:
            return False

    def why_ended(self) -> str:
        """How it ended, and the telling line of its log, whose end is shown once."""
        code = self._process.poll()
        if code is not None and not self._end:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._end = str(self._failure(f"{self.title} {how}"))
        return self._end

    def get(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get(path).json()
        return found

    def get_text(self, path: str) -> str:
        return self._client.get(path, timeout=5).text

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises `UserError` with the program's own reason where it refuses."""
        import httpx

        try:
            answer = self._client.post(path, json=body)
        except httpx.TransportError as error:
            raise self._failure(f"{self.title} went away at {path} ({type(error).__name__})") from None
        if answer.status_code != 200:
            raise UserError(f"{self.title} refuses {path}: {' '.join(answer.text.split())[:300]}")
        found: dict[str, Any] = answer.json()
        return found

    def _failure(self, what: str) -> RunFailed:
        """Shows the end of the log; the error has its most telling line."""
        found = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [line for line in found if not line.startswith(_NOISE)]
        for line in lines[-_LOG_LINES:]:
            print(f"  {self.title}: {line[:300]}", file=sys.stderr, flush=True)
        return RunFailed(f"{what}: {telling_line(lines)}")

    def close(self) -> None:
        self._client.close()
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own children, where the server itself was killed
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def telling_line(lines: list[str]) -> str:
    """The last error in a log with tracebacks."""
    bare = [line.split("] ", 1)[-1].strip() for line in lines]
    errors = [line for line in bare if "Error" in line.split(" ", 1)[0] and not line.startswith(_BORING)]
    found = [*(line for line in errors if not line.startswith("RuntimeError: Engine")), *bare[-1:]]
    return (found or ["no line in its log"])[0][:300]
