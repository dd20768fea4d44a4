"""A resumable folder: written beside its target under another name, then renamed. The target is complete or absent.

.partial-NAME/sojourn_export.json records what is complete, and what it is made from. The same command goes on there; a
command for other weights, another format or another version of Sojourn starts anew. One process writes it at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from sojourn.errors import RunFailed, UserError
from sojourn.export.progress import NoProgress, Progress
from sojourn.export.ranges import Part, write_ranges
from sojourn.machine.process import boot_id, current_process, is_alive, pid_namespace
from sojourn.storage import disk
from sojourn.storage.files import is_plain_name, read_json_object, sha256, write_json, write_text

MANIFEST = "sojourn_export.json"
_PARTIAL = ".partial"
_ELSEWHERE = "choose another folder: --out DIR"


class ExportStage:
    """Held from construction until `close`, or the end of the `with` block; what is complete then stays, but for
    wrong input."""

    def __init__(
        self, target: Path, fingerprint: str, progress: Progress | None = None, overwrite: bool = False
    ) -> None:
        self.target = Path(os.path.abspath(target))  # noqa: PTH100 - also of `..`, and without following links
        if not self.target.name:
            raise UserError(f"--out: {target} cannot be replaced by an export; {_ELSEWHERE}")
        self.path = self.target.with_name(f".partial-{self.target.name}")
        self.progress: Progress = progress or NoProgress()
        self._fingerprint, self._overwrite = fingerprint, overwrite
        self._hashing, self._recording, self._is_closed = threading.Lock(), threading.Lock(), False
        self._refuse_existing()
        self._lock = _lock(self.path, self.target)
        try:
            _recover(self.target)
            self._refuse_existing()  # another process may have finished it since
            self._resume()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ExportStage:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if isinstance(error, UserError) and error.code == UserError.code and self.path.exists():
            disk.remove_folder(self.path)  # wrong input: another call would fail again
        self.close()

    def close(self) -> None:
        with self._recording:
            self._is_closed = True
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """The complete ones: size and SHA-256."""
        self._hash_files()
        return {name: {key: facts[key] for key in ("size", "sha256")} for name, facts in self._files.items()}

    def start_hashing(self) -> None:
        """In a thread, while the export is replayed; `finish` waits for it."""
        threading.Thread(target=self._hash_in_thread, name="hash", daemon=True).start()

    def _hash_in_thread(self) -> None:
        with contextlib.suppress(OSError, RunFailed):  # it was discarded, or `finish` meets the same error
            self._hash_files()

    def _hash_files(self) -> None:
        with self._hashing:
            for name, facts in list(self._files.items()):
                if self._is_closed:
                    return
                if not facts["sha256"]:
                    facts["sha256"] = sha256(self.path / name)
                    self._write_record()

    def file(self, name: str, write: Callable[[Path], object]) -> None:
        """Has `write` write a file to a path that is renamed to `name`; skipped where it is complete."""
        if self._is_complete(name):
            return
        partial = self._partial(name)
        partial.unlink(missing_ok=True)
        write(partial)
        disk.sync_file(partial)
        self._complete(name, partial, sha256(partial))

    def text(self, name: str, text: str) -> None:
        self.file(name, lambda path: write_text(path, text))

    def json(self, name: str, value: Any) -> None:
        self.file(name, lambda path: write_json(path, value))

    def copy(self, name: str, source: Path) -> None:
        self.file(name, lambda path: shutil.copyfile(source, path))

    def group(self, name: str, write: Callable[[Path], object]) -> None:
        """Has `write` fill a folder with files that belong together; they then are files of the export. For libraries
        that write several files at once. `name`: of the group, for the record."""
        if all(map(self._is_complete, self._groups.get(name, [""]))):
            return
        folder = self.path / f"{name}{_PARTIAL}"
        disk.remove_folder(folder)
        folder.mkdir()
        write(folder)
        written = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in written:
            disk.sync_file(path)
            self._complete(path.relative_to(folder).as_posix(), path, sha256(path))
        disk.remove_folder(folder)
        self._groups[name] = [path.relative_to(folder).as_posix() for path in written]
        self._write_record()

    def ranges(self, name: str, total: int, parts: Sequence[Part]) -> None:
        """A large file, part by part: see `ranges.py`. Goes on after the last part that reached the disk."""
        if self._is_complete(name):
            self.progress.advance(total, is_new=False)
            return
        partial, written = self._partial(name), self._parts.get(name, {})
        is_same = written.get("total") == total and written.get("parts") == len(parts)
        done = int(written["done"]) if is_same and partial.is_file() and partial.stat().st_size == total else 0
        self.progress.advance(sum(part.length for part in parts[:done]), is_new=False)

        def record(count: int) -> None:
            self._parts[name] = {"total": total, "parts": len(parts), "done": count}
            self._write_record()

        write_ranges(partial, total, parts, done, record, self.progress)
        self._complete(name, partial)  # hashed later: that takes longer than writing

    def check_space(self, total: int) -> None:
        """Before an export of about `total` bytes is written, or written further."""
        free, needed = shutil.disk_usage(self.path).free, total - self._allocated_bytes()
        if needed > free:
            raise RunFailed(
                f"{self.target.parent}: {free / 2**20:,.1f} MiB free, but the export takes {needed / 2**20:,.1f} MiB; "
                f"free some space there, or {_ELSEWHERE}"
            )

    def _allocated_bytes(self) -> int:
        """What of it is on the disk already; an incomplete file is partly a hole."""
        found = (path.stat() for path in self.path.rglob("*") if path.is_file())
        return sum(min(stat.st_size, getattr(stat, "st_blocks", 1 << 60) * 512) for stat in found)

    def remove(self, name: str) -> None:
        """A file that the export shall not have after all."""
        if name in self._files:
            del self._files[name]
            self._write_record()
        (self.path / name).unlink(missing_ok=True)

    def finish(self, facts: dict[str, Any]) -> Path:
        """Writes the manifest with `facts`, then renames the stage to the target."""
        manifest = {**facts, "fingerprint": self._fingerprint, "files": dict(sorted(self.files.items()))}
        write_json(self.path / MANIFEST, manifest)
        self._remove_strays()
        disk.sync_folder(self.path)
        old = self.target.with_name(f".old-{self.target.name}")
        if self.target.exists():
            self._refuse_existing()
            disk.remove_folder(old)
            disk.rename(self.target, old)
        disk.rename(self.path, self.target)
        disk.sync_folder(self.target.parent)
        disk.remove_folder(old)
        self.close()
        return self.target

    def discard(self, keep_as: Path | None = None) -> None:
        """Removes the stage, or moves it to `keep_as`."""
        if keep_as is not None:
            disk.remove_folder(keep_as)
            disk.rename(self.path, keep_as)
        else:
            disk.remove_folder(self.path)
        self.close()

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.target) and not self._overwrite:
            raise UserError(f"{self.target} exists already; {_ELSEWHERE}, or replace it: --overwrite")
        if self._overwrite and self.target.exists() and not (self.target / MANIFEST).is_file():
            raise UserError(f"{self.target} is no export, so --overwrite does not replace it; {_ELSEWHERE}")

    def _resume(self) -> None:
        record = read_json_object(self.path / MANIFEST)
        if record.get("fingerprint") != self._fingerprint:
            if record:
                self.progress.say(f"note: {self.path.name} was started from other weights or settings; starting anew")
            for path in self.path.iterdir():
                disk.remove_folder(path) if path.is_dir() else path.unlink()
            record = {}
        self._files: dict[str, dict[str, Any]] = record.get("files") or {}
        self._parts: dict[str, dict[str, int]] = record.get("parts") or {}
        self._groups: dict[str, list[str]] = record.get("groups") or {}
        if self._files or self._parts:
            self.progress.say(f"note: going on in {self.path}")
        self._write_record()

    def _remove_strays(self) -> None:
        """What killed calls began under a name that no later call used."""
        for path in sorted(self.path.rglob("*"), reverse=True):
            if path.is_dir():
                with contextlib.suppress(OSError):
                    path.rmdir()  # only where it is empty
            elif path.relative_to(self.path).as_posix() not in (*self._files, MANIFEST):
                path.unlink()

    def _write_record(self) -> None:
        pid, started = current_process()
        owner = {"pid": pid, "started": started, "boot": boot_id(), "namespace": pid_namespace()}
        record = {"fingerprint": self._fingerprint, "files": self._files, "parts": self._parts}
        with self._recording:
            if not self._is_closed:
                write_json(self.path / MANIFEST, {**record, "groups": self._groups, "owner": owner})

    def _partial(self, name: str) -> Path:
        if not all(map(is_plain_name, PurePosixPath(name).parts)):
            raise ValueError(f"not a name within the export: {name}")
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.with_name(path.name + _PARTIAL)

    def _is_complete(self, name: str) -> bool:
        """By size and time; where the time differs, by content."""
        facts, path = self._files.get(name), self.path / name
        if facts is None or not path.is_file():
            return False
        stat = path.stat()
        if stat.st_size != facts["size"]:
            return False
        return stat.st_mtime_ns == facts.get("mtime_ns") or sha256(path) == facts["sha256"]

    def _complete(self, name: str, partial: Path, digest: str = "") -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        stat = partial.stat()
        disk.rename(partial, path)
        disk.sync_folder(path.parent)
        self._files[name] = {"size": stat.st_size, "sha256": digest, "mtime_ns": stat.st_mtime_ns}
        self._parts.pop(name, None)
        self._write_record()


def _is_written_elsewhere(path: Path) -> bool:
    """Whether another process of this machine says that it writes this stage: for drives without flock."""
    owner = read_json_object(path / MANIFEST).get("owner")
    if not isinstance(owner, dict) or (owner.get("boot"), owner.get("namespace")) != (boot_id(), pid_namespace()):
        return False
    return owner.get("pid") != os.getpid() and is_alive(owner.get("pid", 0), owner.get("started", 0.0))


def _lock(path: Path, target: Path) -> int | None:
    """An flock on the folder itself, which moves with it. None where the system or the drive has none."""
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDONLY) if os.name == "posix" else None
        except FileNotFoundError:
            continue  # it was finished or removed since
        except OSError as error:
            raise RunFailed(f"{target}: cannot be written: {error.strerror}; {_ELSEWHERE}") from None
        flocked = handle is not None and _flock(handle)
        if flocked is None or (not flocked and _is_written_elsewhere(path)):
            if handle is not None:
                os.close(handle)
            raise UserError(f"{target}: another export writes it at this moment; wait for it, or {_ELSEWHERE}")
        with contextlib.suppress(FileNotFoundError):
            if handle is None or os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        if handle is not None:
            os.close(handle)


def _flock(handle: int) -> bool | None:
    """False where the drive has no flock, None where another process holds it."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return None if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN) else False
    return True


def _recover(target: Path) -> None:
    """After a kill between the two renames of a replacement."""
    old = target.with_name(f".old-{target.name}")
    if old.exists():
        with contextlib.suppress(OSError):
            disk.remove_folder(old) if target.exists() else disk.rename(old, target)
