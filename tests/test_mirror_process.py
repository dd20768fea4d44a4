"""A mirror whose drive hangs holds up neither training nor its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
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


def test_a_killed_child_is_started_again(tmp_path):
    mirror = MirrorProcess(str(tmp_path), "run")
    assert mirror.names("") == []
    mirror._child.kill()
    with pytest.raises(MirrorFailed, match="the process that mirrors has ended"):
        mirror.names("")
    assert mirror.names("") == []
    mirror.close()
