"""SIGKILL at any moment, again and again: the run ends with the weights and the rows of one that nobody touched."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kill.fault_plans import kill_at_random_moments
from kill.killed_run import KilledRun, needs_fork

pytestmark = needs_fork

KILLS = 20  # a test
TESTS = {"pretrain": 6, "lora": 6, "qlora": 3}


@pytest.mark.parametrize(("method", "seed"), [(method, n) for method, tests in TESTS.items() for n in range(tests)])
def test_a_run_killed_at_random_moments_is_the_run_that_was_not(references, tell, method, seed):
    reference, rng = references(method), Random(f"{method} {seed}")
    kills, runs, where = 0, 0, Counter()
    while kills < KILLS:
        killed = KilledRun(reference, f"random-{seed}-{runs}")
        kills += kill_at_random_moments(killed, rng, most=8)
        runs += 1
        where += killed.where
        killed.clear()
    tell(method=method, trouble="random kills", times=kills, runs=runs, where=where)
