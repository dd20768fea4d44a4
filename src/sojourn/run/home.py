"""Where runs and prepared data are: SOJOURN_HOME, else the platform's persistent folder, else the working folder."""

from __future__ import annotations

import os
from pathlib import Path

from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.run.folder import RunFolder


def home() -> Path:
    folder = os.environ.get("SOJOURN_HOME")
    if folder:
        return expand_user(folder)
    from sojourn.machine.platform import persistent_home

    return persistent_home() or Path()


def home_warning() -> str | None:
    """For a run folder that the platform would delete; None where it is safe."""
    if os.environ.get("SOJOURN_HOME"):
        return None
    from sojourn.machine.platform import detect, find_home

    found = find_home(detect())
    return f"{found.warning}; {found.fix}" if found.warning else None


def prepared_folder() -> Path:
    return home() / "prepared"


def run_folder(name: str, folder: str | None = None) -> RunFolder:
    return RunFolder(expand_user(folder) if folder else home() / "runs" / name)


def find_run(name: str) -> RunFolder:
    """An existing run by name or folder."""
    for path in (home() / "runs" / name, expand_user(name)):
        run = RunFolder(path)
        if run.exists():
            return run
    runs = home() / "runs"
    names = sorted(p.name for p in runs.iterdir() if RunFolder(p).exists()) if runs.is_dir() else []
    there = f"; there are: {', '.join(names[:10])}" if names else "; train one first: sojourn train small"
    raise UserError(f"no run is called “{name}” in {runs}{there}")
