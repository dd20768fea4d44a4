"""Where the last save goes when the run folder cannot be written: the first other place that can."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from sojourn.config.schema import SaveConfig
from sojourn.errors import RunFailed
from sojourn.expand_user import expand_user
from sojourn.run.folder import RunFolder
from sojourn.run.home import home

_MEMORY = Path("/dev/shm")  # noqa: S108


def write_elsewhere(save: SaveConfig, run: RunFolder, write: Callable[[Path], Path]) -> Path:
    """Calls `write` with one folder after the other until it succeeds; what it returns is where the result is."""
    reasons = []
    for place in _places(save):
        folder = place / f"sojourn-rescued-{run.path.name}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return write(folder)
        except (OSError, RunFailed) as error:
            reasons.append(f"{place}: {getattr(error, 'strerror', None) or error}")
            with contextlib.suppress(OSError):
                folder.rmdir()  # if it is empty
    raise RunFailed("no other place could be written either (" + "; ".join(reasons) + ")")


def _places(save: SaveConfig) -> Iterator[Path]:
    """The mirror's drive, the home of runs, the user's home, temporary folders, memory: each once."""
    mirror = save.mirror if save.mirror is not None and not save.mirror.startswith("hub:") else None
    seen = set()
    with contextlib.suppress(RuntimeError):  # no home folder
        for place in (mirror, home(), Path("~"), tempfile.gettempdir(), _MEMORY):
            if place is None:
                continue
            path = expand_user(place).absolute()
            if path not in seen and (path.is_dir() or place is mirror):
                seen.add(path)
                yield path
