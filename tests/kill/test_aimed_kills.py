"""SIGKILL before, after and amid the calls by which a run changes its disk: nothing that was safe is lost."""

from __future__ import annotations

from collections import Counter

import pytest

from kill.fault_plans import Fault, aimed_at_saves, aimed_elsewhere, kill_at_calls
from kill.killed_run import KEEP, KilledRun, Reference, needs_fork
from sojourn.run.checkpoints import list_checkpoints

pytestmark = needs_fork

PARTS = 4


def _survived(reference: Reference, chains: list[list[Fault]], name: str) -> dict[str, object]:
    where: Counter[str] = Counter()
    for number, chain in enumerate(chains):
        killed = KilledRun(reference, f"{name}-{number}")
        kill_at_calls(killed, chain)
        where += killed.where
        killed.clear()
    return {"times": where.total(), "runs": len(chains), "where": where}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("method", ["pretrain", "lora"])
def test_a_kill_at_any_disk_call_of_a_save_keeps_the_last_good_checkpoint(references, tell, method, part):
    reference = references(method)
    chains = aimed_at_saves(reference, all_tensors=method == "pretrain")
    kinds = {name.split()[0] for chain in chains for name, _ in chain}
    assert kinds == {"write", "sync", "rename", "unlink", "make_folder", "remove_folder"}
    survived = _survived(reference, chains[part::PARTS], f"save-{part}")
    tell(method=method, trouble="kills at a save's disk calls", **survived)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("method", ["pretrain", "lora"])
def test_a_kill_at_any_other_disk_call_loses_nothing_either(references, tell, method, part):
    reference = references(method)
    chains = aimed_elsewhere(reference)[:: 1 if method == "pretrain" else 2]
    survived = _survived(reference, chains[part::PARTS], f"other-{part}")
    tell(method=method, trouble="kills at other disk calls", **survived)


def test_a_quantised_base_changes_nothing_of_that(references, tell):
    reference = references("qlora")
    chains = [*aimed_at_saves(reference, all_tensors=False)[::6], *aimed_elsewhere(reference)[::12]]
    tell(method="qlora", trouble="kills at a save's disk calls", **_survived(reference, chains, "quantised"))


def test_no_half_written_file_stays_behind(references):
    killed = KilledRun(references("pretrain"), "half-written")
    small = [("write .status.json.PID 1 of the start", "half"), ("rename .run.yaml.PID 1 of the start", "before")]
    kill_at_calls(killed, [*small, ("write checkpoints/.latest.PID 1 of step-00000006", "after")])
    assert killed.leftovers() == []


def test_what_the_last_save_left_undone_is_made_up_for(references):
    killed = KilledRun(references("pretrain"), "undone")
    kill_at_calls(killed, [("write checkpoints/.latest.PID 1 of step-00000017", "before")])
    kept = [path.name for path in list_checkpoints(killed.run.checkpoints)]
    assert (killed.run.checkpoints / "latest").read_text().strip() == kept[-1] and len(kept) == KEEP
