"""LangChain and LiteLLM against `sojourn serve` with a real model (`SOJOURN_REAL_MODEL`).

SOJOURN_LANGCHAIN_PYTHON and SOJOURN_LITELLM_PYTHON name the Pythons that have them (langchain-openai; litellm, mcp).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from real_lora import REAL, needs_model
from serve_engine import Command
from sojourn.infer.runtimes.managed_environment import clean_environment


def python_with(library: str, module: str) -> str:
    """Skips where there is none."""
    python = os.environ.get(f"SOJOURN_{library.upper()}_PYTHON", sys.executable)
    found = subprocess.run(
        [python, "-c", f"import {module}"], env=clean_environment(), capture_output=True, check=False
    )
    if found.returncode:
        pytest.skip(f"{python} has no {module}")
    return python


@needs_model
@pytest.mark.parametrize(("library", "module"), [("langchain", "langchain_openai"), ("litellm", "litellm")])
def test_its_basic_flows(library: str, module: str) -> None:
    python, flows = python_with(library, module), Path(__file__).with_name("client_flows.py")
    command = Command(REAL, "--max-length", "2048")
    try:
        done = subprocess.run(
            [python, str(flows), library, command.url, "real"],
            env={**clean_environment(), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert not [line for line in command.lines if "internal_error" in line]
    finally:
        command.process.kill()
