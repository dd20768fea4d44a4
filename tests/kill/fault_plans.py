"""When to kill: at chains of disk calls, one per training process, and at random moments."""

from __future__ import annotations

import re
from itertools import zip_longest
from random import Random
from typing import Any

from kill.killed_run import KilledRun, Reference

DISK_ERRORS = ("ENOSPC", "EIO", "EDQUOT")
Fault = tuple[str, str]  # a disk call, and how it ends


def calls_of(reference: Reference, making: str) -> list[str]:
    """The disk calls of an undisturbed run, in its own folder, while it makes `making`; each name once."""
    named = [name for name in reference.calls if name.endswith(f" of {making}") and " ../" not in name]
    return list(dict.fromkeys(named))


def aimed_at_saves(reference: Reference, all_tensors: bool) -> list[list[Fault]]:
    """Every call of consecutive saves that also remove old checkpoints: a kill before it in the first, after it in the
    second, and in the midst of it, where it writes, in the third."""
    chains, saves = [], (6, 8, 10)
    for name in calls_of_save(reference, saves[0], all_tensors):
        kinds = ("before", "after", "half") if name.startswith("write") else ("before", "after")
        chains.append([(name.replace(_step(saves[0]), _step(s)), how) for s, how in zip(saves, kinds, strict=False)])
    return chains


def aimed_elsewhere(reference: Reference) -> list[list[Fault]]:
    """Every call outside saves: while the run opens and says how it stands, while it writes `best/`, `final/` and its
    books."""
    parts = [
        [(name, how) for name in calls_of(reference, making) for how in _ways(name)]
        for making in ("the start", "best", "final")
    ]
    return [[fault for fault in chain if fault is not None] for chain in zip_longest(*parts)]


def _ways(name: str) -> tuple[str, ...]:
    return ("before", "half", "after") if name.startswith("write") else ("before", "after")


def _step(number: int) -> str:
    return f"step-{number:08d}"


def calls_of_save(reference: Reference, step: int, all_tensors: bool = False) -> list[str]:
    """Of many tensors in a file the first three and the tenth will do, unless all are wanted."""
    names = calls_of(reference, _step(step))
    if all_tensors:
        return names
    tensors = [name for name in names if name.startswith("write") and ".safetensors" in name]
    return [name for name in names if name not in tensors or name.split()[2] in ("1", "2", "3", "10")]


def failing_saves(reference: Reference, saves: tuple[int, ...] = (4, 8, 12, 16)) -> list[dict[str, str]]:
    """Every call of a save that the disk can refuse, for each reason it may have; several saves of a run fail."""
    names = [name for name in calls_of_save(reference, 6) if not name.startswith("remove_folder")]
    faults = [(name, why) for name in names for why in DISK_ERRORS]
    return [
        {name.replace(_step(6), _step(step)): why for step, (name, why) in zip(saves, faults[at:], strict=False)}
        for at in range(0, len(faults), len(saves))
    ]


def kill_at_calls(killed: KilledRun, chain: list[Fault]) -> None:
    """Kills one process after another, each at its disk call, then runs to the end."""
    for name, how in chain:
        outcome = killed.call(faults={name: how})
        if not outcome.killed:  # how often the status is written depends on when a save beside it has ended
            assert outcome.code == 0 and re.match(r"\w+ (\.status\.json\.PID|\.) ", name), f"{name} never came"
            break
    killed.finish()
    assert killed.ledger_is_exact()


def random_moment(killed: KilledRun, rng: Random) -> dict[str, Any]:
    """At any time, soon after a certain step was logged, or after the last one."""
    reference, done = killed.reference, killed.newest_good()
    kind = "any" if done == reference.total else rng.choice(("any", "any", "step", "step", "end"))
    if kind == "any":
        left = 1 - done / reference.total
        return {"kill_after": rng.uniform(0, reference.seconds * (0.4 + 0.6 * left))}
    if kind == "step":
        nearest = rng.randint(done + 1, min(done + 6, reference.total))
        return {"kill_at_step": nearest, "kill_after": rng.uniform(0, 0.06)}
    return {"kill_at_step": reference.total, "kill_after": rng.uniform(0, 1.2 * reference.tail)}


def kill_at_random_moments(killed: KilledRun, rng: Random, most: int) -> int:
    """Kills the run at random moments, at most `most` times, then runs to the end; returns the number of kills."""
    kills = 0
    while kills < most:
        outcome = killed.call(**random_moment(killed, rng))
        if not outcome.killed:
            assert outcome.code == 0, outcome.stderr
            break
        kills += 1
    killed.finish()
    assert killed.ledger_is_exact()
    return kills
