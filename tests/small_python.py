"""Runs a function of a test module in a Python that has imported little, for tests that fork many times: to fork a
process that has imported torch costs more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_in_small_python(module: str, function: str, *arguments: object) -> None:
    """Fails where the function raises. Arguments are given by their `repr`; a path as text."""
    given = ", ".join(repr(str(one) if isinstance(one, Path) else one) for one in arguments)
    code = f"import sys, {module}; {module}.{function}({given}); assert 'torch' not in sys.modules"
    path = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
