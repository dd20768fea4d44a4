"""vLLM's own server as a child process on a Unix socket that only this user can open."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed, UserError
from sojourn.infer.runtimes.managed_environment import VLLM, clean_environment, ends_with_parent, has_gpu

_START_SECONDS = 900
_REQUEST_SECONDS = 600
_STOP_SECONDS = 3
_LOG_LINES = 15
_BORING = ("Traceback", "raise ", "File ", "~", "^", "INFO", "DEBUG")


class VllmServer:
    """`arguments`: of `vllm serve`, beginning with the model. `eager`: without CUDA graphs, which start slowly.
    `runtime_lora`: adapters may be loaded later."""

    def __init__(self, arguments: list[str], eager: bool = True, runtime_lora: bool = False) -> None:
        import httpx

        self._folder = Path(tempfile.mkdtemp(prefix="sojourn-vllm-"))
        self._log, self.socket = self._folder / "log.txt", self._folder / "s"
        self._process = self._start([*arguments, *(["--enforce-eager"] if eager else [])], self.socket, runtime_lora)
        transport = httpx.HTTPTransport(uds=str(self.socket))
        self._client = httpx.Client(transport=transport, base_url="http://vllm", timeout=_REQUEST_SECONDS)
        try:
            self._wait_until_healthy()
        except BaseException:
            self.close()
            raise

    def _start(self, arguments: list[str], socket: Path, runtime_lora: bool) -> subprocess.Popen[bytes]:
        model, *rest = arguments
        command = [
            *ends_with_parent(), str(VLLM.python()), "-m", "vllm.entrypoints.openai.api_server", "--model", model,
            "--uds", str(socket), *rest,
        ]  # fmt: skip
        environment = clean_environment()
        if runtime_lora:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        if not has_gpu():
            command += ["--dtype", "float32"]
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        with self._log.open("wb") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=self._folder,
                start_new_session=True,
            )  # fmt: skip

    def _wait_until_healthy(self) -> None:
        import httpx

        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self._failure(f"vLLM could not open it (exit code {self._process.returncode})")
            with contextlib.suppress(httpx.TransportError):
                if self._client.get("/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.3)
        raise self._failure(f"vLLM did not answer within {_START_SECONDS} s")

    def is_healthy(self) -> bool:
        import httpx

        try:
            return bool(self._client.get("/health", timeout=5).status_code == 200)
        except httpx.TransportError:
            return False

    def get(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get(path).json()
        return found

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises `UserError` with vLLM's own reason where it refuses."""
        import httpx

        try:
            answer = self._client.post(path, json=body)
        except httpx.TransportError as error:
            raise self._failure(f"vLLM went away at {path} ({type(error).__name__})") from None
        if answer.status_code != 200:
            raise UserError(f"vLLM refuses {path}: {' '.join(answer.text.split())[:300]}")
        found: dict[str, Any] = answer.json()
        return found

    def _failure(self, what: str) -> RunFailed:
        """Shows the end of the log; the error has its most telling line."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines[-_LOG_LINES:]:
            print(f"  vLLM: {line[:300]}", file=sys.stderr, flush=True)
        return RunFailed(f"{what}: {telling_line(lines)}")

    def close(self) -> None:
        self._client.close()
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its engine, where the server itself was killed
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def telling_line(lines: list[str]) -> str:
    """The last error in a log with tracebacks."""
    bare = [line.split("] ", 1)[-1].strip() for line in lines]
    errors = [line for line in bare if "Error" in line.split(" ", 1)[0] and not line.startswith(_BORING)]
    found = [*(line for line in errors if not line.startswith("RuntimeError: Engine")), *bare[-1:]]
    return (found or ["no line in its log"])[0][:300]
