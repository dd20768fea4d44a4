"""The small files of runs on hosts, copied here while somebody looks at them: metrics and events as they grow, the
configuration and the environment. A thread for each run; the page reads the copy and never waits for a host."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.errors import UserError
from sojourn.run.folder import RunFolder

if TYPE_CHECKING:
    from sojourn.remote.box_client import Box

_SECONDS = 3.0  # between two looks
_IDLE_SECONDS = 30.0  # without anybody asking, the thread ends
_AGAIN_SECONDS = 20.0  # after a host did not answer
_GROWING = ("metrics.jsonl", "events.jsonl")
_SMALL = ("run.yaml", "environment.json", "ledger.json")
_MOST = 1 << 20


class RemoteCopies:
    """`folder`: one subfolder a host, in it one a run."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._asked: dict[tuple[str, str], float] = {}
        self._errors: dict[tuple[str, str], str] = {}

    def folder_of(self, host: str, run: str) -> RunFolder:
        """The copy, perhaps not there yet; it is brought up to date from now on."""
        key, path = (host, run), self._folder / host / run
        with self._lock:
            is_followed = key in self._asked
            self._asked[key] = time.monotonic()
        if not is_followed:
            threading.Thread(target=self._follow, args=(key, path), name=f"copy {host}:{run}", daemon=True).start()
        return RunFolder(path)

    def error(self, host: str, run: str) -> str | None:
        """Why the copy is not up to date."""
        return self._errors.get((host, run))

    def _follow(self, key: tuple[str, str], path: Path) -> None:
        try:
            while self._is_wanted(key):
                try:
                    self._copy_while_wanted(key, path)
                except (UserError, OSError) as error:
                    self._errors[key] = str(error)
                    time.sleep(_AGAIN_SECONDS)
        finally:
            with self._lock:
                self._asked.pop(key, None)

    def _is_wanted(self, key: tuple[str, str]) -> bool:
        return time.monotonic() - self._asked.get(key, 0.0) < _IDLE_SECONDS

    def _copy_while_wanted(self, key: tuple[str, str], path: Path) -> None:
        from sojourn.remote.box_client import Box
        from sojourn.remote.hosts import get_host
        from sojourn.remote.job import BoxPaths
        from sojourn.remote.private_files import try_lock

        host = get_host(key[0])
        there = BoxPaths(host, key[1]).run_folder
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.lock").open("ab") as lock:
            while not try_lock(lock.fileno()):  # another board of this home copies it: both read the same copy
                if not self._is_wanted(key):
                    return
                time.sleep(_SECONDS)
            with Box(host, say=lambda line: None, patience=10) as box:
                self._copy(key, path, there, box)

    def _copy(self, key: tuple[str, str], path: Path, there: str, box: Box) -> None:
        while self._is_wanted(key):
            identity = box.read_bytes(f"{there}/identity.json") or b""
            _start_anew_if_other(path, identity)
            for name in _SMALL:
                data = box.read_bytes(f"{there}/{name}", _MOST)
                if data is not None:
                    (path / name).write_bytes(data)
            for name in _GROWING:
                with (path / name).open("ab") as file:
                    while new := box.tail(f"{there}/{name}", file.tell(), most=_MOST):
                        file.write(new)
            self._errors.pop(key, None)
            time.sleep(_SECONDS)


def _start_anew_if_other(path: Path, identity: bytes) -> None:
    """Another run may have taken the name."""
    known = path / "identity.json"
    if known.is_file() and known.read_bytes() != identity:
        shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True, exist_ok=True)
    if identity and not known.is_file():
        known.write_bytes(identity)
