"""Which blows fall where: chains of disk calls, each call the last one of a trainer, the next trainer going on to the
next; and random moments."""

from __future__ import annotations

from itertools import zip_longest
from random import Random
from typing import Any

from kill.scene import Journey, Scene

Blow = tuple[str, str]  # a disk call, and how it ends


def calls_of(scene: Scene, making: str) -> list[str]:
    """The disk calls of an undisturbed run while it makes `making`, each name once."""
    return list(dict.fromkeys(name for name in scene.calls if name.endswith(f" of {making}")))


def aimed_at_saves(scene: Scene, saves: tuple[int, int, int] = (6, 8, 10), all_tensors: bool = True) -> list[list[Blow]]:
    """Every call of three consecutive saves that also remove old checkpoints: a kill before it in the first, after it in
    the second, and in the midst of it, where it writes, in the third."""
    chains = []
    for name in _thinned(calls_of(scene, _step(saves[0])), all_tensors):
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


def _thinned(names: list[str], all_tensors: bool) -> list[str]:
    """Of many tensors in a file the first three and the tenth will do."""
    if all_tensors:
        return names
    tensors = [name for name in names if name.startswith("write") and ".safetensors" in name]
    return [name for name in names if name not in tensors or name.split()[2] in ("1", "2", "3", "10")]


def strike(journey: Journey, chain: list[Blow]) -> int:
    """One call of the run after another, each killed at its blow, then to the end. Returns how many were killed."""
    for name, how in chain:
        outcome = journey.call(blows={name: how})
        assert outcome.killed, f"{name} never came: {outcome.said}{outcome.complained}"
    journey.finish()
    return len(chain)


def random_moment(scene: Scene, chance: Random) -> dict[str, Any]:
    """When to kill: at any time, soon after a certain step was told, or when the last one was."""
    kind = chance.choice(("any", "any", "step", "step", "end"))
    if kind == "any":
        return {"kill_after": chance.uniform(0, scene.seconds)}
    if kind == "step":
        return {"kill_at_step": chance.randint(1, scene.total), "kill_after": chance.uniform(0, 0.05)}
    return {"kill_at_step": scene.total, "kill_after": chance.uniform(0, 1.5 * scene.tail)}


def harry(journey: Journey, chance: Random, most: int) -> int:
    """Kills the run at random moments until it is done all the same, at most so often. Returns how many it took."""
    kills = 0
    while kills < most:
        outcome = journey.call(**random_moment(journey.scene, chance))
        if not outcome.killed:
            assert outcome.code == 0, outcome.complained
            break
        kills += 1
    journey.finish()
    return kills
