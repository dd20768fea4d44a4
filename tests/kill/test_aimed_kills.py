"""SIGKILL before, after and amid the calls by which a run changes its disk: nothing that was safe is lost."""

from __future__ import annotations

from collections import Counter

import pytest

from kill.plans import Blow, aimed_at_saves, aimed_elsewhere, strike
from kill.scene import KEEP, Journey, Scene, needs_fork
from sojourn.train.checkpoint.checkpoint import list_checkpoints

pytestmark = needs_fork

PARTS = 4


def _survived(scene: Scene, chains: list[list[Blow]], name: str) -> dict[str, object]:
    where: Counter[str] = Counter()
    for number, chain in enumerate(chains):
        journey = Journey(scene, f"{name}-{number}")
        strike(journey, chain)
        where += journey.where
        journey.clear()
    return {"times": where.total(), "runs": len(chains), "where": where}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("method", ["pretrain", "lora"])
def test_a_kill_at_any_disk_call_of_a_save_keeps_the_last_good_checkpoint(scenes, tell, method, part):
    scene = scenes(method)
    chains = aimed_at_saves(scene, all_tensors=method == "pretrain")
    kinds = {name.split()[0] for chain in chains for name, _ in chain}
    assert kinds == {"write", "sync", "rename", "unlink", "make_folder", "remove_folder"}
    survived = _survived(scene, chains[part::PARTS], f"save-{part}")
    tell(method=method, trouble="kills at a save's disk calls", **survived)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("method", ["pretrain", "lora"])
def test_a_kill_at_any_other_disk_call_loses_nothing_either(scenes, tell, method, part):
    scene = scenes(method)
    chains = aimed_elsewhere(scene)[:: 1 if method == "pretrain" else 2]
    survived = _survived(scene, chains[part::PARTS], f"other-{part}")
    tell(method=method, trouble="kills at other disk calls", **survived)


def test_a_quantised_base_changes_nothing_of_that(scenes, tell):
    scene = scenes("qlora")
    chains = [*aimed_at_saves(scene, all_tensors=False)[::6], *aimed_elsewhere(scene)[::12]]
    tell(method="qlora", trouble="kills at a save's disk calls", **_survived(scene, chains, "quantised"))


def test_no_half_written_file_stays_behind(scenes):
    journey = Journey(scenes("pretrain"), "half-written")
    small = [("write .status.json.PID 1 of the start", "half"), ("rename .run.yaml.PID 1 of the start", "before")]
    strike(journey, [*small, ("write checkpoints/.latest.PID 1 of step-00000006", "after")])
    assert journey.rubbish() == []


def test_what_the_last_save_left_undone_is_made_up_for(scenes):
    journey = Journey(scenes("pretrain"), "undone")
    strike(journey, [("write checkpoints/.latest.PID 1 of step-00000017", "before")])
    kept = [path.name for path in list_checkpoints(journey.run.checkpoints)]
    assert (journey.run.checkpoints / "latest").read_text().strip() == kept[-1] and len(kept) == KEEP
