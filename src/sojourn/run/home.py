"""Where runs and prepared data live: SOJOURN_HOME, else the platform's persistent folder, else the working folder."""

from __future__ import annotations

import os
from pathlib import Path

from sojourn.errors import UserError
from sojourn.run.folder import RunFolder


def home() -> Path:
    chosen = os.environ.get("SOJOURN_HOME")
    if chosen:
        return Path(chosen).expanduser()
    from sojourn.machine.platform import persistent_home

    return persistent_home() or Path()


def home_warning() -> str | None:
    """What to tell the user before a run whose folder would not survive here."""
    if os.environ.get("SOJOURN_HOME"):
        return None
    from sojourn.machine.platform import detect, find_home

    found = find_home(detect())
    return f"{found.warning}; {found.fix}" if found.warning else None


def prepared_folder() -> Path:
    return home() / "prepared"


def run_folder(name: str, folder: str | None = None) -> RunFolder:
    return RunFolder(Path(folder).expanduser() if folder else home() / "runs" / name)


def find_run(word: str) -> RunFolder:
    """An existing run by its name or its folder."""
    for path in (home() / "runs" / word, Path(word).expanduser()):
        run = RunFolder(path)
        if run.exists():
            return run
    runs = home() / "runs"
    names = sorted(p.name for p in runs.iterdir() if RunFolder(p).exists()) if runs.is_dir() else []
    there = f"; there are: {', '.join(names[:10])}" if names else "; train one first: sojourn train small"
    raise UserError(f"no run is called “{word}” in {runs}{there}")
