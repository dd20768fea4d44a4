"""A run folder that is moved, deleted or replaced while its run trains: the run goes on in a new folder.

The new folder is at the old place, so that the same command resumes there. Where another run has taken that place, the
run saves beside it and stops.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sojourn.errors import UserError
from sojourn.run import unwritten
from sojourn.run.folder import RunFolder

_UNKNOWN = (0, 0)  # the drive does not answer: the folder may still be there


@dataclass(frozen=True)
class Restored:
    """`message`: what happened. `displaced`: another run is at the old place, so this one must stop."""

    message: str
    displaced: bool


class FolderWatch:
    """Keeps the files without which a folder is no run."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._id = run, _folder_id(run.path)
        self._files: dict[str, bytes] = {}
        for file in (run.config, run.environment, run.identity) if run.is_main_process else ():
            with suppress(OSError):
                self._files[file.name] = file.read_bytes()

    def restore(self) -> Restored | None:
        """Makes a new folder where the run's own is gone. None: it is there, or no new one can be made yet."""
        run, old = self._run, self._run.path
        if not run.is_main_process or (found := _folder_id(old)) == _UNKNOWN:
            return None
        try:
            has_config = run.exists()
            if found == self._id and has_config:
                return None
            displaced = found != self._id and has_config  # a folder that logging has made again has no run.yaml
            if displaced:
                numbered = (old.with_name(f"{old.name}-rescued-{number}") for number in itertools.count(1))
                run.relocate(next(path for path in numbered if not path.exists()))
            if run.lock is not None:
                run.lock.move(run.path)
            for name, content in self._files.items():
                (run.path / name).write_bytes(content)
        except (OSError, UserError) as error:  # UserError: a process that is starting another run there
            unwritten.count(str(run.path), error)
            return None
        self._id = _folder_id(run.path)
        if displaced:
            return Restored(f"{old} was replaced by another run; this one is saved in {run.path}", displaced)
        return Restored(f"{old} was moved or deleted; a new folder is there, and the run is saved again", displaced)


def _folder_id(path: Path) -> tuple[int, int] | None:
    """None where there is no folder."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return _UNKNOWN
    return found.st_dev, found.st_ino
