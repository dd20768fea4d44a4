"""Names on the box for files that travel: decided by content, so that equal files have one name and others never clash.

A name keeps the extension, by which formats are recognised, and has safe characters only. The order of the files of a
folder or a glob is part of the artefact's hash, so their names begin with their number.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from sojourn.data.sources.files import suffix_of
from sojourn.storage.file_digests import FileDigests

_HASH_LETTERS = 16
_MOST_LETTERS = 40


def safe_stem(name: str, otherwise: str) -> str:
    """At most 40 of A–Z, a–z, 0–9, `.`, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:_MOST_LETTERS].strip("-._") or otherwise


def extension(file: Path) -> str:
    """`.jsonl.gz` of a data file, else the last suffix, in lower case."""
    suffix = suffix_of(file)
    return suffix.inner + suffix.compression if suffix else file.suffix.lower()


def data_file_name(file: Path, digests: FileDigests) -> str:
    ending = extension(file)
    stem = safe_stem(file.name[: len(file.name) - len(ending)], "data")
    return f"{stem}-{digests.of(file)[:_HASH_LETTERS]}{ending}"


def data_folder_names(name: str, files: Sequence[Path], digests: FileDigests) -> tuple[str, list[str]]:
    """The folder's name, and for each file one below it, in the same order."""
    width = max(4, len(str(len(files))))
    names = []
    for number, file in enumerate(files, 1):
        ending = extension(file)
        names.append(f"{number:0{width}}-{safe_stem(file.name[: len(file.name) - len(ending)], 'data')}{ending}")
    return f"{safe_stem(name, 'data')}-{_hash_of(names, files, digests)}", names


def folder_name(folder: Path, files: Sequence[Path], digests: FileDigests, stem: str = "") -> tuple[str, list[str]]:
    """Of a model, an adapter, a tokenizer: names below it stay as they are, since its files refer to each other."""
    names = [PurePosixPath(file.relative_to(folder)).as_posix() for file in files]
    return f"{safe_stem(stem or folder.resolve().name, 'folder')}-{_hash_of(names, files, digests)}", names


def _hash_of(names: Sequence[str], files: Sequence[Path], digests: FileDigests) -> str:
    whole = hashlib.sha256()
    for name, file in zip(names, files, strict=True):
        whole.update(f"{name}\0{digests.of(file)}\n".encode(errors="backslashreplace"))
    return whole.hexdigest()[:_HASH_LETTERS]
