"""Run folder and mirror, each good, damaged, foreign, absent, older or newer, and a kill before or after the next save:
the run goes on from the newest good checkpoint of its own, or refuses in a line that says why. Nothing is lost."""

from __future__ import annotations

import pytest

from kill.copies import HERE, NEWEST, THERE, Copies
from kill.killed_run import needs_fork

pytestmark = needs_fork

REFUSALS = (
    "a checkpoint of another run; move it away",
    "holds checkpoints of another run; give this run another name",
    "holds another run of this name",
    "was the mirror of this run and is empty now; mount the drive",
    "train.seed was 7, now 0",
)


@pytest.fixture(scope="session")
def copies(references) -> Copies:
    return Copies(references("pretrain"))


def _may_refuse(here: str, there: str) -> bool:
    """Where something of another run is met before a good checkpoint, or the mirror is gone."""
    if "foreign" in (here, there) or there == "of another run":
        return True
    return there == "absent" and here != "absent"


@pytest.mark.parametrize("here", HERE)
def test_from_any_two_copies_the_newest_good_state_of_this_run_or_a_clear_refusal(copies, aimed, here):
    for there in THERE:
        for kill in ("before", "after"):
            copies.put(here, there)
            newest = copies.newest_good()
            result = copies.survive(newest, kill)
            what = f"here {here}, mirror {there}, killed {kill}: {result}"
            if result.first is None:
                assert _may_refuse(here, there), what
                assert any(refusal in result.refusal for refusal in REFUSALS), what
            else:
                assert result.first == newest and result.killed, what
                assert newest >= NEWEST or here in ("damaged", "absent", "older", "foreign"), what
            aimed(here, there, kill, "refused" if result.first is None else f"step {result.first}")
