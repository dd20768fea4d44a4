"""A mirror on a real FUSE mount that drops and returns, under a run that is killed at random moments."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from kill.fault_plans import random_moment
from kill.killed_run import KEEP, KilledRun, needs_fork
from mounts import mounted_tmpfs
from sojourn.run.checkpoints import find_damage

pytestmark = needs_fork

KILLS = 15  # a test


class Drive(threading.Thread):
    """A FUSE mount whose server is killed, or which is unmounted, and mounted again, at random moments."""

    def __init__(self, folder: Path, rng: Random) -> None:
        super().__init__(daemon=True)
        self._stored, self._rng = folder / "stored", rng
        self._stopped, self.drops, self._error = threading.Event(), 0, None
        self._stored.mkdir(parents=True)
        self._opened = ExitStack()
        # Below the drive nothing can be written: what a first process writes there nobody could tell from a mirror.
        outer = self._opened.enter_context(mounted_tmpfs(folder / "outer"))
        self.mounted_at = outer / "drive"
        self.mounted_at.mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(outer)], check=True)
        self.mount()

    def mount(self) -> None:
        command = ["bindfs", "-f", str(self._stored), str(self.mounted_at)]
        self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 30
        while not self.mounted_at.is_mount():
            assert self._server.poll() is None and time.monotonic() < until, "bindfs does not mount"
            time.sleep(0.005)

    def run(self) -> None:
        try:
            while not self._stopped.wait(self._rng.uniform(0.1, 1.0)):
                self.drop()
                self._stopped.wait(self._rng.uniform(0.1, 0.6))
                self.mount()
        except BaseException as error:
            self._error = error

    def drop(self) -> None:
        if self._rng.random() < 0.5:
            self._server.kill()  # the mount stays, and every access fails
            self._server.wait()
            time.sleep(self._rng.uniform(0, 0.3))
        subprocess.run(["umount", "--lazy", str(self.mounted_at)], check=True)
        self._server.wait(30)
        self.drops += 1

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.mounted_at)], check=False)
        self._opened.close()
        self._server.kill()
        self._server.wait()


@pytest.mark.skipif(
    shutil.which("bindfs") is None or not Path("/dev/fuse").exists(),
    reason="a drive that drops is a real FUSE mount: it needs /dev/fuse and bindfs (apt-get install bindfs)",
)
@pytest.mark.parametrize("method", ["pretrain", "lora"])
def test_a_mirror_that_drops_and_returns_ends_complete(references, tell, tmp_path, method):
    reference, rng = references(method), Random(f"dropping {method}")
    drive, kills, runs, where = Drive(tmp_path, rng), 0, 0, Counter()
    try:
        while kills < KILLS:
            if runs:
                drive = _again(drive, tmp_path / str(runs), rng)
            killed = KilledRun(reference, f"dropping-{runs}", f"save.mirror={drive.mounted_at}")
            drive.start()
            for _ in range(5):
                outcome = killed.call(**random_moment(killed, rng))
                if not outcome.killed:
                    # A mirror that is away: refused at the start, or not complete at the end.
                    assert outcome.code == 0 or outcome.stderr.count("\n") == 1, outcome.stderr
                    where[f"exit {outcome.code}"] += 1
                    continue
                kills += 1
            drive.stop()
            killed.finish()
            assert killed.ledger_is_exact()
            there, here = drive.mounted_at / f"dropping-{runs}" / "checkpoints", killed.run.checkpoints
            names = {path.name for path in sorted(here.glob("step-*"))[-KEEP:]}
            assert names <= {path.name for path in there.glob("step-*")}
            assert all(find_damage(path) is None for path in there.glob("step-*"))
            where += killed.where
            where["drops"] += drive.drops
            runs += 1
            killed.clear()
    finally:
        drive.close()
    tell(method=method, trouble="kills with a mirror that drops", times=kills, runs=runs, where=where)


def _again(drive: Drive, folder: Path, rng: Random) -> Drive:
    drive.close()
    return Drive(folder, rng)
