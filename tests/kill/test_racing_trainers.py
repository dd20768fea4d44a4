"""Two to four trainers start on one run at nearly the same moment, and one of them is killed: one trains, the others
are refused in one line, and no step is made by two."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from random import Random

import pytest

from kill.killed_run import KilledRun, needs_fork

pytestmark = needs_fork

KILLS = 25  # a test
_REFUSED = re.compile(r"sojourn: [^\n]*(already being trained by|another process is starting here)[^\n]*\n")


@pytest.mark.parametrize("seed", range(4))
def test_of_trainers_that_race_for_a_run_one_trains(references, tell, seed):
    reference, rng = references("lora" if seed % 2 else "pretrain"), Random(f"race {seed}")
    kills, runs, where = 0, 0, Counter()
    while kills < KILLS:
        killed = KilledRun(reference, f"race-{seed}-{runs}")
        for _ in range(8):
            if kills == KILLS or _race(killed, rng, where):
                break
            kills += 1
        killed.finish()
        assert killed.ledger_is_exact()
        runs += 1
        killed.clear()
    tell(method=reference.method, trouble="kills while trainers race", times=kills, runs=runs, where=where)


def _race(killed: KilledRun, rng: Random, where: Counter[str]) -> bool:
    """Whether the run was done before the kill came. The kill hits any of them, the owner more often than not."""
    server, children, began = killed.reference.fork_server, [], time.monotonic()
    for _ in range(rng.randint(2, 4)):
        children.append(killed.train_call().start(server))
        time.sleep(rng.choice((0.0, 0.0, rng.uniform(0, 0.2))))
    time.sleep(rng.uniform(0, 1.2 * killed.reference.seconds))
    victim = rng.choice([child for child in children if child.poll() is None] or children)
    victim.send_signal(signal.SIGKILL)
    codes = [child.wait() for child in children]
    killed.used += len(children) * (time.monotonic() - began)
    for child, code in zip(children, codes, strict=True):
        assert code in (0, -9) or (code == 2 and _REFUSED.fullmatch(child.stderr)), child.stderr
        if code == 2:
            where["refused"] += 1
    if victim.returncode == -9:
        where["killed"] += 1
    assert killed.made_in_order()
    return 0 in codes
