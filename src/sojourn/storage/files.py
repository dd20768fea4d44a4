"""Files of a run: atomic writes, and reads that neither hang nor mistake the machine's errors for damage.

A kill or a power cut leaves the old or the new content, never half of one. Only regular files are opened, since a fifo,
a terminal or /dev/zero would never end. Every read distinguishes three cases: there is no such file (None, or
`FileNotFoundError`), its content or kind is wrong (`NotValid`), the machine could not read it (`CannotRead`). Only the
second is damage.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sojourn.errors import RunFailed
from sojourn.storage import disk

MOST_BYTES = 64 << 20  # of a file read whole: all of a run's JSON files are far smaller
_MOST_LINE_BYTES = 1 << 20
_MOST_LINES_BYTES = 1 << 30
_WRONG_KIND = {errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG}
_OPEN_FLAGS = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY", "O_NOCTTY"))
_IN_PLACE = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
_SPACE = "free some space or use another disk"
_RIGHTS = "check its owner and permissions"
_ADVICE = {
    errno.EMFILE: "allow more open files: ulimit -n 65536",
    errno.ENFILE: "the machine has too many open files; end other programs",
    errno.ENOMEM: "end other programs, or use a machine with more memory",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.ENOSPC: _SPACE,
    getattr(errno, "EDQUOT", errno.ENOSPC): _SPACE,
    errno.EROFS: "the disk is read-only; use another one",
    errno.EISDIR: "a folder is where a file belongs; rename that folder",
}


def advice(error: OSError) -> str:
    """What to do about an error of the machine; never to remove data."""
    return _ADVICE.get(error.errno or 0, "check the disk, then run the same command again")


class NotValid(ValueError):
    """The content or the kind of a file is wrong; the message says what, without the path."""


class CannotRead(RunFailed):
    """The machine could not read a file. Its content may be good: nothing may be removed or replaced for this."""

    def __init__(self, path: Path, error: OSError) -> None:
        reason = error.strerror or str(error)
        super().__init__(f"{path}: cannot be read: {reason}; {advice(error)}")
        self.errno = error.errno


def open_regular(path: Path, write: bool = False) -> BinaryIO:
    """Opens a regular file; `write`: to change it in place, not through a link. Never waits for a fifo or a device."""
    with _read_errors(path):
        _refuse_other_kinds(path.stat().st_mode)
        handle = os.open(path, _OPEN_FLAGS | (_IN_PLACE if write else os.O_RDONLY))
        try:
            _refuse_other_kinds(os.fstat(handle).st_mode)
            return os.fdopen(handle, "r+b" if write else "rb")
        except BaseException:
            os.close(handle)
            raise


def _refuse_other_kinds(mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket"}
    raise NotValid(f"{kinds.get(stat.S_IFMT(mode), 'a device')}, not a file")


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """An OSError as one of the three cases."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    except OSError as error:
        if error.errno in _WRONG_KIND:
            raise NotValid(error.strerror or str(error)) from None
        raise CannotRead(path, error) from error
    except MemoryError:
        raise CannotRead(path, OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))) from None


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes."""
    with open_regular(path) as file, _read_errors(path):
        if os.fstat(file.fileno()).st_size > most:
            raise NotValid(f"larger than {most:,} bytes")
        parts, rest = [], most + 1
        while rest > 0 and (part := file.read(min(rest, 1 << 20))):
            parts.append(part)
            rest -= len(part)
        if rest == 0:
            raise NotValid(f"larger than {most:,} bytes")
        return b"".join(parts)


def parse_json(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise NotValid("not UTF-8") from None
    except (ValueError, RecursionError):
        raise NotValid("not valid JSON") from None


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file, _read_errors(path):
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def file_size(path: Path) -> int:
    """Of a regular file."""
    with _read_errors(path):
        found = path.stat()
        _refuse_other_kinds(found.st_mode)
        return found.st_size


def is_plain_name(name: str) -> bool:
    """Whether it names a file directly inside a folder, on any system."""
    return name not in ("", ".", "..") and name.isprintable() and not any(mark in name for mark in "/\\:")


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Replaces `path` atomically. Not `durable`: a power failure may leave it empty, and nobody waits for the disk."""
    stage = path.with_name(f".{path.name}.{os.getpid()}")
    stage.unlink(missing_ok=True)
    try:
        with stage.open("xb", buffering=0) as file:
            disk.write(file, text.encode())
            if durable:
                disk.sync(file.fileno())
        disk.rename(stage, path)
    except BaseException:
        stage.unlink(missing_ok=True)
        raise
    if durable:
        disk.sync_folder(path.parent)


def remove_temporary_files(folder: Path) -> None:
    """Removes what killed calls of `write_text` left in `folder`. No other process may write there."""
    for path in folder.glob(".*.*"):
        pid = path.name.rpartition(".")[2]
        if pid.isdecimal() and int(pid) != os.getpid() and path.is_file():
            path.unlink(missing_ok=True)


def read_text(path: Path) -> str | None:
    """The content, or None where there is no such file, or no text. Raises `CannotRead`."""
    try:
        return read_bytes(path).decode("utf-8")
    except (FileNotFoundError, ValueError):
        return None


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    write_text(path, _json_text(value), durable)


def _json_text(value: Any, **options: Any) -> str:
    """Half a surrogate pair (in a file name that is not UTF-8, for example) becomes JSON's own escape of it."""
    text = json.dumps(value, ensure_ascii=False, **{"indent": 2, **options}) + "\n"
    return text.encode(errors="backslashreplace").decode()


def overwrite_json(path: Path, value: Any) -> bool:
    """Writes over a file that is there, for a full disk: one call, no new blocks. False where that fails too."""
    try:
        content = _json_text(value).encode()
        with path.open("rb+", buffering=0) as file:
            content = content.ljust(path.stat().st_size)
            return file.write(content) == len(content)
    except (OSError, ValueError):
        return False


def load_json(path: Path) -> Any:
    """The content. Raises `FileNotFoundError`, `NotValid` or `CannotRead`."""
    return parse_json(read_bytes(path))


def read_json(path: Path) -> Any:
    """The content, or None where there is no such file, or no valid JSON. Raises `CannotRead`."""
    try:
        return load_json(path)
    except (FileNotFoundError, NotValid):
        return None


def read_json_object(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file, empty where there is no such file or something else in it. Raises `CannotRead`."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def append_json(path: Path, value: dict[str, Any]) -> None:
    """Appends one line. A line that a kill cut short is ended first, so that it damages only itself."""
    line = _json_text(value, indent=None, allow_nan=False)
    with _open_to_append(path) as file:
        size = file.seek(0, os.SEEK_END)
        if size > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())


def _open_to_append(path: Path) -> BinaryIO:
    handle = os.open(path, _OPEN_FLAGS | os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(handle, "ab+")
    except BaseException:
        os.close(handle)
        raise


def last_json_lines(path: Path, most: int = 1 << 16) -> Iterator[dict[str, Any]]:
    """The complete lines within the last `most` bytes, newest first, each parsed when it is asked for: a quick look at
    a long file. Raises `CannotRead`."""
    data = b""
    with contextlib.suppress(FileNotFoundError, NotValid), open_regular(path) as file, _read_errors(path):
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        data = file.read(most)
    for line in reversed(data.splitlines()):
        with contextlib.suppress(NotValid):
            value = parse_json(line)
            if isinstance(value, dict):
                yield value


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete line; lines cut short by a kill, and what is not a file of lines, are ignored. Raises
    `CannotRead`."""
    lines = []
    with contextlib.suppress(FileNotFoundError, NotValid), open_regular(path) as file, _read_errors(path):
        rest = _MOST_LINES_BYTES
        while rest > 0 and (line := file.readline(_MOST_LINE_BYTES)):
            rest -= len(line)
            with contextlib.suppress(NotValid):
                value = parse_json(line)
                if isinstance(value, dict):
                    lines.append(value)
    return lines
