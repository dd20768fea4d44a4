"""Standard output and standard error that never raise, in any encoding.

The reader of a pipe goes away or stops reading, a terminal is closed or paused, the disk of a log file is full: what
cannot be printed is dropped and counted (`unwritten.py`).
"""

from __future__ import annotations

import codecs
import json
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from sojourn.run import unwritten

_PATIENCE = 10.0  # seconds for a reader that does not read, such as a paused terminal or `| less`
_CHUNK_BYTES = 512  # what a pipe or terminal that is ready takes without blocking


# What a terminal of another encoding gets instead; what is not here as \\u2014.
_PLAIN = {
    "×": "x", "→": "->", "…": "...", "“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "·": "-", "√": "sqrt ",
    "≤": "<=", "≥": ">=", "≈": "~", "█": "#", "▒": "-", "¥": "CNY ", "²": "^2", "¹": "(1)",
} | dict.fromkeys("▏▎▍▌▋▊▉", "|")  # fmt: skip


def _plain_text(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in text), error.end


codecs.register_error("sojourn", _plain_text)


def accept_any_encoding() -> None:
    """A character that the terminal's encoding (GBK, cp1252, cp437, ASCII) has not is replaced, never an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            with suppress(OSError, ValueError):  # it flushes what it has, perhaps into a closed pipe
                stream.reconfigure(errors="sojourn")


def print_json(value: Any, stream: Any = None, **options: Any) -> None:
    """Readable in UTF-8; in other encodings as ASCII, which is JSON too."""
    stream = stream or sys.stdout
    is_utf8 = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not is_utf8, **options), file=stream, flush=True)


def terminal_text(text: str) -> str:
    """Text of a model for standard output: a terminal must not obey control sequences in it."""
    if not sys.stdout.isatty():
        return text
    return "".join("\ufffd" if (c < " " and c not in "\n\t") or "\x7f" <= c < "\xa0" else c for c in text)


class LossyStream:
    """Wraps a text stream. Every line goes to its file at once, without a buffer in which it could get stuck."""

    def __init__(self, stream: Any, what: str) -> None:
        self._stream, self._what = stream, what
        self._raw = getattr(stream.buffer, "raw", stream.buffer)
        self._pending, self._torn, self._patience = "", False, _PATIENCE
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._lock:
            self._pending += text
            if "\n" in text:
                self.flush()
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._lock:
            text, self._pending = self._pending, ""
            if not text:
                return
            rest = self._encode("\n" + text if self._torn else text)
            try:
                while rest:
                    self._wait_for_reader()
                    written = self._raw.write(rest[:_CHUNK_BYTES])
                    if written is None:
                        raise BlockingIOError("its reader does not read")
                    self._torn, rest = True, rest[written:]
                self._torn = False
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                unwritten.count(self._what, error, max(1, text.count("\n")))

    def _wait_for_reader(self) -> None:
        """Once it has been waited for in vain, it is not waited for again until it reads."""
        if not hasattr(select, "poll") or not hasattr(self._raw, "fileno"):
            return
        poll = select.poll()
        poll.register(self._raw.fileno(), select.POLLOUT)
        if not poll.poll(1000 * self._patience):
            self._patience = 0.0
            raise BlockingIOError("its reader does not read")
        self._patience = _PATIENCE

    def _encode(self, text: str) -> bytes:
        text, encoding = text.replace("\n", os.linesep), self._stream.encoding or "utf-8"
        return text.encode(encoding, "sojourn")


@contextmanager
def lossy(name: Literal["stdout", "stderr"]) -> Iterator[None]:
    """In the block, what is printed to this stream is dropped where it cannot be written."""
    stream, what = getattr(sys, name), {"stdout": unwritten.STDOUT, "stderr": unwritten.STDERR}[name]
    if not hasattr(stream, "buffer"):  # in memory
        yield
        return
    try:
        stream.flush()
    except (OSError, ValueError) as error:
        unwritten.count(what, error)
    wrapped = LossyStream(stream, what)
    setattr(sys, name, wrapped)
    try:
        yield
    finally:
        wrapped.flush()
        setattr(sys, name, stream)


@contextmanager
def log_file(path: Path) -> Iterator[Any]:
    """A log file to print to; where it cannot be opened or written, lines are dropped."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        unwritten.count(str(path), error)
        file = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    with file:
        yield LossyStream(file, str(path))


def open_missing_streams() -> None:
    """`>&-` leaves a standard file closed. The next file opened would take its number, and get what C code prints."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)
            os.dup2(handle, number)  # which a child process inherits
            if handle != number:
                os.close(handle)
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
