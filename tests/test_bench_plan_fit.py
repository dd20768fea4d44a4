"""What whole steps tell a plan that single kernels cannot."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
from benchmarks.planner import fit
from benchmarks.planner.cases import CASES, shape_of
from benchmarks.planner.replan import planned

from sojourn.catalog.gpus import find_gpu
from sojourn.estimate.constants import constants
from sojourn.estimate.step_time import step_time
from sojourn.estimate.workload import Workload

DRAWN = Path(__file__).parents[1] / "benchmarks/results/plan-drawn-7-H200-2026-11-16.json"


@pytest.mark.slow
def test_whole_steps_correct_what_kernels_alone_cannot_tell_and_held_out_ones_are_not_looked_at():
    """From times that a slower card would have, the fit finds its way back to them."""
    table = deepcopy(constants())
    wanted = {**table, "matmul": {**table["matmul"], "slowness": 1.6}, "traffic": {**table["traffic"], "share": 0.7}}
    cases = [case for case in CASES if case.name.startswith(("pretrain", "lora", "full"))][::3]
    card = find_gpu("H200")
    works = [Workload(shape_of(one), one.method, one.rows, one.length, document_length=one.document) for one in cases]
    kept = deepcopy(constants())
    try:
        constants().update(deepcopy(wanted))
        steps = [(work, card, step_time(work, card).step_seconds) for work in works]
        constants().update(deepcopy(table))
        changes = fit.adjust(constants(), steps)
        assert max(abs(step_time(work, card).step_seconds / real - 1) for work, card, real in steps) < 0.03
    finally:
        constants().update(kept)
    text = fit.written("# one\n# two\n[matmul]\nslowness = 1.39  # so\n[idle]\nlayer_ms = 1\n", changes, 7)
    assert f"slowness = {changes['matmul', 'slowness']:.6g}  # so" in text and "adjusted to 7 measured steps" in text
    row = {"name": "lora-7b", "held_out": True, "measured": {"step_seconds": 1.0}}
    assert fit.timed([row]) == []


def test_runs_that_were_drawn_are_fitted_to_where_they_are_given_with_the_cpu_that_they_had():
    rows = json.loads(DRAWN.read_text())["rows"]
    found, usual = fit.timed(rows), constants()["launch"]["usual_us"]
    assert len(found) == len(rows) == 24 and {work.cpu_slowness for work, *_ in found} > {1.0}
    del rows[1]["measured"]["cpu_us"]
    rows[0]["measured"]["cpu_us"] = 2 * usual
    (work, card, _), plan = fit.timed(rows)[0], planned(rows[0])
    assert (
        work.cpu_slowness == 2
        and plan["known_seconds"] == step_time(work, card).step_seconds > 1.5 * plan["step_seconds"]
    )
    assert planned(rows[1])["known_seconds"] is None


def test_a_step_that_was_disturbed_moves_little():
    """Nine alike, and a tenth that took three times as long: the fit stays with the nine."""
    kept, card = deepcopy(constants()), find_gpu("H200")
    case = next(case for case in CASES if case.name == "pretrain-875m")
    work = Workload(shape_of(case), case.method, case.rows, case.length)
    real = step_time(work, card).step_seconds
    try:
        fit.adjust(constants(), [(work, card, real)] * 9 + [(work, card, 3 * real)])
        assert abs(step_time(work, card).step_seconds / real - 1) < 0.03
    finally:
        constants().update(kept)
