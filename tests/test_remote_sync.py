"""Sync against a real sshd: what travels, what survives cuts, hostile names, races and full disks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from plain_sshd import PlainSshd, needs_sshd, plain_sshd
from slow_link import slow_link
from sojourn.errors import UserError
from sojourn.remote import sync
from sojourn.remote.agent_client import Agent
from sojourn.remote.box.hashes import UPLOAD, new_hash
from sojourn.remote.box.tree import Entry
from sojourn.remote.box_client import Box
from sojourn.remote.download import MissingOnBox
from sojourn.remote.ignore import Ignore
from sojourn.remote.manifest import Tree
from sojourn.remote.read_ahead import ReadAhead
from sojourn.remote.sync import SyncFailed

pytestmark = needs_sshd
MIB = 1 << 20


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainSshd]:
    with plain_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def box(sshd: PlainSshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Box]:
    monkeypatch.setenv("SOJOURN_CONFIG", str(sshd.config))
    with Box(replace(sshd.host, home=str(tmp_path / "home")), patience=20) as box:
        yield box


def tree_of(folder: Path) -> dict[str, bytes | str | None]:
    """Content of files, targets of links, None for folders."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = str(path.readlink()) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
    return found


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def temporary_files(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob(".sojourn-*")]


def test_a_tree_arrives_as_it_is_and_only_changes_travel(box: Box, tmp_path: Path) -> None:
    here, there, back = tmp_path / "here", tmp_path / "there", tmp_path / "back"
    write(here, {f"many/{n}": os.urandom(n) for n in range(50)} | {"large": os.urandom(3 * MIB + 7), "empty": b""})
    (here / "no files" / "inside").mkdir(parents=True)
    (here / "run.sh").write_bytes(b"#!/bin/sh\n")
    (here / "run.sh").chmod(0o755)
    first = box.push([(here, str(there))])
    assert tree_of(there) == tree_of(here)
    assert (first.files, first.unchanged) == (53, 0)
    assert (there / "run.sh").stat().st_mode & 0o777 == 0o755
    again = box.push([(here, str(there))])
    assert (again.files, again.bytes, again.unchanged) == (0, 0, 53)
    (here / "many/7").write_bytes(b"changed")
    (here / "large").write_bytes((here / "large").read_bytes()[:-1] + b"x")  # the same size
    assert box.push([(here, str(there))]).files == 2
    assert box.pull(str(there), back).files == 53
    assert tree_of(back) == tree_of(here)
    assert box.pull(str(there), back).files == 0
    assert not temporary_files(tmp_path)


def test_names_of_any_bytes(box: Box, tmp_path: Path) -> None:
    here = write(
        tmp_path / "here", {"a b/c  d": b"1", "new\nline": b"2", "模型/权重": b"3", "'\"$(x)`\\": b"4", "-rf": b"5"}
    )
    (Path(os.fsdecode(os.fsencode(here) + b"/caf\xe9"))).write_bytes(b"6")
    box.push([(here, str(tmp_path / "there 目录"))])
    box.pull(str(tmp_path / "there 目录"), tmp_path / "back")
    assert tree_of(tmp_path / "back") == tree_of(tmp_path / "there 目录") == tree_of(here)


def test_empty_folder_and_single_files(box: Box, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    (tmp_path / "one").write_bytes(b"1")
    box.push(
        [(tmp_path / "nothing", str(tmp_path / "there/nothing")), (tmp_path / "one", str(tmp_path / "there/x/uno"))]
    )
    assert tree_of(tmp_path / "there") == {"nothing": None, "x": None, "x/uno": b"1"}
    box.pull(str(tmp_path / "there/x/uno"), tmp_path / "back" / "eins")
    assert (tmp_path / "back" / "eins").read_bytes() == b"1"
    box.pull(str(tmp_path / "there/nothing"), tmp_path / "back" / "nothing")
    assert tree_of(tmp_path / "back" / "nothing") == {}
    with pytest.raises(UserError, match="no such file"):
        box.push([(tmp_path / "missing", str(tmp_path / "there"))])
    with pytest.raises(MissingOnBox):
        box.pull(str(tmp_path / "missing"), tmp_path / "back")
    assert not box.pull_file(str(tmp_path / "missing"), tmp_path / "back" / "m", missing_ok=True)


def test_links_inside_stay_links_and_others_do_not_lead_out(box: Box, tmp_path: Path) -> None:
    here, there = write(tmp_path / "here", {"blobs/abc": b"weights"}), tmp_path / "there"
    (tmp_path / "secret").write_bytes(b"outside")
    (tmp_path / "folder").mkdir()
    (here / "model").symlink_to("blobs/abc")
    (here / "absolute").symlink_to(here / "blobs" / "abc")
    (here / "outside").symlink_to(tmp_path / "secret")
    (here / "outside folder").symlink_to(tmp_path / "folder")
    (here / "broken").symlink_to("nowhere")
    result = box.push([(here, str(there))])
    assert tree_of(there) == {
        "absolute": "blobs/abc",
        "blobs": None,
        "blobs/abc": b"weights",
        "model": "blobs/abc",
        "outside": b"outside",
    }
    assert len(result.skipped) == 2


def test_nothing_is_written_through_a_link_that_leads_out(box: Box, tmp_path: Path) -> None:
    here, there, outside = write(tmp_path / "here", {"sub/file": b"1"}), tmp_path / "there", tmp_path / "outside"
    outside.mkdir()
    there.mkdir()
    (there / "sub").symlink_to(outside)
    with pytest.raises(SyncFailed, match="leads out"):
        box.push([(here, str(there))])
    back = tmp_path / "back"
    back.mkdir()
    (back / "sub").symlink_to(outside)
    with pytest.raises(SyncFailed, match="leads out"):
        box.pull(str(here), back)
    assert tree_of(outside) == {}


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//b", ".", ""])
def test_the_agent_refuses_paths_outside(box: Box, tmp_path: Path, name: str) -> None:
    (tmp_path / "root").mkdir()
    line = [name, 1, 0o644, 0, new_hash(UPLOAD, b"1").hexdigest()]
    with box.agent() as agent:
        answer, _ = agent.ask("put_many", b"1", root=str(tmp_path / "root"), cache="/nowhere", files=[line], sync=False)
    assert "is not a path inside" in answer["failed"][0][1]


def test_a_file_becomes_a_folder_and_back(box: Box, tmp_path: Path) -> None:
    here, there = write(tmp_path / "here", {"a": b"file", "b/inside": b"1"}), tmp_path / "there"
    box.push([(here, str(there))])
    (here / "a").unlink()
    write(here, {"a/inside": b"now a folder"})
    shutil.rmtree(here / "b")
    (here / "b").write_bytes(b"now a file")
    with pytest.raises(SyncFailed, match="b: "):  # a folder with something in it is not removed unless that is wished
        box.push([(here, str(there))])
    assert (there / "a/inside").read_bytes() == b"now a folder"
    assert (there / "b/inside").read_bytes() == b"1"
    box.push([(here, str(there))], delete=True)
    assert tree_of(there) == tree_of(here)


def test_nothing_is_deleted_unless_asked(box: Box, tmp_path: Path) -> None:
    here, there = write(tmp_path / "here", {"a": b"1"}), write(tmp_path / "there", {"old/file": b"2", "log": b"3"})
    box.push([(here, str(there))])
    assert (there / "old/file").exists()
    box.push([(here, str(there))], ignore=Ignore(["log"]), delete=True)
    assert tree_of(there) == {"a": b"1", "log": b"3"}


def test_ignored_files_stay_here(box: Box, tmp_path: Path) -> None:
    files = [".git/config", "run.py", "data/x.bin", "data/keep.bin", "deep/cache/y", "a.log", "important.log"]
    here = write(tmp_path / "here", dict.fromkeys(files, b"1"))
    (here / ".gitignore").write_text("*.log\n!important.log\n/data/*\n!/data/keep.bin\ncache/\n")
    box.push([(here, str(tmp_path / "there"))], ignore=Ignore(root=here))
    names = {str(path.relative_to(tmp_path / "there")) for path in (tmp_path / "there").rglob("*") if path.is_file()}
    assert names == {".gitignore", "run.py", "data/keep.bin", "important.log"}


def checkpoint(folder: Path, size: int = 3 * MIB) -> Path:
    write(folder, {"model.safetensors": os.urandom(size), "state.json": b"{}"})
    lines = {
        path.name: {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
    }
    (folder / "manifest.json").write_text(json.dumps(lines))
    return folder


def test_a_damaged_checkpoint_never_takes_its_place(box: Box, tmp_path: Path) -> None:
    there, here = checkpoint(tmp_path / "there/step-1"), tmp_path / "here/step-1"
    good = (there / "model.safetensors").read_bytes()
    (there / "model.safetensors").write_bytes(good[:-1] + b"?")
    with pytest.raises(SyncFailed, match=r"model\.safetensors has changed"):
        box.pull(str(there), here)
    assert not here.exists()
    (there / "model.safetensors").write_bytes(good)
    box.pull(str(there), here)
    assert tree_of(here) == tree_of(there)
    assert not temporary_files(tmp_path)


@pytest.mark.parametrize("direction", ["push", "pull"])
@pytest.mark.parametrize("pieces", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_cut_many_times_a_transfer_goes_on(
    sshd: PlainSshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direction: str, pieces: int
) -> None:
    """One transfer, cut after each 2 MiB: it goes on each time, and sends little twice."""
    monkeypatch.setenv("SOJOURN_CONFIG", str(sshd.config))
    monkeypatch.setattr("sojourn.remote.box_link._FIRST_PAUSE", 0.01)
    monkeypatch.setattr(Box, "bulk_agent", lambda box: None)
    source, target, size = tmp_path / "source/step-1", tmp_path / "target/step-1", pieces * 2 * MIB
    checkpoint(source, size)
    lines: list[str] = []
    with slow_link("127.0.0.1", sshd.host.port, cut_every=2 * MIB) as link:
        with Box(replace(sshd.through(link.local_port), home=str(tmp_path / "home")), lines.append) as box:
            if direction == "push":
                box.push([(source, str(target))])
            else:
                box.pull(str(source), target)
        assert link.carried < 2.5 * size
    assert tree_of(target) == tree_of(source)
    assert not temporary_files(tmp_path / "target")
    assert sum("connecting again" in line for line in lines) == sum("connected again" in line for line in lines) > 0


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_a_file_below_a_mebibyte_comes_through_connections_that_carry_less_than_it(
    sshd: PlainSshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direction: str
) -> None:
    monkeypatch.setenv("SOJOURN_CONFIG", str(sshd.config))
    monkeypatch.setattr("sojourn.remote.box_link._FIRST_PAUSE", 0.01)
    source, target = write(tmp_path / "source", {"wheel": os.urandom(900_000)}), tmp_path / "target"
    with (
        slow_link("127.0.0.1", sshd.host.port, cut_every=600_000) as link,
        Box(replace(sshd.through(link.local_port), home=str(tmp_path / "home")), patience=60) as box,
    ):
        if direction == "push":
            box.push([(source, str(target))])
        else:
            box.pull(str(source), target)
    assert tree_of(target) == tree_of(source)
    assert not temporary_files(target)


def test_a_killed_agent_is_replaced(box: Box, tmp_path: Path) -> None:
    with box.agent() as agent:
        pid = process_of(agent)
    os.kill(pid, signal.SIGKILL)
    box.write_bytes(str(tmp_path / "x"), b"1")
    assert box.read_bytes(str(tmp_path / "x")) == b"1"


@pytest.fixture
def far_box(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Box]:
    """40 ms away. The parameter: lines of the server's configuration."""
    folder = tmp_path_factory.mktemp("far")
    with plain_sshd(folder, request.param) as server, slow_link("127.0.0.1", server.host.port, delay=0.02) as link:
        monkeypatch.setenv("SOJOURN_CONFIG", str(server.config))
        with Box(replace(server.through(link.local_port), home=str(folder / "home")), patience=20) as box:
            yield box


def process_of(agent: Agent) -> int:
    return int(agent.ask("hello")[0]["pid"])


@pytest.mark.parametrize("far_box", ["MaxSessions 1"], indirect=True)
def test_agents_of_a_distant_box_start_beside_the_first_one_and_end_with_it(far_box: Box) -> None:
    """The server allows one command at a time: the others come by a socket, which this user alone may use."""
    with far_box.agent() as first, far_box.agent("stream-1", start=False) as second, far_box.agent("tail") as third:
        processes = [process_of(agent) for agent in (first, second, third)]
        listeners = [Path(f"/proc/{process}/stat").read_text().split()[3] for process in processes[1:]]
        folder = Path(first.socket).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert len(set(processes)) == 3
    assert listeners[0] == listeners[1] != str(os.getpid())
    os.kill(processes[0], signal.SIGKILL)  # the listener ends, and takes its socket along
    for _ in range(1000):
        if not folder.exists() and not any(Path(f"/proc/{listener}").exists() for listener in listeners):
            break
        time.sleep(0.01)
    assert not folder.exists()
    assert not any(Path(f"/proc/{listener}").exists() for listener in listeners)


@pytest.mark.parametrize(
    "far_box", ["MaxSessions 1", "AllowStreamLocalForwarding no", "DisableForwarding yes"], indirect=True
)
def test_a_tree_arrives_whether_or_not_the_server_forwards_sockets(
    far_box: Box, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sync, "_STREAM_BYTES", MIB // 4)
    monkeypatch.setattr(sync, "_STARTED_BYTES", MIB)
    files = {f"{n % 7}/{n}": os.urandom(5000) for n in range(300)} | {"large": os.urandom(3 * MIB + 7)}
    here, there = write(tmp_path / "here", files), tmp_path / "there"
    assert far_box.push([(here, str(there))]).files == 301
    assert tree_of(there) == tree_of(here)
    assert far_box.pull(str(there), tmp_path / "back").files == 301
    assert tree_of(tmp_path / "back") == tree_of(here)
    assert not temporary_files(tmp_path)


@pytest.mark.parametrize("far_box", ["MaxSessions 10"], indirect=True)
def test_agents_beside_a_first_one_that_was_killed_are_replaced(far_box: Box, tmp_path: Path) -> None:
    with far_box.agent() as first:
        os.kill(process_of(first), signal.SIGKILL)

    def ask_another() -> int:
        with far_box.agent("stream-1") as other:
            return process_of(other)

    assert far_box.again(ask_another) > 0  # the listener may end just as it is asked
    far_box.write_bytes(str(tmp_path / "x"), b"1")
    assert far_box.read_bytes(str(tmp_path / "x")) == b"1"


def test_two_syncs_at_once_to_one_target(sshd: PlainSshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOJOURN_CONFIG", str(sshd.config))
    here = write(tmp_path / "here", {f"{n}": os.urandom(1000) for n in range(100)} | {"large": os.urandom(8 * MIB)})
    errors: list[BaseException] = []

    def push() -> None:
        try:
            with Box(replace(sshd.host, home=str(tmp_path / "home"))) as box:
                box.push([(here, str(tmp_path / "there"))])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=push) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert tree_of(tmp_path / "there") == tree_of(here)
    assert not temporary_files(tmp_path / "there")


def test_a_file_that_changes_while_it_travels_is_noticed(box: Box, tmp_path: Path) -> None:
    here, there = write(tmp_path / "here", {"large": os.urandom(4 * MIB)}), tmp_path / "there"
    changes = iter(range(2))

    def progress(state: object) -> None:
        if next(changes, None) is not None:
            with (here / "large").open("r+b") as file:
                file.write(os.urandom(16))

    box.push([(here, str(there))], progress)
    assert tree_of(there) == tree_of(here)


def test_a_full_disk_is_said_and_leaves_the_old_file(box: Box, tmp_path: Path) -> None:
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(disk)], check=False).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        (disk / "file").write_bytes(b"old")
        for size in (6 * MIB, MIB // 2 * 9 // 5):
            here = write(
                tmp_path / f"here{size}", {"file": os.urandom(size), **{f"n{n}": os.urandom(size) for n in range(4)}}
            )
            with pytest.raises(SyncFailed, match=r"No space left|MiB free"):
                box.push([(here, str(disk))])
            assert len((disk / "file").read_bytes()) in (3, size)
            assert not [path for path in disk.iterdir() if path.name.endswith(".tmp")]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_clock_of_the_box_does_not_matter(box: Box, tmp_path: Path) -> None:
    here, there = write(tmp_path / "here", {"old": b"1", "new": b"2"}), tmp_path / "there"
    os.utime(here / "old", (1, 1))
    os.utime(here / "new", (4_000_000_000, 4_000_000_000))
    assert box.push([(here, str(there))]).files == 2
    assert box.push([(here, str(there))]).files == 0
    (there / "new").write_bytes(b"3")
    os.utime(there / "new", (4_000_000_000, 4_000_000_000))
    assert box.push([(here, str(there))]).files == 1
    assert (there / "new").read_bytes() == b"2"


def test_slow_links_compress_what_compresses(sshd: PlainSshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOJOURN_CONFIG", str(sshd.config))
    monkeypatch.setattr(sync, "is_slow", lambda meter: True)
    for module in ("download_small", "download_large"):
        monkeypatch.setattr(f"sojourn.remote.{module}.is_slow", lambda meter: True)
    here = write(tmp_path / "here", {"text": b"the same words " * 200_000, "small": b"words " * 1000})
    with slow_link("127.0.0.1", sshd.host.port) as link:
        with Box(replace(sshd.through(link.local_port), home=str(tmp_path / "home"))) as box:
            box.push([(here, str(tmp_path / "there"))])
            box.pull(str(tmp_path / "there"), tmp_path / "back")
        assert link.carried < MIB
    assert tree_of(tmp_path / "back") == tree_of(here)


def test_a_new_tree_goes_to_a_distant_box_at_once_and_only_changes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server allows one channel, so that the other streams are refused: the first one does everything."""
    monkeypatch.setattr(sync, "_STREAM_BYTES", MIB // 2)
    monkeypatch.setattr(sync, "_STARTED_BYTES", MIB // 2)
    asked: list[int] = []
    packed = Tree.packed
    monkeypatch.setattr(Tree, "packed", lambda tree, without: asked.append(len(without)) or packed(tree, without))
    here, there = write(tmp_path / "here", {f"{n % 7}/{n}": os.urandom(5000) for n in range(300)}), tmp_path / "there"
    (tmp_path / "sshd").mkdir()
    with plain_sshd(tmp_path / "sshd", "MaxSessions 1") as server, slow_link("127.0.0.1", server.host.port) as link:
        monkeypatch.setenv("SOJOURN_CONFIG", str(server.config))
        monkeypatch.setattr(Box, "round_trip", 0.1)
        with Box(replace(server.through(link.local_port), home=str(tmp_path / "home"))) as box:
            first = box.push([(here, str(there))])
            assert (first.files, first.unchanged) == (300, 0)
            assert tree_of(there) == tree_of(here)
            (here / "0/7").write_bytes(b"changed")
            carried = link.carried
            second = box.push([(here, str(there))])
            assert (second.files, second.unchanged) == (1, 299)
            assert link.carried - carried < MIB // 2
    assert asked == [300, 0]
    assert tree_of(there) == tree_of(here)


def test_a_small_file_that_changes_before_it_is_sent_travels_as_it_is_then(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = write(tmp_path / "here", {"a": b"old", "b": b"the same"}), tmp_path / "there"
    read = ReadAhead.read

    def change_after_it(ahead: ReadAhead, files: list[tuple[Tree, Entry]], enough: object) -> None:
        read(ahead, files, lambda: False)
        (here / "a").write_bytes(b"new and longer")

    monkeypatch.setattr(ReadAhead, "read", change_after_it)
    box.push([(here, str(there))])
    assert tree_of(there) == tree_of(here) == {"a": b"new and longer", "b": b"the same"}
