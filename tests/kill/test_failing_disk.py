"""A disk that refuses: a save that fails is told and made up for; what cannot go on says so in a line, and the same
command completes it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kill.fault_plans import DISK_ERRORS, calls_of, calls_of_save, failing_saves
from kill.killed_run import KilledRun, Reference, needs_fork
from kill.train_call import Outcome
from mounts import mounted_tmpfs

pytestmark = needs_fork


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("method", ["pretrain", "lora"])
def test_a_save_that_fails_is_reported_and_the_run_goes_on_to_the_same_end(references, tell, method, part):
    reference = references(method)
    runs, where = failing_saves(reference)[part::2], Counter()
    for number, faults in enumerate(runs):
        killed = KilledRun(reference, f"failing-{part}-{number}")
        outcome = killed.call(faults=faults)
        assert outcome.code == 0, outcome.stderr
        struck = [line["name"] for line in killed.log() if line["what"] == "fault"]
        fatal = [name for name in struck if not _is_harmless(name)]
        assert len(killed.events("save_failed")) == len(fatal), f"{faults} {outcome.stdout}"
        assert outcome.stdout.count("saving is tried again later") == len(fatal)
        killed.check_end()
        where.update(name.split()[0] for name in struck)
        killed.clear()
    tell(method=method, trouble="failures of a save's disk calls", times=where.total(), runs=len(runs), where=where)


def _is_harmless(name: str) -> bool:
    """Some disks cannot make a folder durable, and an old checkpoint that stays does no harm."""
    harmless = name.startswith(("unlink", "rename checkpoints/step-OLD"))
    return harmless or re.match(r"sync checkpoints(/\.stage-PID-step-\d+)? \d", name) is not None


@pytest.mark.parametrize(
    ("method", "part", "of"), [("pretrain", 0, 4), ("pretrain", 2, 4), ("lora", 1, 4), ("qlora", 3, 12)]
)
def test_where_a_run_cannot_go_on_without_its_disk_it_says_so_and_the_next_call_completes(
    references, tell, method, part, of
):
    reference = references(method)
    names = [name for making in ("the start", "best", "final") for name in calls_of(reference, making)]
    names = [
        name for name in (*names, *calls_of_save(reference, reference.total)) if not name.startswith("remove_folder")
    ]
    where, chosen = Counter(), names[part::of]
    for number, name in enumerate(chosen):
        killed = KilledRun(reference, f"refused-{part}-{number}")
        outcome = killed.call(faults={name: DISK_ERRORS[number % 3]})
        assert outcome.code == 0 or _is_told_in_a_line(outcome), f"{name}: {outcome.stderr}"
        killed.finish()
        where[name.split()[0]] += 1
        killed.clear()
    tell(method=method, trouble="failures of other disk calls", times=where.total(), runs=len(chosen), where=where)


def _is_told_in_a_line(outcome: Outcome) -> bool:
    return outcome.code == 1 and re.fullmatch(r"sojourn: [^\n]+\n", outcome.stderr) is not None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_tmpfs(tmp_path / "disk", "size=4m") as folder:
        yield folder


def _on(disk: Path, reference: Reference, name: str) -> KilledRun:
    return KilledRun(reference, name, "save.min_free=0", folder=disk / "run")


@pytest.mark.parametrize("method", ["pretrain", "lora"])
@pytest.mark.parametrize("room", ["none", "half a checkpoint", "a checkpoint but for its manifest"])
def test_a_disk_that_somebody_else_fills_for_a_while_costs_no_step(references, small_disk, method, room):
    killed = _on(small_disk, references(method), f"full-{room.replace(' ', '-')}")
    size = _checkpoint_size(references(method))
    leave = {"none": 0, "half a checkpoint": size // 2, "a checkpoint but for its manifest": size + 4096}[room]
    full = {"folder": str(small_disk), "from": 5, "until": 11, "leave": leave}
    outcome = killed.call(fill=full)
    assert outcome.code == 0, outcome.stderr
    assert room == "half a checkpoint" or "saving is tried again later" in outcome.stdout  # an older one made room
    killed.check_end(curve=room != "none")


@pytest.mark.parametrize(
    ("method", "leave"),
    [("pretrain", 0), ("lora", 0), ("pretrain", 32 << 10), ("lora", 32 << 10)],
)
def test_a_disk_that_stays_full_ends_the_run_in_a_line_and_room_completes_it(references, small_disk, method, leave):
    killed = _on(small_disk, references(method), f"stays-{leave}")
    full = {"folder": str(small_disk), "from": 5, "until": -1, "leave": leave}
    outcome = killed.call(fill=full)
    assert _is_told_in_a_line(outcome), outcome.stderr
    (small_disk / "somebody-else").unlink()
    killed.finish(curve=False)


def _checkpoint_size(reference: Reference) -> int:
    place = reference.home / "runs" / "whole" / "checkpoints" / f"step-{reference.total:08d}"
    return sum(file.stat().st_size for file in place.iterdir())
