"""A file that is written past the page cache has the bytes of any other, wherever a call before it ended."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sojourn.export import direct_file
from sojourn.export.direct_file import DirectFile
from sojourn.storage import disk

BUFFER = 3 * 4096
SIZES = (1, 4095, 4096, 4097, BUFFER - 1, BUFFER, BUFFER + 1, 100_000)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "LEAST_BYTES", 0)
    monkeypatch.setattr(direct_file, "_BUFFER_BYTES", BUFFER)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the disk has no direct writes (overlayfs, tmpfs), plain ones stand for them: the buffer is the same."""
    path = tmp_path / "x"
    path.touch()
    if direct_file._open_direct(path) is None:
        monkeypatch.setattr(direct_file, "_open_direct", lambda path: io.FileIO(path, "r+"))
    return path


def write(path: Path, content: bytes, start: int, random: Random) -> None:
    with DirectFile(path, len(content), start) as file:
        at = start
        while at < len(content):
            end = at + random.choice((1, 100, 5_000, 4096, 50_000))
            file.write(memoryview(content)[at:end])
            at = min(end, len(content))
            assert path.read_bytes()[: file.written] == content[: file.written]
        file.finish()
        assert file.written == len(content)


@pytest.mark.parametrize("size", SIZES)
def test_the_file_has_what_was_written_from_any_byte_on(size: int, path: Path) -> None:
    random, content = Random(size), os.urandom(size)
    for start in (0, 0, *(random.randrange(size) for _ in range(8))):
        if start:
            path.write_bytes(content[:start] + bytes(size - start))
        write(path, content, start, random)
        assert path.read_bytes() == content


@pytest.mark.parametrize("refused", [1, 3])
def test_a_disk_that_refuses_a_direct_write_gets_a_plain_one(
    refused: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = disk.write, 0

    def refuse(file: Any, data: Any) -> None:
        nonlocal count
        count += 1
        if count == refused:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(file, data)

    monkeypatch.setattr(disk, "write", refuse)
    content = os.urandom(100_000)
    write(path, content, 0, Random(0))
    assert path.read_bytes() == content and count > 3


def test_a_full_disk_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any, data: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write", full)
    with pytest.raises(OSError, match="No space left"), DirectFile(path, BUFFER, 0) as file:
        file.write(memoryview(bytes(BUFFER)))


def test_small_files_and_disks_without_direct_writes_are_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_file, "LEAST_BYTES", 1000)
    with DirectFile(tmp_path / "x", 999, 0) as file:
        file.write(memoryview(bytes(10)))
        assert file.written == 10
