"""llama.cpp in a child process: which Python runs it, its questions and answers, and a crash in one line."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed

PYTHON_VARIABLE = "SOJOURN_LLAMACPP_PYTHON"
PACKAGE = "llama-cpp-python"
_CHILD = Path(__file__).with_name("llamacpp_child.py")
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('llama_cpp') is None)"
_PORTABLE = (
    f'CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON" '
    f"pip install --force-reinstall --no-cache-dir {PACKAGE}"
)


def unavailable() -> str:
    """Empty, or what to install."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        return (
            ""
            if find_python()
            else f"{PYTHON_VARIABLE}: {named} has no llama_cpp; run: {named} -m pip install {PACKAGE}"
        )
    hint = f"or name a Python that has it: {PYTHON_VARIABLE}=/path/to/python"
    return "" if find_python() else f"llama.cpp is not installed here; run: pip install {PACKAGE}, {hint}"


def find_python() -> str | None:
    """The Python whose llama_cpp is used: the one that the variable names, this one, or the one on PATH."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        return named if _has_llama_cpp(named) else None
    if importlib.util.find_spec("llama_cpp") is not None:
        return sys.executable
    other = shutil.which("python3")
    return other if other is not None and _has_llama_cpp(other) else None


@lru_cache
def _has_llama_cpp(python: str) -> bool:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run([python, "-c", _FIND], capture_output=True, timeout=60, check=False).returncode == 0
    return False


class LlamaCpp:
    """`what`: for messages. Ends the child when it is closed."""

    def __init__(self, what: str) -> None:
        python = find_python()
        if python is None:
            raise RunFailed(unavailable())
        self._what = what
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        self._process = subprocess.Popen(
            [python, str(_CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment,
            text=True, encoding="utf-8",
        )  # fmt: skip

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, **given}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise RunFailed(f"{self._what}: llama.cpp {self._end()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RunFailed(f"{self._what}: llama.cpp: {self._reason(answer['error'])}")
        return answer

    def _end(self) -> str:
        """How the child ended, in words."""
        code = self._process.wait()
        if code == -signal.SIGILL:
            return f"uses instructions that this CPU refuses; build it without them: {_PORTABLE}"
        if code == -signal.SIGKILL:
            return "was killed (SIGKILL); is the memory full?"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return f"crashed ({name}): {self._last_words() or 'without a message'}"
        return f"ended ({code}): {self._last_words() or 'without a message'}"

    def _reason(self, error: str) -> str:
        words = self._last_words()
        return f"{error.split(': ', 1)[-1]}{f' ({words})' if words else ''}"

    def _last_words(self) -> str:
        """The last line of its log that says what went wrong."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read()[-20_000:].decode(errors="replace").splitlines()]
        wrong = [one for one in lines if any(word in one.lower() for word in ("error", "fail", "assert", "unknown"))]
        return (wrong or lines or [""])[-1][:200]

    def close(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
