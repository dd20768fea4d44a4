"""Which blows fall where: chains of disk calls, each call the last one of a trainer, the next trainer going on to the
next; and random moments."""

from __future__ import annotations

import re
from itertools import zip_longest
from random import Random
from typing import Any

from kill.scene import Journey, Scene

TROUBLE = ("ENOSPC", "EIO", "EDQUOT")
Blow = tuple[str, str]  # a disk call, and how it ends


def calls_of(scene: Scene, making: str) -> list[str]:
    """The disk calls of an undisturbed run, in its own folder, while it makes `making`; each name once."""
    named = [name for name in scene.calls if name.endswith(f" of {making}") and " ../" not in name]
    return list(dict.fromkeys(named))


def aimed_at_saves(scene: Scene, all_tensors: bool) -> list[list[Blow]]:
    """Every call of consecutive saves that also remove old checkpoints: a kill before it in the first, after it in the
    second, and in the midst of it, where it writes, in the third."""
    chains, saves = [], (6, 8, 10)
    for name in calls_of_save(scene, saves[0], all_tensors):
        kinds = ("before", "after", "half") if name.startswith("write") else ("before", "after")
        chains.append([(name.replace(_step(saves[0]), _step(s)), how) for s, how in zip(saves, kinds, strict=False)])
    return chains


def aimed_elsewhere(scene: Scene) -> list[list[Blow]]:
    """Every call outside saves: while the run opens and says how it stands, while it writes `best/`, `final/` and its
    books."""
    parts = [
        [(name, how) for name in calls_of(scene, making) for how in _ways(name)]
        for making in ("the start", "best", "final")
    ]
    return [[blow for blow in chain if blow is not None] for chain in zip_longest(*parts)]


def _ways(name: str) -> tuple[str, ...]:
    return ("before", "half", "after") if name.startswith("write") else ("before", "after")


def _step(number: int) -> str:
    return f"step-{number:08d}"


def calls_of_save(scene: Scene, step: int, all_tensors: bool = False) -> list[str]:
    """Of many tensors in a file the first three and the tenth will do, unless all are wanted."""
    names = calls_of(scene, _step(step))
    if all_tensors:
        return names
    tensors = [name for name in names if name.startswith("write") and ".safetensors" in name]
    return [name for name in names if name not in tensors or name.split()[2] in ("1", "2", "3", "10")]


def failing_saves(scene: Scene, saves: tuple[int, ...] = (4, 8, 12, 16)) -> list[dict[str, str]]:
    """Every call of a save that the disk can refuse, for each reason it may have; several saves of a run fail."""
    names = [name for name in calls_of_save(scene, 6) if not name.startswith("remove_folder")]
    blows = [(name, why) for name in names for why in TROUBLE]
    return [
        {name.replace(_step(6), _step(step)): why for step, (name, why) in zip(saves, blows[at:], strict=False)}
        for at in range(0, len(blows), len(saves))
    ]


def strike(journey: Journey, chain: list[Blow]) -> None:
    """One call of the run after another, each killed at its blow, then to the end."""
    for name, how in chain:
        outcome = journey.call(blows={name: how})
        if not outcome.killed:  # how often the status is written depends on when a save beside it has ended
            assert outcome.code == 0 and re.match(r"\w+ (\.status\.json\.PID|\.) ", name), f"{name} never came"
            break
    journey.finish()


def random_moment(journey: Journey, chance: Random) -> dict[str, Any]:
    """When to kill: at any time, soon after a certain step was told, or when the last one was."""
    scene, done = journey.scene, journey.newest_good()
    kind = "any" if done == scene.total else chance.choice(("any", "any", "step", "step", "end"))
    if kind == "any":
        left = 1 - done / scene.total
        return {"kill_after": chance.uniform(0, scene.seconds * (0.4 + 0.6 * left))}
    if kind == "step":
        nearest = chance.randint(done + 1, min(done + 6, scene.total))
        return {"kill_at_step": nearest, "kill_after": chance.uniform(0, 0.06)}
    return {"kill_at_step": scene.total, "kill_after": chance.uniform(0, 1.2 * scene.tail)}


def harry(journey: Journey, chance: Random, most: int) -> int:
    """Kills the run at random moments until it is done all the same, at most so often. Returns how many it took."""
    kills = 0
    while kills < most:
        outcome = journey.call(**random_moment(journey, chance))
        if not outcome.killed:
            assert outcome.code == 0, outcome.complained
            break
        kills += 1
    journey.finish()
    return kills
