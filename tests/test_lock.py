"""At most one process trains a run: stale locks, clocks that jump, other pid namespaces, other machines."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fork_server import needs_fork
from mounts import mounted_tmpfs
from small_python import run_in_small_python
from sojourn.errors import RunFailed, UserError
from sojourn.machine import process
from sojourn.run import lock as lock_module
from sojourn.run.folder import RunFolder
from sojourn.run.lock import Owner, OwnershipLost, RunLock
from sojourn.storage.files import read_json
from sojourn.train.checkpoint.checkpoint import Checkpoint, Retention, save

TRY = "import sys; from pathlib import Path; from sojourn.run.lock import RunLock; RunLock(Path(sys.argv[1]))"


@pytest.fixture
def quick(monkeypatch):
    """Heartbeats in tenths of a second."""
    monkeypatch.setattr(lock_module, "HEARTBEAT_INTERVAL", 0.02)
    monkeypatch.setattr(lock_module, "HEARTBEAT_TIMEOUT", 0.5)


def _claims(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".owner-*"))


def _leave_claim(folder: Path, owner: Owner, token: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f".owner-{token}.json").write_text(json.dumps(asdict(owner)))


def _starters(folder: Path, count: int) -> list[int]:
    """Processes that try to lock the folder at the same moment and hold it; those that own it write their pid."""
    ready, start = os.pipe()
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            os.close(start)
            os.read(ready, 1)  # until the parent closes its end
            try:
                RunLock(folder)
                (folder / f"won-{os.getpid()}").touch()
                time.sleep(60)
            except UserError:
                pass
            finally:
                os._exit(0)
        pids.append(pid)
    os.close(ready)
    os.close(start)
    return pids


def _wait(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


@needs_fork
@pytest.mark.parametrize("rounds", [8, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize("flock", [True, False], ids=["flock", "no flock"])
def test_of_several_starts_after_a_crash_exactly_one_owns_the_run(tmp_path, flock, rounds):
    run_in_small_python("test_lock", "start_several_times", tmp_path, flock, rounds)


def start_several_times(home: str, flock: bool, rounds: int) -> None:
    """Each round begins with the lock of a process that was killed."""
    folder = Path(home)
    if not flock:
        pytest.MonkeyPatch().setattr(lock_module, "_flock", lambda handle, folder: False)
    for number in range(rounds):
        pids = _starters(folder, 4)
        losers = []

        def losers_ended(pids=pids, losers=losers):
            for pid in set(pids) - set(losers):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    losers.append(pid)
            return len(losers) == 3

        _wait(losers_ended)
        (winner,) = set(pids) - set(losers)
        _wait(lambda: any(folder.glob("won-*")))
        assert [path.name for path in folder.glob("won-*")] == [f"won-{winner}"]
        assert _claims(folder) == [f".owner-{number + 1}.json"]
        os.kill(winner, signal.SIGKILL)
        os.waitpid(winner, 0)
        (folder / f"won-{winner}").unlink()


def test_a_starter_that_was_slow_does_not_own_a_run_that_others_have_taken_since(tmp_path, monkeypatch):
    """Without flock: the claim that it is about to make has been made and removed by others."""
    monkeypatch.setattr(lock_module, "_flock", lambda handle, folder: False)
    create, owners = lock_module._create_claim, []

    def slow(path, owner):
        monkeypatch.setattr(lock_module, "_create_claim", create)
        RunLock(tmp_path).release()
        owners.append(RunLock(tmp_path))
        return create(path, owner)

    monkeypatch.setattr(lock_module, "_create_claim", slow)
    with pytest.raises(UserError, match="another process has just started here"):
        RunLock(tmp_path)
    owners[0].check()
    owners[0].release()


def test_an_owner_that_cannot_list_the_claims_does_not_write(tmp_path, monkeypatch):
    lock = RunLock(tmp_path)

    def fail(self):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch, pytest.raises(RunFailed, match="Too many open files"):
        patch.setattr(Path, "iterdir", fail)
        lock.check()
    lock.check()
    lock.release()


def test_a_clock_that_is_set_does_not_free_the_lock(tmp_path, monkeypatch):
    lock = RunLock(tmp_path)
    pid, started = process.current_process()
    import psutil

    monkeypatch.setattr(psutil, "boot_time", lambda real=psutil.boot_time: real() + 2)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 7200)
    assert process.is_alive(pid, started) and not process.is_alive(pid, started - 2)
    monkeypatch.setattr(lock_module, "_flock", lambda handle, folder: False)
    with pytest.raises(UserError, match=f"already being trained by the process with pid {pid}"):
        RunLock(tmp_path)
    lock.release()
    RunLock(tmp_path).release()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize("killed", [False, True])
def test_a_process_in_another_pid_namespace_is_seen(tmp_path, killed):
    """There, our pid is nobody's, or somebody else's."""
    holder = subprocess.Popen([sys.executable, "-c", TRY + "; print(1, flush=True); input()", str(tmp_path)],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert holder.stdout.readline() == b"1\n"
    if killed:
        holder.kill()
        holder.wait()
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", TRY, str(tmp_path)]
    other = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (other.returncode == 0) == killed
    if not killed:
        assert f"already being trained by the process with pid {holder.pid}" in other.stderr
        holder.kill()
        holder.wait()


@pytest.mark.usefixtures("quick")
def test_an_owner_on_another_machine_is_alive_while_its_heartbeat_changes(tmp_path, monkeypatch, capsys):
    other = RunLock(tmp_path)  # its heartbeat goes on in a thread
    monkeypatch.setattr(lock_module, "boot_id", lambda: "this machine")
    monkeypatch.setattr(lock_module, "_flock", lambda handle, folder: False)  # shared storage that ignores it
    with pytest.raises(UserError, match=f"pid {os.getpid()} on "):
        RunLock(tmp_path)
    other._stopped.set()  # that machine is gone, and has released nothing
    other._thread.join()
    ours = RunLock(tmp_path)
    assert "not released; watching it" in capsys.readouterr().out and ours.token == 2
    with pytest.raises(OwnershipLost, match="has taken over this run; this one stops and writes nothing more"):
        other.check()
    ours.check()
    ours.release()


def test_a_run_on_another_machine_is_shown_as_running_while_its_heart_beats(tmp_path):
    RunFolder(tmp_path).set_status("running", 3, 9)
    status = read_json(tmp_path / "status.json")
    (tmp_path / "status.json").write_text(json.dumps({**status, "pid": 4_194_999}))
    assert RunFolder(tmp_path).status().state == "failed"
    _leave_claim(tmp_path, replace(Owner.here(), boot="another", host="colab"))
    assert RunFolder(tmp_path).status().state == "running"
    os.utime(tmp_path / ".owner-1.json", (1, 1))
    assert RunFolder(tmp_path).status().state == "failed"


@pytest.mark.usefixtures("quick")
def test_an_owner_that_hung_notices_by_itself_that_it_has_lost_the_run(tmp_path):
    lock = RunLock(tmp_path)
    _leave_claim(tmp_path, replace(Owner.here(), boot="another", host="colab"), token=2)
    _wait(lambda: lock.lost is not None)
    assert "on colab has taken over this run" in lock.lost
    run = RunFolder(tmp_path, lock=lock)
    run.set_status("failed", 1, 2)
    run.event("failed")
    assert not (tmp_path / "status.json").exists() and not (tmp_path / "events.jsonl").exists()
    lock.release()
    assert read_json(tmp_path / ".owner-2.json")["released"] is False


def test_a_loser_writes_no_checkpoint_and_removes_none(tmp_path):
    import torch

    def checkpoint(step):
        return Checkpoint({"a": torch.ones(4)}, {}, {}, {"step": step, "seconds": 0.0, "money": 0.0})

    lock = RunLock(tmp_path)
    for step in (1, 2):
        save(tmp_path / "checkpoints", checkpoint(step), Retention(1), check_ownership=lock.check)
    before = sorted(path.name for path in (tmp_path / "checkpoints").rglob("*"))
    _leave_claim(tmp_path, replace(Owner.here(), pid=1), token=2)
    with pytest.raises(OwnershipLost):
        save(tmp_path / "checkpoints", checkpoint(3), Retention(1), check_ownership=lock.check)
    assert sorted(path.name for path in (tmp_path / "checkpoints").rglob("*")) == before
    lock.release()


@needs_fork
def test_a_child_of_a_killed_trainer_does_not_hold_its_lock(tmp_path):
    ready, made = os.pipe()
    pid = os.fork()
    if pid == 0:
        RunLock(tmp_path)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.write(made, str(child).encode())
        time.sleep(60)
    child = int(os.read(ready, 100))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    RunLock(tmp_path).release()
    os.kill(child, signal.SIGKILL)
    os.close(ready)
    os.close(made)


def test_a_trainer_of_an_older_version_is_seen(tmp_path):
    import psutil

    (tmp_path / ".lock").write_text(str([os.getpid(), psutil.Process().create_time()]))
    with pytest.raises(UserError, match=f"already being trained by the process with pid {os.getpid()}"):
        RunLock(tmp_path)
    (tmp_path / ".lock").write_text("[999999, 1700000000.5]")
    RunLock(tmp_path).release()


@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
def test_a_lock_that_is_no_file_is_one_line(tmp_path, kind):
    make = {
        "folder": lambda path: path.mkdir(),
        "fifo": os.mkfifo,
        "link": lambda path: path.symlink_to("/dev/zero"),
    }
    make[kind](tmp_path / ".lock")
    with pytest.raises(UserError, match=r"\.lock: not a regular file; remove it"):
        RunLock(tmp_path)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "content",
    ["", '{"pid": "x", "boot": []}', *(pytest.param(c, marks=pytest.mark.slow) for c in ("{", "[]", '{"host": 7}'))],
)
def test_a_claim_that_cannot_be_read_is_watched_and_then_taken_over(tmp_path, content):
    (tmp_path / ".owner-7.json").write_text(content)
    lock = RunLock(tmp_path)
    assert lock.token == 8 and _claims(tmp_path) == [".owner-8.json"]
    lock.release()


def test_a_full_disk_leaves_no_half_written_claim(tmp_path, capfd):
    with mounted_tmpfs(tmp_path / "disk", "size=64k") as folder:
        with (folder / "somebody-else").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        with pytest.raises(RunFailed, match="No space left"):
            RunLock(folder)
        assert _claims(folder) == []
        (folder / "somebody-else").unlink()
        RunLock(folder).release()
    assert "watching" not in capfd.readouterr().out
