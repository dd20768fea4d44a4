"""Wheels for a box without internet, downloaded here: exactly what is missing there, for its Python and its C library.

pip resolves against empty stand-ins for what the box has: nothing that is there is downloaded, above all not torch.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed
from sojourn.remote.box.stand_ins import write_stand_ins
from sojourn.remote.image_python import for_box

_OLDEST_GLIBC = 17
_MINUTES = 30


def download_wheels(
    requirements: Sequence[str], constraints: Sequence[str], python: Mapping[str, Any], folder: Path
) -> list[Path]:
    """Into the folder; `python` is the row of the probe, with its packages. `constraints` pin torch and its kin."""
    if importlib.util.find_spec("pip") is None:
        raise RunFailed("the box has no internet, and there is no pip here to download for it: python -m ensurepip")
    wanted = [need for each in requirements if (need := for_box(each, python)) is not None]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        everything = write_stand_ins(str(Path(scratch) / "installed"), python["packages"])
        # What is installed stays as it is where that works; else only torch and its kin do.
        for pins in (everything, constraints):
            error = _pip_download(wanted, pins, python, Path(scratch), folder)
            if error is None:
                break
        else:
            raise RunFailed(f"packages for the box could not be downloaded here: {error}")
        for wheel in (Path(scratch) / "installed").glob("*.whl"):
            (folder / wheel.name).unlink(missing_ok=True)
    return sorted(folder.glob("*.whl"))


def _pip_download(
    wanted: Sequence[str], pins: Sequence[str], python: Mapping[str, Any], scratch: Path, folder: Path
) -> str | None:
    """The last line of pip's error, None when it worked."""
    (scratch / "requirements").write_text("\n".join(wanted) + "\n", encoding="utf-8")
    (scratch / "constraints").write_text("\n".join(pins) + "\n", encoding="utf-8")
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    argv += ["--only-binary=:all:", "--dest", str(folder), "--find-links", str(scratch / "installed")]
    argv += ["--implementation", "cp", "--python-version", ".".join(map(str, python["version"][:2]))]
    for tag in platform_tags(python):
        argv += ["--platform", tag]
    argv += ["-r", str(scratch / "requirements"), "-c", str(scratch / "constraints")]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=_MINUTES * 60, check=False
        )
    except subprocess.TimeoutExpired:
        return f"pip took longer than {_MINUTES} minutes"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [f"exit code {done.returncode}"])[-1]


def platform_tags(python: Mapping[str, Any]) -> list[str]:
    """manylinux tags that the box's C library can load, the newest first."""
    machine = str(python["platform"]).partition("-")[2]
    numbers = re.findall(r"\d+", python.get("libc") or "")
    minor = int(numbers[1]) if len(numbers) > 1 else _OLDEST_GLIBC
    tags = [f"manylinux_2_{number}_{machine}" for number in range(minor, _OLDEST_GLIBC - 1, -1)]
    return [
        *tags,
        f"manylinux2014_{machine}",
        f"manylinux_2_12_{machine}",
        f"manylinux2010_{machine}",
        f"linux_{machine}",
    ]
