"""The protocol of checkpoints, mirror and lock, explored further than in tests/test_protocol.py."""

from __future__ import annotations

import pytest

from lock_model import Claim, LockModel
from protocol_explorer import Explorer, memory_folder
from sojourn.train.checkpoint.checkpoint import Retention

TWO_MIRRORED = ("restart", "save", "mirror", "save", "mirror")
DAMAGED_HERE = (*TWO_MIRRORED, "damage the newest good copy in run", "kill")


@pytest.mark.parametrize(
    ("keep", "kills", "depth", "first", "least", "power_cuts"),
    [
        pytest.param(Retention(1), 9, 4, (), 15_000, False, id="any kills"),
        pytest.param(Retention(2), 0, 9, (), 2_000, False, id="no kills"),
        *(
            pytest.param(*case, power_cuts, id=f"{name}, {'power cuts' if power_cuts else 'kills'}")
            for power_cuts in (False, True)
            for name, case in {
                "keep 1": (Retention(1), 1, 4, TWO_MIRRORED, 2_000),
                "keep 2": (Retention(2), 1, 4, TWO_MIRRORED, 2_000),
                "milestones": (Retention(2, milestones=2), 1, 4, TWO_MIRRORED, 2_000),
                "damaged": (Retention(2), 2, 3, DAMAGED_HERE, 1_000),
            }.items()
        ),
    ],
)
def test_no_kill_no_damage_and_no_lost_drive_costs_the_newest_good_checkpoint(
    explored, keep, kills, depth, first, least, power_cuts
):
    with memory_folder() as folder:
        explorer = Explorer(folder, keep, steps=5, kills=kills, power_cuts=power_cuts)
        states = explorer.explore(depth, *first)
    explored("checkpoints and mirror", states, explorer.transitions, explorer.endings)
    assert states > least


@pytest.mark.parametrize("machines", [(0, 0), (0, 1), (0, 0, 0), (0, 0, 1), (0, 1, 1)], ids=str)
@pytest.mark.parametrize("flock", ["works", "on each machine", "missing"])
@pytest.mark.parametrize("claim", [None, Claim(5, -1), Claim(5, -1, released=True)], ids=["new", "killed", "released"])
def test_of_several_starters_never_two_own_a_run(explored, machines, flock, claim):
    model = LockModel(flock)
    states = model.explore(machines, frozenset() if claim is None else frozenset({claim}))
    explored("lock", states, model.transitions, model.counts)
    assert states > 300
