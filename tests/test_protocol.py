"""The protocol of checkpoints, mirror and lock, explored: every state that a few actions and kills can reach. More
actions are in tests/kill/test_protocol_deep.py."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest

from lock_model import STEPS, Claim, LockModel, is_owner_alive
from protocol_explorer import MOUNTED, RUN, Explorer, memory_folder
from sojourn.run import lock as lock_module
from sojourn.run.lock import Owner, RunLock
from sojourn.train.checkpoint import checkpoint, recovery
from sojourn.train.checkpoint.checkpoint import Retention

TWO_MIRRORED = ("restart", "save", "mirror", "save", "mirror")


@pytest.mark.parametrize(
    ("keep", "kills", "depth", "first", "least"),
    [(2, 0, 6, (), 300), (1, 9, 3, (), 2000), (2, 1, 2, TWO_MIRRORED, 300)],
    ids=["without kills", "from the start", "two mirrored checkpoints"],
)
def test_no_kill_no_damage_and_no_lost_drive_costs_the_newest_good_checkpoint(keep, kills, depth, first, least):
    with memory_folder() as folder:
        explorer = Explorer(folder, Retention(keep), kills=kills)
        states = explorer.explore(depth, *first)
    print(f"{states} states, {explorer.transitions} transitions, restarts: {dict(explorer.endings)}")
    assert states > least and explorer.endings["from a checkpoint"]


@pytest.mark.parametrize("machines", [(0, 0), (0, 1), (0, 0, 0)], ids=["two here", "one elsewhere", "three here"])
@pytest.mark.parametrize("flock", ["works", "on each machine"])
def test_of_several_starters_never_two_own_a_run(machines, flock):
    model = LockModel(flock)
    states = model.explore(machines, frozenset({Claim(5, -1)}))
    print(f"{states} states, {model.transitions} transitions, {dict(model.counts)}")
    assert states > 400 and model.counts["writes"]


def test_the_model_takes_the_steps_of_the_code(tmp_path, monkeypatch):
    (tmp_path / ".owner-5.json").write_text(json.dumps(asdict(replace(Owner.here(), pid=0))))
    names = {"_flock": "flock", "_newest_claim": "list", "_is_owner_alive": "alive", "_create_claim": "create",
             "_remove_older_claims": "remove"}  # fmt: skip
    steps = []

    def recorded(real, step):
        def call(*arguments):
            steps.append("confirm" if step == "list" and "create" in steps else step)
            return real(*arguments)

        return call

    for name, step in names.items():
        monkeypatch.setattr(lock_module, name, recorded(getattr(lock_module, name), step))
    monkeypatch.setattr(RunLock, "_beat", lambda self: None)
    RunLock(tmp_path).release()
    assert tuple(steps) == STEPS
    assert lock_module.HEARTBEAT_TIMEOUT >= 10 * lock_module.HEARTBEAT_INTERVAL


@pytest.mark.parametrize(("released", "same_boot", "running"), list(product([False, True], repeat=3)))
def test_the_model_decides_as_the_code_who_is_alive(tmp_path, monkeypatch, released, same_boot, running):
    owner = replace(Owner.here(), released=released, **({} if same_boot else {"boot": "another"}))
    monkeypatch.setattr(lock_module, "is_alive", lambda pid, started: running)
    watched = []
    monkeypatch.setattr(lock_module.time, "sleep", watched.append)
    monkeypatch.setattr(lock_module, "HEARTBEAT_TIMEOUT", 0.001)
    (tmp_path / ".owner-1.json").write_text(json.dumps(asdict(owner)))
    alive = lock_module._is_owner_alive(tmp_path, 1, owner, flocked=True)
    assert is_owner_alive(released, same_boot, running) == (None if watched else alive)


def test_the_model_finds_what_happens_without_the_last_step():
    with pytest.raises(AssertionError, match="became the owner of a run that another one owns"):
        LockModel("missing", confirms=False).explore((0, 0, 0), frozenset({Claim(5, -1)}))


def test_the_explorer_finds_a_retention_that_counts_damaged_checkpoints(monkeypatch):
    """As it was: the damaged step 2 stays, and step 1 is removed as the older one as soon as it is saved."""
    damaged = (f"damage the newest good copy in {place}" for place in (RUN, MOUNTED))
    monkeypatch.setattr(checkpoint, "_is_verified", lambda path: True)
    monkeypatch.setattr(recovery, "set_aside", lambda path: None)
    with memory_folder() as folder, pytest.raises(AssertionError, match="what was saved is not there"):
        Explorer(folder, Retention(1), kills=0).explore(2, *TWO_MIRRORED, *damaged, "kill")


def test_the_explorer_sees_what_is_written_elsewhere(monkeypatch):
    with memory_folder() as folder:
        explorer = Explorer(folder, Retention(1), kills=0)
        monkeypatch.setattr(explorer, "_save", lambda node: Path(folder, "elsewhere").write_text("x") and node.memory)
        with pytest.raises(AssertionError, match="were written"):
            explorer.explore(2)
