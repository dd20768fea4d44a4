"""Time that a process uses before it holds the run folder's lock and writes its ledger.

Importing torch and starting CUDA take seconds. A process that is killed meanwhile leaves a record of its own,
`.startup-PID-TOKEN.json`; the next process that holds the lock adds it to the ledger.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path
from types import TracebackType

from sojourn import imported_at, imported_by
from sojourn.run.ledger import Ledger, is_amount
from sojourn.storage.files import read_json_object

_JUST_STARTED = 2.0  # seconds from the import of sojourn to the first line of a command, with margin


class Startup:
    """Counts from where it is made, or from the start of a process that has just started; recorded from `with` on,
    until `end`."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: of the run; None: nothing is recorded."""
        name = f".startup-{os.getpid()}-{secrets.token_hex(4)}.json"
        now = time.monotonic()
        just_started = imported_by == os.getpid() and 0 <= now - imported_at < _JUST_STARTED
        began = imported_at if just_started else now
        self._record = Ledger(None if folder is None else folder / name, began=began)

    @property
    def began(self) -> float:
        return self._record.began

    def __enter__(self) -> Startup:
        if self._record.path is not None:
            with contextlib.suppress(OSError):  # reported by whoever locks the folder
                self._record.path.parent.mkdir(parents=True, exist_ok=True)
            self._record.__enter__()
        return self

    def end(self) -> None:
        """The ledger counts on from here."""
        if (path := self._stop()) is not None:
            with contextlib.suppress(OSError):
                path.unlink()

    def hand_over(self) -> None:
        """Leaves the record to the next process that holds the lock: this one only starts others."""
        if (path := self._stop()) is not None:
            with contextlib.suppress(OSError):
                path.rename(path.with_name(f".startup-0-{secrets.token_hex(4)}.json"))

    def _stop(self) -> Path | None:
        path = self._record.path
        if path is not None:
            self._record.__exit__(None, None, None)
            self._record.path = None
        return path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def add_killed_startups(folder: Path, ledger: Ledger) -> None:
    """Adds the records of processes that are gone. This process holds the lock of `folder`."""
    import psutil

    for path in folder.glob(".startup-*.json"):
        pid = path.name.split("-")[1]
        if pid.isdecimal() and int(pid) not in (0, os.getpid()) and psutil.pid_exists(int(pid)):
            continue  # of another process that is about to find the folder locked
        seconds = read_json_object(path).get("seconds")
        with contextlib.suppress(OSError):
            path.unlink()
            ledger.add(seconds if is_amount(seconds) else 0.0)
