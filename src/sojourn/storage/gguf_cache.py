"""A GGUF file unpacked once, in the user's cache: its config, its tokenizer and its dequantised weights.

CACHE/gguf/SHA256/config, …/tokenizer, …/float32 and so on: the name is the file's content, so a changed file never
gives old weights; each folder is complete or absent. Nothing here is needed: what cannot be kept is unpacked again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from sojourn.storage import disk
from sojourn.storage.file_digests import FileDigests
from sojourn.storage.stage import live_stages

_SHARE = 0.25  # of the free space that one folder may take: checkpoints may need the rest


def cache_root() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("sojourn") / "gguf"


class GgufCache:
    def __init__(self, file: Path, setting: str) -> None:
        self._file, self._root = file, cache_root()
        self._digests = FileDigests(self._root / ".digests.json", setting)
        self._folder = self._root / self._digests.of(file)[:32]
        with contextlib.suppress(OSError):
            self._root.mkdir(parents=True, exist_ok=True)
            self._digests.save()

    def find(self, *parts: str) -> Path | None:
        """The first of these that is there."""
        return next((self._folder / part for part in parts if (self._folder / part).is_dir()), None)

    def drop(self, folder: Path) -> None:
        disk.remove_folder(folder)

    def keep(self, part: str, size: int, write: Callable[[Path], object]) -> Path | None:
        """Has `write` fill a folder of about `size` bytes. None, after a line with the reason, where it cannot be
        kept; None without a line while another process does the same."""
        from safetensors import SafetensorError  # of a full disk

        target, stage = self._folder / part, self._folder / f".stage-{os.getpid()}-{part}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if live_stages(self._folder, part):
                return None
            free = shutil.disk_usage(self._folder).free
            if size > free * _SHARE:
                raise OSError(f"{_gib(size)} is more than a quarter of the {_gib(free)} free there")
            stage.mkdir()
            write(stage)
            for path in stage.iterdir():
                disk.sync_file(path)
            self._digests.check_unchanged()
            if not target.is_dir():
                disk.rename(stage, target)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            _say(f"note: {self._file.name} cannot be kept unpacked in {self._root}, so each start unpacks it: {reason}")
            return None
        finally:
            disk.remove_folder(stage)
        if size >= 2**20:
            _say(f"note: {self._file.name} is kept unpacked for the next time: {target} ({_gib(size)})")
        return target


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
