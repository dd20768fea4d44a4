"""Mirrors: a second place that never shows half a copy, and gives back only what was put there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import ordinary_user
from hub_server import Hub, only_hub
from mounts import mounted_tmpfs
from small_python import run_in_small_python
from sojourn.errors import UserError
from sojourn.machine.process import current_process
from sojourn.storage import disk
from sojourn.storage.mirror import SEAL, MirrorFailed
from sojourn.storage.open_mirror import open_mirror
from sojourn.storage.path_mirror import PathMirror

CALLS = ("write", "sync", "rename", "unlink", "make_folder", "remove_folder")
FIRST, SECOND = "checkpoints/step-00000040", "checkpoints/step-00000080"


def checkpoint(folder: Path, salt: str = "a", size: int = 300_000) -> Path:
    """A folder as a run leaves it: large files, small ones, one below, one empty, and a manifest of them."""
    (folder / "tokenizer").mkdir(parents=True)
    files = {
        "model.safetensors": salt.encode() * size,
        "state.json": json.dumps({"step": 40, "salt": salt}).encode(),
        "tokenizer/words.txt": f"one two {salt}".encode(),
        "empty": b"",
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    facts = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    (folder / "manifest.json").write_text(json.dumps(facts))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def left_behind(root: Path) -> list[str]:
    return [path.name for path in root.rglob(".*") if path.name.startswith((".stage", ".old"))]


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, end: Callable[[str], None]) -> list[str]:
    """Makes the disk call of that number (from 1) the last one that is tried; returns the calls so far."""
    calls: list[str] = []

    def wrapped(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def one(*words: Any) -> None:
            calls.append(name)
            if len(calls) == number:
                end(name)
            call(*words)

        return one

    for name in CALLS:
        monkeypatch.setattr(disk, name, wrapped(name, getattr(disk, name)))
    return calls


def no_space(_: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def hasty_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """For many rounds of what no power cut is part of."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def mirror(tmp_path: Path) -> PathMirror:
    found = open_mirror(str(tmp_path / "drive"), "run")
    assert isinstance(found, PathMirror)
    return found


def test_a_checkpoint_comes_back_as_it_went(mirror, tmp_path):
    source = checkpoint(tmp_path / "source")
    assert mirror.names("checkpoints") == []
    mirror.put(source, SECOND)
    mirror.put(source, FIRST)
    assert mirror.names("checkpoints") == ["step-00000040", "step-00000080"] and mirror.names("") == []
    assert mirror.location == str(tmp_path / "drive" / "run")
    mirror.fetch(FIRST, tmp_path / "new machine" / "checkpoints" / "step-00000040")
    assert content(tmp_path / "new machine" / "checkpoints" / "step-00000040") == content(source)
    mirror.remove(FIRST)
    mirror.remove(FIRST)
    assert mirror.names("checkpoints") == ["step-00000080"] and not left_behind(tmp_path)


def test_final_and_best_are_replaced(mirror, tmp_path):
    old, new = checkpoint(tmp_path / "old"), checkpoint(tmp_path / "new", "b")
    (new / "tokenizer" / "words.txt").rename(new / "tokenizer" / "more.txt")
    (new / "manifest.json").unlink()
    mirror.put(old, "best")
    mirror.put(new, "best")
    mirror.put(new, "final")
    assert mirror.names("") == ["best", "final"] and not left_behind(tmp_path)
    mirror.fetch("best", tmp_path / "best")
    assert content(tmp_path / "best") == content(new)


def test_what_is_already_there_is_not_written_again(mirror, tmp_path, monkeypatch):
    source = checkpoint(tmp_path / "source")
    mirror.put(source, FIRST)
    mirror.put_file(source / "state.json", "ledger.json")
    calls = fail_at(monkeypatch, 0, no_space)
    mirror.put(source, FIRST)
    mirror.put_file(source / "state.json", "ledger.json")
    assert not {"write", "rename", "make_folder"} & set(calls)


def test_small_files_are_replaced_and_come_back(mirror, tmp_path):
    for text in ("name: run\n", "name: run\nseed: 2\n", "名字: 跑\n"):
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        mirror.put_file(tmp_path / "run.yaml", "run.yaml")
        mirror.fetch("run.yaml", tmp_path / "here" / "run.yaml")
        assert (tmp_path / "here" / "run.yaml").read_text(encoding="utf-8") == text
    assert not left_behind(tmp_path) and mirror.names("") == []
    mirror.remove("run.yaml")
    with pytest.raises(MirrorFailed, match=r"no complete run\.yaml; complete entries under it: none"):
        mirror.fetch("run.yaml", tmp_path / "again")


@pytest.mark.usefixtures("hasty_disk")
@pytest.mark.parametrize("over", [False, True], ids=["new", "over-an-older-one"])
def test_a_disk_call_that_fails_leaves_only_whole_entries(tmp_path, monkeypatch, over):
    other, old, new = (checkpoint(tmp_path / salt, salt, 5_000) for salt in "cab")
    number = 0
    while True:
        number += 1
        mirror = PathMirror(tmp_path / f"drive-{number}")
        mirror.put(other, FIRST)
        if over:
            mirror.put(old, SECOND)
        with monkeypatch.context() as patch:
            calls = fail_at(patch, number, no_space)
            failed = False
            try:
                mirror.put(new, SECOND)
            except MirrorFailed as error:
                failed = True
                assert "No space left on device; free some space, or set save.mirror" in str(error)
            reached = len(calls) >= number
        check_whole(mirror, tmp_path / f"back-{number}", other, [old] if failed and over else [new], must=not failed)
        mirror.put(new, SECOND)
        check_whole(mirror, tmp_path / f"again-{number}", other, [new])
        assert not left_behind(mirror.root)
        if not reached:
            assert not failed and number > 20
            break


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("over", "renames"),
    [
        pytest.param(True, True, id="renames-over-an-older-one"),
        pytest.param(True, False, id="cannot-rename-over-an-older-one"),
        pytest.param(False, True, id="renames-new", marks=pytest.mark.slow),
        pytest.param(False, False, id="cannot-rename-new", marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_disk_call_leaves_only_whole_entries(tmp_path, over, renames):
    run_in_small_python("test_mirror", "kill_at_every_call", tmp_path, over, renames)


def kill_at_every_call(home: str, over: bool, renames: bool) -> None:
    folder = Path(home)
    other, old, new = (checkpoint(folder / salt, salt, 5_000) for salt in "cab")
    patch, number, code = pytest.MonkeyPatch(), 0, 9
    patch.setattr(os, "fsync", lambda _: None)
    while code:
        number += 1
        mirror = PathMirror(folder / f"drive-{number}")
        mirror.put(other, FIRST)
        if over:
            mirror.put(old, SECOND)
        child = os.fork()
        if not child:
            try:
                if not renames:
                    patch.setattr(disk, "rename", cannot_rename)
                fail_at(patch, number, lambda _: os._exit(9))
                mirror.put(new, SECOND)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9), code
        check_whole(mirror, folder / f"back-{number}", other, [old, new], must=over or not code)
        mirror.put(new, SECOND)
        check_whole(mirror, folder / f"again-{number}", other, [new])
        assert not left_behind(mirror.root), left_behind(mirror.root)
    assert number > 20, number


def check_whole(mirror: PathMirror, back: Path, other: Path, either: list[Path], must: bool = True) -> None:
    """The untouched entry is there; the other one is one of `either`, or not there at all."""
    names = mirror.names("checkpoints")
    assert names == ["step-00000040", "step-00000080"] or (names == ["step-00000040"] and not must)
    mirror.fetch(FIRST, back / "first")
    assert content(back / "first") == content(other)
    if len(names) == 2:
        mirror.fetch(SECOND, back / "second")
        assert content(back / "second") in [content(folder) for folder in either]


def cannot_rename(old: Path, new: Path) -> None:
    if old.is_dir():
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    old.replace(new)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.ENOTSUP])
def test_a_drive_that_cannot_rename_is_filled_file_by_file(mirror, tmp_path, monkeypatch, code):
    def refuse(*_: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk, "rename", refuse)
    old, new = checkpoint(tmp_path / "old"), checkpoint(tmp_path / "new", "b")
    for source in (old, new):
        mirror.put(source, "final")
        mirror.put_file(source / "state.json", "ledger.json")
        assert mirror.names("") == ["final"] and not left_behind(tmp_path)
    monkeypatch.undo()
    mirror.fetch("final", tmp_path / "final")
    mirror.fetch("ledger.json", tmp_path / "ledger.json")
    assert content(tmp_path / "final") == content(new)
    assert (tmp_path / "ledger.json").read_bytes() == (new / "state.json").read_bytes()


def test_a_drive_that_knows_no_fsync_is_read_back_instead(mirror, tmp_path, monkeypatch):
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(disk, "sync", refuse)
    mirror.put(checkpoint(tmp_path / "source"), FIRST)
    assert mirror.names("checkpoints") == ["step-00000040"]


def test_what_was_cut_short_or_lost_is_not_listed(mirror, tmp_path):
    source = checkpoint(tmp_path / "source")
    for number, name in enumerate((*content(source), SEAL)):
        for harm in (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-2])):
            if name == "empty" and harm is not Path.unlink:
                continue
            mirror.put(source, FIRST)
            harm(mirror.root / FIRST / name)
            assert mirror.names("checkpoints") == [], name
            with pytest.raises(MirrorFailed, match=r"no complete checkpoints/step-00000040; .*: none"):
                mirror.fetch(FIRST, tmp_path / f"back-{number}")
            assert not (tmp_path / f"back-{number}").exists()
    mirror.put(source, FIRST)
    assert mirror.names("checkpoints") == ["step-00000040"]


def test_a_flipped_bit_is_refused_and_what_is_here_stays(mirror, tmp_path):
    source, here = checkpoint(tmp_path / "source"), tmp_path / "here"
    for name in (name for name, data in content(source).items() if data):
        mirror.put(source, FIRST)
        file = mirror.root / FIRST / name
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        here.mkdir(exist_ok=True)
        (here / "mine").write_text("stays")
        with pytest.raises(MirrorFailed, match=f"{name} has changed since it was mirrored"):
            mirror.fetch(FIRST, here)
        assert content(here) == {"mine": b"stays"} and not left_behind(tmp_path)
    mirror.put(source, FIRST)
    mirror.fetch(FIRST, here)
    assert content(here) == content(source)


def test_a_small_file_that_changed_is_refused(mirror, tmp_path):
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    mirror.put_file(tmp_path / "run.yaml", "run.yaml")
    (mirror.root / "run.yaml").write_text("seed: 3\n")
    with pytest.raises(MirrorFailed, match=r"run\.yaml: has changed since it was mirrored"):
        mirror.fetch("run.yaml", tmp_path / "back")
    mirror.put_file(tmp_path / "run.yaml", "run.yaml")
    mirror.fetch("run.yaml", tmp_path / "back")


@pytest.mark.parametrize("path", ["../../outside", "/etc/passwd", "a/../../b"])
def test_a_seal_that_points_elsewhere_is_not_believed(mirror, tmp_path, path):
    mirror.put(checkpoint(tmp_path / "source"), FIRST)
    (mirror.root / FIRST / SEAL).write_text(json.dumps({path: {"size": 0, "sha256": "0"}}))
    assert mirror.names("checkpoints") == []


@pytest.mark.parametrize("number", range(1, 5))
def test_a_copy_that_comes_back_different_is_refused_and_removed(mirror, tmp_path, monkeypatch, number):
    source = checkpoint(tmp_path / "source")
    write, count = disk.write, 0

    def lying(file: Any, data: Any) -> None:
        nonlocal count
        count += 1
        write(file, bytes(len(data)) if count == number else data)

    monkeypatch.setattr(disk, "write", lying)
    with pytest.raises(MirrorFailed, match="came back different from what was written; use another disk"):
        mirror.put(source, FIRST)
    assert mirror.names("checkpoints") == [] and not left_behind(tmp_path)


def test_a_checkpoint_damaged_where_it_comes_from_is_not_mirrored(mirror, tmp_path):
    source = checkpoint(tmp_path / "source")
    (source / "state.json").write_text("{}")
    with pytest.raises(MirrorFailed, match=r"state\.json does not match manifest\.json; nothing was mirrored"):
        mirror.put(source, FIRST)
    (source / "manifest.json").write_text("{")
    with pytest.raises(MirrorFailed, match=r"manifest\.json cannot be read"):
        mirror.put(source, FIRST)
    assert mirror.names("checkpoints") == [] and not left_behind(tmp_path)


def test_stages_of_the_dead_go_and_of_the_living_stay(mirror, tmp_path):
    source = checkpoint(tmp_path / "source")
    mirror.put(source, FIRST)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    pid, started = current_process()
    host = os.uname().nodename.replace("-", "_")
    parent = mirror.root / "checkpoints"
    dead = parent / f".stage-mirror-{int(gone.stdout)}-{started:.2f}-{host}-step-00000010"
    again = parent / f".stage-mirror-{pid}-{started / 2:.2f}-{host}-step-00000020"  # the number has come again
    living = parent / f".stage-mirror-{pid}-{started:.2f}-{host}-step-00000030"
    afar, forgotten = (parent / f".stage-mirror-1-1.00-another_{n}-step-00000040" for n in "12")
    foreign = parent / ".stage-1234-step-00000040"
    for folder in (dead, again, living, afar, forgotten, foreign):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    os.utime(forgotten, (1, 1))
    mirror.put(source, SECOND)
    assert {path for path in parent.iterdir() if path.name.startswith(".")} == {living, afar, foreign}


def test_a_place_without_room_is_refused_before_anything_is_written(mirror, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30, 2**17))
    with pytest.raises(
        MirrorFailed, match=r"0\.1 MiB free, but checkpoints/step-00000040 takes 0\.3 MiB; free some space"
    ):
        mirror.put(checkpoint(tmp_path / "source"), FIRST)
    assert not mirror.root.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_tmpfs(tmp_path / "disk", "size=1m") as folder:
        yield folder


def test_a_disk_that_fills_up_keeps_what_was_whole(small_disk, tmp_path, monkeypatch):
    from sojourn.storage import path_mirror as module

    mirror = PathMirror(small_disk / "run")
    source = checkpoint(tmp_path / "source")
    mirror.put(source, FIRST)
    mirror.put(source, SECOND)
    monkeypatch.setattr(module, "check_free_space", lambda *_: None)  # another process may take the room meanwhile
    for name in (SECOND.replace("8", "9"), FIRST):
        with pytest.raises(MirrorFailed, match="No space left on device; free some space"):
            mirror.put(checkpoint(tmp_path / name, "b" * 2), name)
        assert mirror.names("checkpoints") == ["step-00000040", "step-00000080"] and not left_behind(small_disk)
    mirror.fetch(FIRST, tmp_path / "back")
    assert content(tmp_path / "back") == content(source)


def test_a_folder_that_cannot_be_written_is_reported():
    with ordinary_user() as folder:
        source = checkpoint(folder / "source")
        (folder / "drive").mkdir()
        (folder / "drive").chmod(0o500)
        mirror = PathMirror(folder / "drive" / "run")
        for put in (lambda: mirror.put(source, FIRST), lambda: mirror.put_file(source / "state.json", "ledger.json")):
            with pytest.raises(
                MirrorFailed, match="could not be copied there: Permission denied; make it writable"
            ) as e:
                put()
            assert "\n" not in str(e.value) and e.value.code == 1
        assert mirror.names("checkpoints") == []


def test_a_mirror_that_can_only_be_read_still_gives_all_back():
    with ordinary_user() as folder:
        source, mirror = checkpoint(folder / "source"), PathMirror(folder / "drive")
        mirror.put(source, FIRST)
        (mirror.root / FIRST).rename(mirror.root / "checkpoints" / ".old-step-00000040")  # as a kill leaves it
        (mirror.root / "checkpoints").chmod(0o500)
        assert mirror.names("checkpoints") == ["step-00000040"]
        mirror.fetch(FIRST, folder / "back")
        assert content(folder / "back") == content(source)
        with pytest.raises(MirrorFailed, match="could not be removed"):
            mirror.remove(FIRST)
        (mirror.root / "checkpoints").chmod(0o700)


@pytest.mark.parametrize("when", ["before", "in the midst"])
def test_a_drive_that_has_gone_is_not_made_anew_as_a_folder(tmp_path, monkeypatch, when):
    source, drive = checkpoint(tmp_path / "source"), tmp_path / "drive"
    mirror = PathMirror(drive / "run")
    mirror.put(source, FIRST)
    if when == "before":
        drive.rename(tmp_path / "away")
    else:
        real = disk.make_folder

        def unmounted(path):
            real(path)
            drive.rename(tmp_path / "away")

        monkeypatch.setattr(disk, "make_folder", unmounted)
    with pytest.raises(MirrorFailed, match="check that the disk is mounted"):
        mirror.put(source, "checkpoints/step-00000080")
    with pytest.raises(MirrorFailed, match="check that the disk is mounted"):
        mirror.put_file(source / "manifest.json", "file.json")
    assert not drive.exists()


def test_a_run_cannot_be_its_own_mirror(tmp_path):
    source = checkpoint(tmp_path / "runs" / "x" / "final")
    with pytest.raises(MirrorFailed, match=r"cannot be its own mirror; set save\.mirror"):
        open_mirror(str(tmp_path / "runs"), "x").put(source, "final")
    assert (source / "manifest.json").is_file()


def test_the_written_place_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_mirror("~/drive", "run").location == str(tmp_path / "drive" / "run")
    assert open_mirror("hub:me/x", "run").location == "the hub repository me/x"
    for text in ("hub:", "hub:me", "hub:me/", "hub:me/x/y", "hub:me/名", "hub:https://huggingface.co/me/x"):
        with pytest.raises(UserError, match=r"not a repository's name; write save\.mirror=hub:USER/REPOSITORY"):
            open_mirror(text, "run")
    with pytest.raises(UserError, match=r"save\.mirror: empty"):
        open_mirror(" ", "run")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub of our own, and a library that knows no other."""
    with only_hub(tmp_path, monkeypatch) as found:
        yield found


def test_on_the_hub_a_checkpoint_comes_back_as_it_went(hub, tmp_path):
    source, mirror = checkpoint(tmp_path / "source"), open_mirror("hub:me/x", "run")
    assert mirror.names("checkpoints") == []
    mirror.put(source, SECOND)
    mirror.put(source, FIRST)
    mirror.put(source, "final")
    repository = hub.repositories["me/x"]
    assert repository.private and len(repository.commits) == 4, "one commit for each entry"
    assert "run/checkpoints/step-00000040/tokenizer/words.txt" in repository.files
    mirror.put(source, FIRST)
    assert len(repository.commits) == 4, "what is there already is not sent again"
    fresh = open_mirror("hub:me/x", "run")
    assert fresh.names("checkpoints") == ["step-00000040", "step-00000080"] and fresh.names("") == ["final"]
    fresh.fetch(FIRST, tmp_path / "new machine" / "step-00000040")
    assert content(tmp_path / "new machine" / "step-00000040") == content(source)
    fresh.remove(FIRST)
    fresh.remove(FIRST)
    assert fresh.names("checkpoints") == ["step-00000080"] and not left_behind(tmp_path)
    assert open_mirror("hub:me/x", "another").names("checkpoints") == []


def test_on_the_hub_final_is_replaced_in_one_commit(hub, tmp_path):
    old, new, mirror = checkpoint(tmp_path / "old"), checkpoint(tmp_path / "new", "b"), open_mirror("hub:me/x", "run")
    (new / "empty").unlink()
    (new / "manifest.json").unlink()
    mirror.put(old, "final")
    mirror.put(new, "final")
    repository = hub.repositories["me/x"]
    assert len(repository.commits) == 3
    assert sorted(repository.files) == sorted(f"run/final/{name}" for name in (*content(new), SEAL))
    mirror.fetch("final", tmp_path / "final")
    assert content(tmp_path / "final") == content(new)


def test_on_the_hub_small_files_are_replaced_and_come_back(hub, tmp_path):
    mirror = open_mirror("hub:me/x", "run")
    for text in ("seed: 1\n", "seed: 2\n", "seed: 2\n"):
        (tmp_path / "run.yaml").write_text(text)
        mirror.put_file(tmp_path / "run.yaml", "run.yaml")
        mirror.fetch("run.yaml", tmp_path / "here" / "run.yaml")
        assert (tmp_path / "here" / "run.yaml").read_text() == text
    assert len(hub.repositories["me/x"].commits) == 3 and not left_behind(tmp_path)
    mirror.remove("run.yaml")
    with pytest.raises(MirrorFailed, match=r"the hub repository me/x: no complete run\.yaml"):
        mirror.fetch("run.yaml", tmp_path / "again")


@pytest.mark.parametrize("file", ["model.safetensors", SEAL, pytest.param("state.json", marks=pytest.mark.slow)])
def test_a_hub_that_stores_something_else_is_noticed_at_once(hub, tmp_path, file):
    source, mirror = checkpoint(tmp_path / "source"), open_mirror("hub:me/x", "run")
    mirror.put(source, FIRST)
    hub.spoil = f"step-00000080/{file}"
    with pytest.raises(MirrorFailed, match=f"{file} is different after the upload; try again"):
        mirror.put(source, SECOND)
    assert mirror.names("checkpoints") == ["step-00000040"]
    hub.spoil = ""
    mirror.put(source, SECOND)
    assert mirror.names("checkpoints") == ["step-00000040", "step-00000080"]


@pytest.mark.parametrize("file", ["state.json", pytest.param("model.safetensors", marks=pytest.mark.slow)])
def test_a_hub_that_gives_back_something_else_is_refused(hub, tmp_path, file):
    source, mirror = checkpoint(tmp_path / "source"), open_mirror("hub:me/x", "run")
    mirror.put(source, FIRST)
    mirror.put_file(source / "state.json", "state.json")
    hub.rot = file
    with pytest.raises(MirrorFailed, match=f"{file} has changed since it was mirrored"):
        mirror.fetch(FIRST, tmp_path / "back")
    if file == "state.json":
        with pytest.raises(MirrorFailed, match=r"state\.json is different after the download"):
            mirror.fetch("state.json", tmp_path / "back")
    assert not (tmp_path / "back").exists() and not left_behind(tmp_path)


def test_on_the_hub_a_lost_file_makes_an_entry_unlisted(hub, tmp_path):
    mirror = open_mirror("hub:me/x", "run")
    mirror.put(checkpoint(tmp_path / "source"), FIRST)
    del hub.repositories["me/x"].files[f"run/{FIRST}/state.json"]
    assert mirror.names("checkpoints") == []
    with pytest.raises(MirrorFailed):
        mirror.fetch(FIRST, tmp_path / "back")
    assert not (tmp_path / "back").exists() and not left_behind(tmp_path)


_VERBS = ("create", "facts", "preupload", "batch", "tree", "paths_info")


@pytest.mark.parametrize(
    "verb", ["commit", "resolve", *(pytest.param(verb, marks=pytest.mark.slow) for verb in _VERBS)]
)
def test_a_hub_in_trouble_is_one_line_and_leaves_no_half_entry(hub, tmp_path, verb):
    source, mirror = checkpoint(tmp_path / "source"), open_mirror("hub:me/x", "run")
    mirror.put(source, FIRST)
    hub.fail = {verb: 418}
    fresh = open_mirror("hub:me/x", "run")
    failures = []
    new = checkpoint(tmp_path / "new", "b")
    for call in (
        lambda: fresh.put(new, SECOND),
        lambda: fresh.fetch(FIRST, tmp_path / "back"),
        lambda: fresh.names("checkpoints"),
    ):
        try:
            call()
        except MirrorFailed as error:
            failures.append(str(error))
    assert failures and all("\n" not in text and text.startswith("hub:me/x: ") for text in failures)
    assert any("the hub answers HTTP 418" in text for text in failures), failures
    hub.fail = {}
    assert mirror.names("checkpoints")[0] == "step-00000040" and not left_behind(tmp_path)
    assert verb not in ("create", "preupload", "batch", "commit", "tree") or len(mirror.names("checkpoints")) == 1
    fresh.put(new, SECOND)
    assert mirror.names("checkpoints") == ["step-00000040", "step-00000080"]


def test_without_leave_one_line_says_how_to_get_it(hub, tmp_path, monkeypatch):
    source, mirror = checkpoint(tmp_path / "source"), open_mirror("hub:me/x", "run")
    with pytest.raises(
        MirrorFailed, match=r"hub:you/x: not allowed to write \(You don't have the rights.*hf auth login"
    ):
        open_mirror("hub:you/x", "run").put(source, FIRST)
    with pytest.raises(
        MirrorFailed, match="hub:you/x: no such repository, or it is private to somebody else; check the name"
    ):
        open_mirror("hub:you/x", "run").fetch(FIRST, tmp_path / "back")
    for token in ("", "hf_wrongwrongwrong"):
        monkeypatch.setenv("HF_TOKEN", token)
        for call, doing in (
            (lambda: mirror.put(source, FIRST), "write"),
            (lambda: mirror.names("checkpoints"), "read"),
        ):
            with pytest.raises(MirrorFailed) as failed:
                call()
            assert f"hub:me/x: not allowed to {doing}" in str(failed.value)
            assert str(failed.value).endswith("run: hf auth login (or set HF_TOKEN)")
            assert "hf_wrong" not in str(failed.value) and "\n" not in str(failed.value)


def test_without_a_way_to_the_hub_one_line_names_the_ways_out(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    source, mirror = checkpoint(tmp_path / "source"), open_mirror("hub:me/x", "run")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    calls = (
        lambda: mirror.put(source, FIRST),
        lambda: mirror.names(""),
        lambda: mirror.fetch(FIRST, tmp_path / "back"),
    )
    for call in calls:
        with pytest.raises(MirrorFailed, match=r"hub:me/x: cannot be reached \(ConnectError\); check the network"):
            call()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for call in calls:
        with pytest.raises(
            MirrorFailed, match="cannot be reached while HF_HUB_OFFLINE is set; run: unset HF_HUB_OFFLINE"
        ):
            call()
