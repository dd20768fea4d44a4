"""Finds the files that a source names, in the same order everywhere, and reads their bytes decompressed."""

from __future__ import annotations

import gzip
import unicodedata
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from sojourn.config.messages import printable
from sojourn.errors import UserError
from sojourn.expand_user import expand_user

_TEXT = (".txt", ".md")
_JSON = (".json", ".jsonl", ".ndjson")
_TABLE = (".csv", ".tsv")
_COMPRESSED = (".gz", ".zst")
_TYPES = (*_TEXT, *_JSON, *_TABLE, ".parquet")
_OFFICE = (".doc", ".docx", ".odt", ".rtf", ".pdf", ".epub", ".html", ".xls", ".xlsx", ".ods", ".numbers", ".pages")
KNOWN = f"{', '.join(_TYPES)} (all but .parquet also compressed: {', '.join(_COMPRESSED)})"
_GLOB_CHARACTERS = "*?["


class Suffix(NamedTuple):
    """File type and compression ("" for none) by a file's name."""

    inner: str
    compression: str


_LARGE = 1 << 30
_ENCODING_SAMPLE = 1000  # bytes: enough to see whether it is Chinese
_MOST_RATIO = 1000
BOMB = "unpacks to more than a thousand times its size; is this a file of texts? Unpack it first if it is"


def suffix_of(path: Path) -> Suffix | None:
    """None for a file type that cannot be read."""
    name = path.name.lower()
    compression = next((end for end in _COMPRESSED if name.endswith(end)), "")
    inner = Path(name.removesuffix(compression)).suffix
    return Suffix(inner, compression) if inner in _TYPES and not (compression and inner == ".parquet") else None


def is_compressed(file: Path) -> bool:
    suffix = suffix_of(file)
    return suffix is not None and (bool(suffix.compression) or suffix.inner == ".parquet")


def user_path(text: str, key: str) -> Path:
    """What the user wrote as a path, which may not exist."""
    try:
        path = expand_user(text)
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{key}: {printable(text)}: cannot be read: {_reason(error)}") from None
    return path


def find_files(path: str) -> list[Path]:
    """The files that a source names: one file, all files below a folder, or those that match a glob."""
    try:
        root = expand_user(path)
        if root.is_file():
            return [_check_type(root)]
        if root.is_dir():
            matches = set(_expand(root, ("**",)))
        elif any(sign in path for sign in _GLOB_CHARACTERS):
            matches = set(_expand(Path(root.anchor), root.relative_to(root.anchor).parts))
        else:
            is_special = root.exists() or root.is_symlink()
            raise UserError(
                f"data.sources: {path}: a broken link or not an ordinary file; name a file, a folder or a glob"
                if is_special
                else f"data.sources: {path}: no such file or folder; check the spelling, or name a folder or a glob"
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"data.sources: {path}: cannot be read: {_reason(error)}") from None
    files = sorted((file for file in matches if suffix_of(file)), key=_order)
    if not files:
        raise UserError(f"data.sources: {path}: no file that can be read; supported: {KNOWN}")
    return files


def _check_type(file: Path) -> Path:
    if suffix_of(file):
        return file
    ending = file.suffix.lower()
    advice = "; save it as text or CSV" if ending in _OFFICE else ""
    kind = f"{ending} files" if ending else "files without an extension"
    raise UserError(f"data.sources: {file}: {kind} cannot be read{advice}; supported: {KNOWN}")


def _order(file: Path) -> tuple[str, str]:
    """Normalized, since macOS may return decomposed names."""
    name = file.as_posix()
    return unicodedata.normalize("NFC", name), name


def _expand(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    """The files below `folder` that match the parts of a glob; pathlib's own glob differs between Python versions."""
    part, rest = parts[0], parts[1:]
    if part == "**":
        for below in _folders(folder, set()):
            yield from _expand(below, rest or ("*",))
        return
    if any(sign in part for sign in _GLOB_CHARACTERS):
        matching = [entry for entry in _visible(folder, part[0] == ".") if fnmatchcase(entry.name, part)]
    else:
        matching = [folder / part]
    for entry in matching:
        if rest:
            if entry.is_dir():
                yield from _expand(entry, rest)
        elif entry.is_file():
            yield entry


def _folders(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """`folder` and all folders below it, each once: links may form a cycle."""
    real = folder.resolve()
    if real in seen:
        return
    seen.add(real)
    yield folder
    for entry in _visible(folder):
        if entry.is_dir():
            yield from _folders(entry, seen)


def _visible(folder: Path, hidden: bool = False) -> list[Path]:
    return sorted((entry for entry in folder.iterdir() if hidden or entry.name[0] != "."), key=_order)


def read_bytes(path: Path, size: int, encoding: str = "utf-8") -> Iterator[bytes]:
    """A file's text in UTF-8, decompressed, in blocks of about `size`; converted from `encoding` if it is not UTF-8."""
    if not needs_conversion(path, encoding):
        return _blocks(path, size, utf16=False)
    return _converted(path, size, "gb18030" if encoding == "gbk" else encoding)  # of which GBK is a part


def needs_conversion(path: Path, encoding: str) -> bool:
    suffix = suffix_of(path)
    is_text = suffix is not None and suffix.inner != ".parquet"
    return is_text and encoding != "utf-8" and not _is_utf8(path, 1 << 20)


def _is_utf8(path: Path, size: int) -> bool:
    decoder = getincrementaldecoder("utf-8")()
    try:
        for block in _blocks(path, size, utf16=True):
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _converted(path: Path, size: int, encoding: str) -> Iterator[bytes]:
    decoder, line = getincrementaldecoder(encoding)(), 1
    try:
        for block in chain(_blocks(path, size, utf16=True), [b""]):
            text = decoder.decode(block, final=not block)
            line += text.count("\n")
            yield text.encode()
    except UnicodeDecodeError:
        raise UserError(f"{path}:{line}: after this line neither UTF-8 nor {encoding}; save it as UTF-8") from None


def not_utf8(error: UnicodeDecodeError, following: Iterable[bytes] = ()) -> str:
    """What is wrong with a text that is not UTF-8, and what to do. `following`: blocks after the one with the error."""
    sample = error.object[error.start :]
    with suppress(UserError):
        for block in following:
            sample += block
            if len(sample) >= _ENCODING_SAMPLE:
                break
    try:
        text = getincrementaldecoder("gb18030")().decode(sample[:_ENCODING_SAMPLE])
    except UnicodeDecodeError:
        text = ""
    chinese = sum("\u4e00" <= character <= "\u9fff" for character in text)
    advice = ", or, as it looks like GBK, convert it with data.encoding=gbk" if chinese > 1 else ""
    return f"not UTF-8 text ({error.reason}); save it as UTF-8{advice}"


def _blocks(path: Path, size: int, utf16: bool) -> Iterator[bytes]:
    """A file's bytes, decompressed, without a UTF-8 byte order mark; `utf16` allows text with the mark of UTF-16."""
    with _open(path) as stream:
        block = stream.read(max(size, 4))
        if block.startswith((b"\xff\xfe", b"\xfe\xff")) and not utf16:
            raise UserError(f"{path}:1: UTF-16 text; save it as UTF-8, or convert it with data.encoding=utf-16")
        block, most, total = block.removeprefix(b"\xef\xbb\xbf") or stream.read(size), most_unpacked(path), 0
        while block:
            total += len(block)
            if total > most:
                raise UserError(f"{path}: {BOMB}")
            yield block
            block = stream.read(size)


def most_unpacked(path: Path) -> int:
    """Bytes that a compressed file may unpack to: text shrinks to a hundredth, hardly ever to a thousandth."""
    return max(_LARGE, _MOST_RATIO * path.stat().st_size)


def _open(path: Path) -> BinaryIO:
    suffix = suffix_of(path)
    if suffix is None or not suffix.compression:
        return path.open("rb")
    if suffix.compression == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: reading .zst needs pyarrow: pip install 'sojourn[train]'") from None
    return cast(BinaryIO, pyarrow.input_stream(str(path), compression="zstd"))


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
