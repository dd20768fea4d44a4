"""What whole steps tell a plan that single kernels cannot."""

from copy import deepcopy

from sojourn.bench.plan import fit
from sojourn.bench.plan.cases import CASES, shape_of
from sojourn.catalog.names import gpu
from sojourn.plan.constants import constants
from sojourn.plan.speed import speed
from sojourn.plan.work import Work


def test_whole_steps_correct_what_kernels_alone_cannot_tell_and_held_out_ones_are_not_looked_at():
    """From times that a slower card would have, the fit finds its way back to them."""
    table = deepcopy(constants())
    wanted = {**table, "matmul": {**table["matmul"], "slowness": 1.6}, "traffic": {**table["traffic"], "share": 0.7}}
    cases = [case for case in CASES if case.name.startswith(("pretrain", "lora", "full"))]
    card = gpu("H200")
    works = [Work(shape_of(one), one.method, one.rows, one.length, document=one.document) for one in cases]
    kept = deepcopy(constants())
    try:
        constants().update(deepcopy(wanted))
        steps = [(work, card, speed(work, card).step_seconds) for work in works]
        constants().update(deepcopy(table))
        changes = fit.adjust(constants(), steps)
        assert max(abs(speed(work, card).step_seconds / real - 1) for work, card, real in steps) < 0.03
    finally:
        constants().update(kept)
    text = fit.written("# one\n# two\n[matmul]\nslowness = 1.39  # so\n[idle]\nlayer_ms = 1\n", changes, 7)
    assert f"slowness = {changes['matmul', 'slowness']:.6g}  # so" in text and "adjusted to 7 whole steps" in text
    row = {"held_out": True, "measured": {"step_seconds": 1.0}}
    assert fit.timed([row]) == []
