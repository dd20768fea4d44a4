"""The output of `generate`: JSONL in the order of the prompts, resumable after a kill at any moment.

Beside FILE, `.FILE.settings.json` has the settings that decide its content. Rows are appended and fsynced together; on
resume, a row that was cut short is removed and the rest is kept. A file that other settings or another program made is
never changed without --overwrite. The file is locked while it is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed, UserError
from sojourn.storage import disk
from sojourn.storage.files import advice, read_json, write_json

_BLOCK_BYTES = 1 << 20


class CompletionsFile:
    """Open and locked from construction until `close`. `done`: rows that it has."""

    def __init__(
        self, path: Path, settings: dict[str, Any], total: int, overwrite: bool, draw_seed: Callable[[], int]
    ) -> None:
        """`total`: rows of the whole file. A `seed` of None is the one that the file was started with, else drawn."""
        self.path, self._settings_path = path, path.with_name(f".{path.name}.settings.json")
        self._handle = _open(path)
        try:
            _lock(self._handle, path)
            self.settings = self._begin(settings, total, overwrite, draw_seed)
        except BaseException:
            os.close(self._handle)
            raise

    def _begin(
        self, given: dict[str, Any], total: int, overwrite: bool, draw_seed: Callable[[], int]
    ) -> dict[str, Any]:
        written = read_json(self._settings_path)
        known = written if isinstance(written, dict) else {}
        settings = {**given, "seed": known.get("seed")} if given["seed"] is None else given
        self.done, size = _complete_rows(self._handle)
        is_begun = os.fstat(self._handle).st_size > 0
        if is_begun and (known != settings or (overwrite and self.done >= total)):
            if not overwrite:
                raise UserError(f"{self.path}: {_difference(known, settings)}; choose another --out, or --overwrite")
            is_begun, self.done, size = False, 0, 0
        if not is_begun and given["seed"] is None:
            settings["seed"] = draw_seed()
        with _write_errors(self.path):
            os.ftruncate(self._handle, size)
            os.lseek(self._handle, size, os.SEEK_SET)
            if known != settings:
                write_json(self._settings_path, settings)
        return settings

    def append(self, rows: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        data = lines.encode(errors="backslashreplace")  # half a surrogate pair as JSON's own escape of it
        with _write_errors(self.path), os.fdopen(os.dup(self._handle), "wb", buffering=0) as file:
            disk.write(file, data)
            disk.sync(file.fileno())
        self.done += len(rows)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._handle)


def _open(path: Path) -> int:
    try:
        handle = os.open(
            path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), 0o644
        )
    except FileNotFoundError:
        raise UserError(f"--out: {path.parent}: no such folder; create it first") from None
    except OSError as error:
        raise UserError(f"--out: {path}: {error.strerror}; {advice(error)}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"--out: {path}: not an ordinary file; leave --out out to print the rows")
    return handle


def _lock(handle: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"--out: {path}: another process is writing it; wait for it, or choose another --out") from None
    except OSError:  # a drive without locks
        return


def _complete_rows(handle: int) -> tuple[int, int]:
    """The number of rows that end with a line feed, and their bytes."""
    rows, size, at = 0, 0, 0
    os.lseek(handle, 0, os.SEEK_SET)
    while block := os.read(handle, _BLOCK_BYTES):
        rows += block.count(b"\n")
        end = block.rfind(b"\n") + 1
        size = at + end if end else size
        at += len(block)
    return rows, size


def _difference(known: dict[str, Any], settings: dict[str, Any]) -> str:
    """What differs between the settings of the file and those of this command."""
    if not known:
        return "it is there already, and no `generate` that can be resumed wrote it"
    for key in dict.fromkeys((*settings, *known)):
        if known.get(key) != settings.get(key):
            before, now = (json.dumps(one.get(key), ensure_ascii=False)[:60] for one in (known, settings))
            return f"it was started with {key} {before}, not {now}"
    return "it is complete"


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFailed(
            f"{path}: {error.strerror}; {advice(error)}; then run the same command to go on where it stopped"
        ) from None
