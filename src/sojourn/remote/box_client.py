"""A box as the verbs use it: commands, files, trees, logs, forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.remote.box_link import BoxLink

if TYPE_CHECKING:
    from sojourn.remote.ignore import Ignore
    from sojourn.remote.progress import ProgressBar, ProgressCallback
    from sojourn.remote.sync import Synced

_MOST_READ = 64 << 20


@dataclass(frozen=True)
class Found:
    """An entry of a folder on the box."""

    path: str
    kind: str
    size: int
    modified: float
    content: bytes = b""


class Box(BoxLink):
    """Files and trees of a box."""

    # files

    def read_bytes(self, path: str, most: int = _MOST_READ) -> bytes | None:
        """None where there is no such file."""
        answer, data = self._ask("read", path=path, most=most)
        return data if answer["found"] else None

    def write_bytes(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Atomic and durable; makes the folders on the way."""
        self._ask("write", data, path=path, mode=mode)

    def tail(self, path: str, offset: int, wait: float = 0.0, most: int = 1 << 20) -> bytes:
        """What comes after `offset` bytes; waits up to `wait` seconds for something to come."""
        return self._ask("tail", agent="tail", path=path, offset=offset, wait=min(wait, 60.0), most=most)[1]

    def list_files(self, pattern: str) -> list[Found]:
        """By a glob pattern; `**` for all folders below."""
        return self._list(pattern, content=False)

    def list_json(self, pattern: str) -> dict[str, Any]:
        """The JSON files that match, by path; a file that is not JSON is None."""
        import json

        result = {}
        for found in self._list(pattern, content=True):
            if found.kind == "file":
                try:
                    result[found.path] = json.loads(found.content)
                except ValueError:
                    result[found.path] = None
        return result

    def list_folder(self, path: str) -> list[str]:
        """The names in a folder; none where there is no such folder."""
        from glob import escape

        names = [found.path.rstrip("/").rpartition("/")[2] for found in self._list(f"{escape(path)}/*", content=False)]
        return sorted(names)

    def _list(self, pattern: str, content: bool) -> list[Found]:
        answer, data = self._ask("list", pattern=pattern, content=content, most=_MOST_READ)
        result, at = [], 0
        for path, kind, size, modified, length in answer["found"]:
            result.append(Found(path, kind, size, modified, data[at : at + length]))
            at += length
        return result

    def make_folder(self, path: str, mode: int = 0o755) -> None:
        self._ask("mkdir", path=path, mode=mode)

    def remove(self, path: str) -> None:
        """A file, or a folder with everything in it; nothing where there is none."""
        self._ask("remove", path=path)

    def rename(self, old: str, new: str) -> None:
        self._ask("rename", old=old, new=new)

    def free_bytes(self, path: str) -> int:
        return int(self._ask("disk", path=path)[0]["free"])

    # trees

    def push(
        self,
        items: Sequence[tuple[Path, str]],
        progress: ProgressCallback | None = None,
        ignore: Ignore | None = None,
        *,
        delete: bool = False,
        durable: bool = False,
    ) -> Synced:
        """Files and folders to their paths on the box; only what changed travels. `delete`: what is in the folders on
        the box but not here. `durable`: the box's disks have it before this returns. Raises SyncFailed."""
        from sojourn.remote.upload import Upload

        return Upload(self, list(items), progress, ignore, delete, durable).run()

    def pull(
        self, remote: str, local: Path, progress: ProgressCallback | None = None, ignore: Ignore | None = None
    ) -> Synced:
        """A file or folder of the box to `local`, each file verified. A folder with a manifest.json appears only when
        it is whole. Raises SyncFailed; MissingOnBox where there is no such path."""
        from sojourn.remote.download import Download

        return Download(self, remote, local, progress, ignore).run()

    def pull_file(self, remote: str, local: Path, missing_ok: bool = False) -> bool:
        """False where there is no such file, which is an error unless `missing_ok`."""
        from sojourn.remote.download import MissingOnBox

        try:
            self.pull(remote, local)
        except MissingOnBox:
            if not missing_ok:
                raise
            return False
        return True

    def progress(self, label: str) -> ProgressBar:
        """For `push` and `pull`."""
        from sojourn.remote.progress import ProgressBar

        return ProgressBar(label, self.say)
