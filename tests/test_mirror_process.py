"""A mirror whose drive hangs holds up neither training nor its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mounts import mounted
from sojourn.errors import RunFailed
from sojourn.storage.mirror import MirrorFailed
from sojourn.storage.mirror_process import MirrorProcess
from tiny import after_step, events, run_of, run_train, same_weights, saved_steps


@pytest.fixture
def drive(tmp_path):
    """A real filesystem that can be frozen: then whoever writes to it waits, and cannot be killed."""
    if not all(map(shutil.which, ("mkfs.ext4", "fsfreeze"))):
        pytest.skip("mkfs.ext4 or fsfreeze is missing: only a real frozen filesystem hangs whoever writes to it")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(48 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with mounted(tmp_path / "drive", "-o", "loop", str(image)) as folder:
        yield folder
        subprocess.run(["fsfreeze", "-u", str(folder)], capture_output=True, check=False)


def _freeze(drive: Path) -> None:
    subprocess.run(["fsfreeze", "-f", str(drive)], check=True)


def test_a_copy_to_a_hung_drive_can_be_abandoned_and_the_next_one_works(drive, tmp_path):
    mirror = MirrorProcess(str(drive), "run")
    source = tmp_path / "source"
    source.mkdir()
    (source / "data").write_bytes(b"1" * 1000)
    mirror.put(source, "first")
    _freeze(drive)
    threading.Timer(0.5, mirror.abandon).start()
    with pytest.raises(MirrorFailed, match="did not finish in time"):
        mirror.put(source, "second")
    subprocess.run(["fsfreeze", "-u", str(drive)], check=True)
    mirror.close()
    mirror.put(source, "second")
    assert mirror.names("") == ["first", "second"]
    mirror.close()


def test_a_signal_ends_a_run_whose_mirror_hangs(tiny, monkeypatch, drive):
    """The drive stays frozen until the run has ended."""
    words = tiny.words(f"save.mirror={drive}", "save.every_steps=3", "save.keep=9", "limits.grace=2s")
    stop = {4: lambda: _freeze(drive), 8: lambda: os.kill(os.getpid(), signal.SIGTERM)}
    with monkeypatch.context() as patch, pytest.raises(RunFailed, match=r"saved in .*, but not mirrored"):
        after_step(patch, stop)
        run_train(words)
    run = run_of(words)
    assert run.status().state == "stopped" and saved_steps(run)[-1] == 8
    subprocess.run(["fsfreeze", "-u", str(drive)], check=True)
    run_train(words)
    assert events(run, "start")[-1]["step"] == 8 and same_weights(run, tiny.whole())
    there = drive / run.path.name
    assert {path.name for path in (there / "checkpoints").glob("step-*")} == {
        path.name for path in run.checkpoints.glob("step-*")
    }
    assert (there / "final" / "config.json").is_file()


@pytest.fixture
def child(tmp_path):
    """Starts the child of a trainer with this process id, and has it copy a folder."""

    def start(trainer: int) -> subprocess.Popen[bytes]:
        source = tmp_path / "source"
        source.mkdir()
        (source / "data").write_bytes(b"1")
        command = [sys.executable, "-m", "sojourn.storage.mirror_process", str(trainer), str(tmp_path / "there"), "run"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdin.write(json.dumps(["put", str(source), "first"]).encode() + b"\n")
        process.stdin.flush()
        return process

    return start


def test_a_child_whose_trainer_was_killed_at_its_start_copies_nothing(child, tmp_path):
    answer, errors = child(os.getppid()).communicate(timeout=60)
    assert (answer, errors) == (b"", b"") and not (tmp_path / "there").exists()


def test_a_child_whose_trainer_is_killed_prints_no_traceback(child, tmp_path):
    process = child(os.getpid())
    process.stdout.close()  # as a kill closes it, just before it ends this process too
    assert process.stderr.read() == b"" and process.wait(60) == 0
    assert (tmp_path / "there" / "run" / "first" / "data").is_file()


def test_half_a_call_of_a_killed_trainer_is_not_read(child, tmp_path):
    answer, errors = child(os.getpid()).communicate(b'["names", "', timeout=60)
    assert json.loads(answer) == {"value": None} and errors == b""


def test_a_killed_child_is_started_again(tmp_path):
    mirror = MirrorProcess(str(tmp_path), "run")
    assert mirror.names("") == []
    mirror._child.kill()
    with pytest.raises(MirrorFailed, match="the process that mirrors has ended"):
        mirror.names("")
    assert mirror.names("") == []
    mirror.close()
