"""Following a run on a box: all that its phases write, in order, and a box that waits instead of a laptop that asks."""

from __future__ import annotations

import pytest

from sojourn.remote.follow import Follower
from sojourn.remote.hosts import Host


class Box:
    """Logs by name; `asked`: which log, and for how many seconds the box was to wait."""

    def __init__(self, **logs: bytes) -> None:
        self.logs, self.asked = logs, []

    def tail(self, path: str, offset: int, wait: float = 0.0) -> bytes:
        name = path.rpartition("/")[2].removesuffix(".log")
        self.asked.append((name, wait))
        return self.logs.get(name, b"")[offset : offset + 4]


def follower(box: Box) -> tuple[Follower, list[bytes]]:
    shown: list[bytes] = []
    return Follower(box, Host("box", "root", "127.0.0.1", 22), "run", shown.append), shown  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", ["prepare", "rehearse", "train", "own", ""])
def test_in_every_phase_the_box_is_asked_to_wait(phase: str) -> None:
    """Else the laptop would ask again at once, hundreds of times a second."""
    box = Box()
    follower(box)[0].show_new(phase, wait=2.0)
    assert [name for name, wait in box.asked if wait == 2.0] == [phase or "train"]


def test_what_is_there_is_shown_at_once_and_only_once() -> None:
    box = Box(prepare=b"tokens", train=b"step 1\nstep 2\n")
    one, shown = follower(box)
    one.show_new("train", wait=2.0)
    assert b"".join(shown) == b"tokensstep 1\nstep 2\n"
    assert sum(wait for _, wait in box.asked) == 2.0
    one.show_new("train")
    assert b"".join(shown) == b"tokensstep 1\nstep 2\n"
