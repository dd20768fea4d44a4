"""Ownership of a run folder: at most one process trains a run, also on shared storage and after a crash.

- `.lock` is locked with flock while a process trains. The kernel frees it when that process ends, however it ends.
- `.owner-N.json` is the claim of the Nth owner. It is created exclusively, so that of several processes that start at
  once only one becomes the Nth. The newest claim owns the run, and N is its fencing token: every write of a checkpoint
  first calls `check`, which fails when there is a newer claim.

An owner of this boot has ended if its flock is free and its process is gone. Another machine may ignore our flock, and
we cannot see its processes: its owner is alive as long as its claim's heartbeat changes. We compare heartbeats, never
times, since clocks differ and jump.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import stat
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from sojourn.errors import RunFailed, UserError
from sojourn.machine.process import boot_id, current_process, is_alive, pid_namespace
from sojourn.storage import disk
from sojourn.storage.files import CannotRead, read_json_object

HEARTBEAT_INTERVAL = 2.0  # seconds
HEARTBEAT_TIMEOUT = 20.0  # seconds without a heartbeat after which an owner on another machine has ended
_CLAIM = re.compile(r"\.owner-(\d{1,18})\.json")
_HELD = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)
_handles: set[int] = set()  # of our locks: a forked child would keep them locked after our end


class OwnershipLost(RunFailed):
    """Another process took over the run. This one must not write to it any more."""


@dataclass(frozen=True)
class Owner:
    """A claim. `beat` changes while its owner lives; `released`: it ended on purpose."""

    host: str = ""
    boot: str = ""
    pid_namespace: str = ""
    pid: int = 0
    started: float = 0.0
    beat: int = 0
    released: bool = False

    @classmethod
    def here(cls) -> Owner:
        pid, started = current_process()
        return cls(socket.gethostname(), boot_id(), pid_namespace(), pid, started)

    @property
    def description(self) -> str:
        where = "" if self.boot == boot_id() else f" on {self.host or 'another machine'}"
        return f"the process with pid {self.pid}{where}"


def is_owned_elsewhere(folder: Path) -> bool:
    """Whether a process that cannot be seen from here, of another machine or pid namespace, seems to train the run. For
    display only: this compares the clock with the time of the last heartbeat."""
    token, owner = _newest_claim(folder)
    if (
        owner is None
        or not owner.pid
        or owner.released
        or (owner.boot, owner.pid_namespace) == (boot_id(), pid_namespace())
    ):
        return False
    try:
        return abs(time.time() - _claim_path(folder, token).stat().st_mtime) < 3 * HEARTBEAT_TIMEOUT
    except OSError:
        return False


class RunLock:
    """Held from construction until `release`."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError where another process owns the run."""
        self.lost: str | None = None  # why this process no longer owns the run
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._acquire(folder)
        self._thread.start()

    def _acquire(self, folder: Path) -> None:
        handle = _open_lock_file(folder / ".lock")
        try:
            flocked = _flock(handle, folder)
            _refuse_older_version(folder / ".lock")
            token, owner = _newest_claim(folder)
            if owner is not None and _is_owner_alive(folder, token, owner, flocked):
                raise _owned_error(folder, owner)
            us = Owner.here()
            if not _create_claim(_claim_path(folder, token + 1), us):
                raise UserError(f"{folder}: another process is starting here right now; try again")
            if _newest_claim(folder)[0] > token + 1:  # others came and went since we looked, and removed theirs
                raise UserError(f"{folder}: another process has just started here; try again")
        except BaseException:
            _close(handle)
            raise
        self._folder, self._folder_id, self._handle = folder, _id(folder), handle
        self.token, self._owner = token + 1, us
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)  # what an older version wrote
        _remove_older_claims(folder, self.token)

    def move(self, folder: Path) -> None:
        """To another folder, or to one that was made anew at the same path."""
        old = self._handle
        self._acquire(folder)
        _close(old)

    @property
    def _claim(self) -> Path:
        return _claim_path(self._folder, self.token)

    def check(self) -> None:
        """Raises OwnershipLost where another process has taken over, RunFailed where the folder is another one."""
        if _id(self._folder) != self._folder_id:
            raise RunFailed(f"{self._folder}: was moved, deleted or replaced")
        token, owner = _newest_claim(self._folder)
        if token > self.token and self.lost is None:
            other = owner.description if owner is not None and owner.pid else "another process"
            self.lost = f"{self._folder}: {other} has taken over this run; this one stops and writes nothing more"
        if self.lost is not None:
            raise OwnershipLost(self.lost)

    def release(self) -> None:
        self._stopped.set()
        self._thread.join()
        if self.lost is None:
            with contextlib.suppress(OSError):
                self._write(released=True)
        _close(self._handle)

    def _beat(self) -> None:
        count = 0
        while not self._stopped.wait(HEARTBEAT_INTERVAL):
            count += 1
            with contextlib.suppress(OSError, RunFailed):
                self.check()
                self._write(beat=count)

    def _write(self, **changes: object) -> None:
        """In place: a reader that sees half of it sees a change all the same."""
        text = json.dumps(asdict(self._owner) | changes)
        with self._claim.open("r+b") as file:
            file.write(text.encode())
            file.truncate()


def _id(folder: Path) -> tuple[int, int] | None:
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _claim_path(folder: Path, token: int) -> Path:
    return folder / f".owner-{token}.json"


def _newest_claim(folder: Path) -> tuple[int, Owner | None]:
    """Its token, and its owner; 0 and None where nobody has ever claimed the run."""
    try:
        tokens = [int(match[1]) for path in folder.iterdir() if (match := _CLAIM.fullmatch(path.name))]
    except (FileNotFoundError, NotADirectoryError):  # the folder was moved away
        return 0, None
    except OSError as error:  # who knows whether there is a newer one
        raise CannotRead(folder, error) from error
    return max(tokens, default=0), _read_owner(_claim_path(folder, max(tokens))) if tokens else None


def _read_owner(path: Path) -> Owner:
    """A claim that cannot be read is that of an unknown owner."""
    try:
        found = read_json_object(path)
    except CannotRead:
        found = {}
    kinds = {name: type(value) for name, value in asdict(Owner()).items()}
    if all(isinstance(found.get(name), (kind, int) if kind is float else kind) for name, kind in kinds.items()):
        return Owner(**{name: found[name] for name in kinds})
    return Owner()


def _is_owner_alive(folder: Path, token: int, owner: Owner, flocked: bool) -> bool:
    if owner.released:
        return False
    if owner.boot == boot_id():
        if owner.pid_namespace == pid_namespace():
            return is_alive(owner.pid, owner.started)
        if flocked:  # one kernel, so its flock would be held
            return False
    print(
        f"note: {folder} was last trained by {owner.description} and not released; watching it for "
        f"{HEARTBEAT_TIMEOUT:.0f} s",
        flush=True,
    )
    until = time.monotonic() + HEARTBEAT_TIMEOUT
    while time.monotonic() < until:
        time.sleep(min(0.5, HEARTBEAT_TIMEOUT / 10))
        if _newest_claim(folder) != (token, owner):
            return True
    return False


def _create_claim(path: Path, owner: Owner) -> bool:
    """False where somebody else has created it. It appears with its content, where the drive has hard links."""
    data = json.dumps(asdict(owner)).encode()
    stage = path.with_name(f".owner-{os.getpid()}-{threading.get_ident()}.new")
    try:
        try:
            stage.write_bytes(data)
            os.link(stage, path)
        except FileExistsError:
            return False
        except OSError:
            try:
                file = path.open("xb")
            except FileExistsError:
                return False
            try:
                with file:
                    file.write(data)
            except OSError:
                path.unlink()  # a full disk: half a claim would be that of an unknown owner
                raise
        disk.sync_folder(path.parent)
    except OSError as error:
        raise RunFailed(
            f"{path.parent}: cannot be written: {error.strerror}; choose another folder: save.folder=FOLDER"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            stage.unlink()
    return True


def _remove_older_claims(folder: Path, token: int) -> None:
    for path in folder.iterdir():
        if (match := _CLAIM.fullmatch(path.name)) and int(match[1]) < token:
            with contextlib.suppress(OSError):
                path.unlink()


def _open_lock_file(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(path, flags, 0o644)
    except OSError as error:
        if path.is_symlink() or path.is_dir():
            raise UserError(f"{path}: not a regular file; remove it") from None
        raise RunFailed(
            f"{path.parent}: cannot be created: {error.strerror}; choose another folder: save.folder=FOLDER"
        ) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path}: not a regular file; remove it")
    _handles.add(handle)
    return handle


def _flock(handle: int, folder: Path) -> bool:
    """False where the drive, or the system, has no flock. Raises where another process holds it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _HELD:
            return False
        raise _owned_error(folder, _newest_claim(folder)[1] or Owner()) from None
    same = False
    with contextlib.suppress(OSError):
        same = os.path.samestat(os.fstat(handle), (folder / ".lock").stat())
    if not same:
        raise UserError(f"{folder}: another process is starting here right now; try again")
    return True


def _refuse_older_version(lock: Path) -> None:
    """Older versions wrote pid and start time into the lock file, and knew no flock."""
    try:
        pid, started = json.loads(lock.read_bytes()[:100])
    except (OSError, ValueError, TypeError):
        return
    if isinstance(pid, int) and isinstance(started, float) and is_alive(pid, started):
        raise _owned_error(lock.parent, Owner(boot=boot_id(), pid=pid))


def _owned_error(folder: Path, owner: Owner) -> UserError:
    who = owner.description if owner.pid else "another process"
    return UserError(f"{folder}: already being trained by {who}; wait for it, or give this run another name: name=NEW")


def _close(handle: int) -> None:
    _handles.discard(handle)
    with contextlib.suppress(OSError):
        os.close(handle)


def _close_all_in_child() -> None:
    for handle in list(_handles):
        _close(handle)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all_in_child)
