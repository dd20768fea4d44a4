"""Reading files: absent, not valid, or the machine failed; nothing hangs, nothing outside is read."""

from __future__ import annotations

import json
import os
import resource
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest

from sojourn.run.folder import RunFolder
from sojourn.storage import disk
from sojourn.storage.files import (
    CannotRead,
    NotValid,
    append_json,
    is_plain_name,
    load_json,
    open_regular,
    read_json,
    read_json_lines,
    read_json_object,
    read_text,
    sha256,
    write_json,
)

posix = pytest.mark.skipif(os.name != "posix", reason="fifos and devices are POSIX")


def _folder(path: Path) -> None:
    path.mkdir()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        before = Path.cwd()
        os.chdir(path.parent)  # the name of a socket must be short
        try:
            made.bind(path.name)
        finally:
            os.chdir(before)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _nested(path: Path) -> None:
    path.write_text("[" * 200_000)


def _not_text(path: Path) -> None:
    path.write_bytes(b'{"a": "\xff\xfe"}')


ODD = {
    "a folder": _folder, "a fifo": _fifo, "a socket": _socket, "a device": _device, "a loop of links": _loop,
    "a huge sparse file": _huge, "deeply nested": _nested, "not UTF-8": _not_text,
}  # fmt: skip


@posix
@pytest.mark.parametrize("make", ODD.values(), ids=list(ODD))
def test_an_odd_file_is_not_valid_and_is_never_waited_for(tmp_path, make, monkeypatch):
    monkeypatch.setattr("sojourn.storage.files._MOST_LINES_BYTES", 1 << 26)
    path = tmp_path / "ledger.json"
    make(path)
    with pytest.raises(NotValid) as refused:
        load_json(path)
    assert "\n" not in str(refused.value)
    assert read_json(path) is None and read_json_object(path) == {} and read_json_lines(path) == []


def test_an_absent_file_is_neither_wrong_nor_an_error(tmp_path):
    (tmp_path / "file").write_text("1")
    for path in (tmp_path / "none.json", tmp_path / "file" / "below.json"):
        assert read_json(path) is None and read_text(path) is None and read_json_lines(path) == []
        with pytest.raises(FileNotFoundError):
            load_json(path)


def test_another_json_type_is_no_mapping(tmp_path):
    for text in ("[1]", '"x"', "3", "null", "NaN"):
        (tmp_path / "a.json").write_text(text)
        assert read_json_object(tmp_path / "a.json") == {}


@contextmanager
def no_more_files():
    """As `ulimit -n`: not one more file can be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    handle = os.dup(0)
    os.close(handle)
    resource.setrlimit(resource.RLIMIT_NOFILE, (handle, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@posix
def test_too_many_open_files_is_said_and_is_no_damage(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    for read in (load_json, read_json, read_json_object, read_text, read_json_lines, sha256):
        with no_more_files(), pytest.raises(CannotRead, match="Too many open files; allow more open files: ulimit -n"):
            read(path)
    assert read_json(path) == {"a": 1}


@posix
def test_a_line_is_never_appended_to_a_fifo_or_a_device(tmp_path):
    for make in (_folder, _fifo, _device):
        path = tmp_path / make.__name__
        make(path)
        with pytest.raises(OSError):
            append_json(path, {"a": 1})


def test_lines_are_read_around_what_is_not_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = json.dumps({"step": 1}).encode()
    path.write_bytes(b"\n".join([good, b"[1]", b"\xff\xfe", b"[" * 200_000, b"\0" * 3_000_000, b'{"step":', good]))
    assert read_json_lines(path) == [{"step": 1}, {"step": 1}]
    append_json(path, {"step": 2})
    assert read_json_lines(path)[-1] == {"step": 2}


@posix
def test_a_write_waits_for_no_fifo_that_a_killed_process_of_the_same_pid_left(tmp_path):
    os.mkfifo(tmp_path / f".a.json.{os.getpid()}")
    os.mkfifo(tmp_path / "a.json")
    write_json(tmp_path / "a.json", {"a": 1})
    assert read_json(tmp_path / "a.json") == {"a": 1}


@posix
def test_a_file_is_not_changed_in_place_through_a_link(tmp_path):
    (tmp_path / "outside").write_text("1")
    (tmp_path / "link").symlink_to("outside")
    with pytest.raises(NotValid):
        open_regular(tmp_path / "link", write=True)


def test_names_that_lead_out_of_a_folder_are_no_plain_names():
    assert is_plain_name("model.safetensors")
    for name in ("", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "C:x", "a\0b", "a\nb"):
        assert not is_plain_name(name)


def test_what_need_not_be_durable_is_replaced_without_waiting_for_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(disk, "sync", synced.append)
    monkeypatch.setattr(disk, "sync_folder", synced.append)
    run = RunFolder(tmp_path)
    run.set_status("running", 1, 9, durable=False)
    assert run.status().step == 1 and not synced
    run.set_status("stopped", 2, 9)
    assert run.status().step == 2 and len(synced) == 2
