"""A disk that another program fills and empties at random, under a run that is killed at random moments."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kill.fault_plans import random_moment
from kill.killed_run import KilledRun, needs_fork
from mounts import mounted_tmpfs

pytestmark = needs_fork

KILLS = 25  # a test


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_tmpfs(tmp_path / "disk", "size=4m") as folder:
        yield folder


class Filler(threading.Thread):
    """Takes all the space but a random rest, and gives it back, again and again."""

    def __init__(self, disk: Path, rng: Random) -> None:
        super().__init__(daemon=True)
        self._file, self._rng, self._stopped, self.times = disk / "somebody-else", rng, threading.Event(), 0

    def run(self) -> None:
        while not self._stopped.wait(self._rng.uniform(0, 0.3)):
            leave = self._rng.choice((0, 0, 4096, 100_000))
            try:
                with self._file.open("wb", buffering=0) as file:
                    while (left := shutil.disk_usage(self._file.parent).free - leave) > 0:
                        file.write(bytes(min(left, 1 << 16)))
            except OSError:
                pass
            self.times += 1
            self._stopped.wait(self._rng.uniform(0, 0.3))
            self._file.unlink(missing_ok=True)

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        self._file.unlink(missing_ok=True)


@pytest.mark.parametrize("method", ["pretrain", "lora"])
def test_a_disk_that_fills_and_empties_loses_no_reported_save(references, tell, small_disk, method):
    reference, rng = references(method), Random(f"filling {method}")
    kills, fills, runs, where = 0, 0, 0, Counter()
    while kills < KILLS:
        killed = KilledRun(reference, f"filling-{runs}", "save.min_free=0", folder=small_disk / f"run-{runs}")
        filler = Filler(small_disk, rng)
        filler.start()
        try:
            for _ in range(6):
                outcome = killed.call(crowded=True, **random_moment(killed, rng))
                if not outcome.killed:
                    assert outcome.code in (0, 1) and outcome.stderr.count("\n") <= 1, outcome.stderr
                    break
                kills += 1
        finally:
            filler.stop()
        killed.finish(curve=False)
        assert killed.ledger_is_exact()
        where += killed.where
        fills += filler.times
        runs += 1
        killed.clear()
        for rescued in reference.home.glob("sojourn-rescued-*"):
            shutil.rmtree(rescued)
    where["times the disk was full"] = fills
    tell(method=method, trouble="kills on a disk that fills and empties", times=kills, runs=runs, where=where)
