"""Runs of two ranks, DDP and FSDP, of which one or both are killed at random moments, again and again."""

from __future__ import annotations

import shutil
import signal
import socket
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from fork_server import Child
from kill.killed_run import Reference, least_seconds, needs_fork, weights_of
from kill.train_call import TrainCall
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json, read_json_lines

pytestmark = needs_fork

KILLS = 25  # a test
_END = 15.0  # seconds after which the other rank is killed, as torchrun does


def _start(reference: Reference, args: list[str], name: str) -> list[Child]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = reference.home
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        TrainCall([*args, f"name={name}"], str(home), str(home / "runs" / name), str(_log(reference, name, rank)))
        .start(reference.fork_server, RANK=str(rank), LOCAL_RANK=str(rank), **common)
        for rank in range(2)
    ]  # fmt: skip


def _log(reference: Reference, name: str, rank: int) -> Path:
    return reference.home / f"log-{name}-{rank}"


def _end_others(children: list[Child]) -> None:
    until = time.monotonic() + _END
    while any(child.poll() is None for child in children):
        if time.monotonic() > until:
            for child in children:
                child.kill()
        time.sleep(0.01)


def _finish(reference: Reference, args: list[str], name: str) -> float:
    began, children = time.monotonic(), _start(reference, args, name)
    codes = [child.wait() for child in children]
    assert codes == [0, 0], "\n".join(child.stdout[-2000:] + child.stderr for child in children)
    return time.monotonic() - began


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("method", ["pretrain", "lora"])
def test_killed_ranks_change_nothing(references, tell, method, engine):
    reference, rng = references(method), Random(f"ranks {method} {engine}")
    home, whole, args = reference.home, f"ranks-{engine}", [*reference.args, f"parallel.engine={engine}"]
    _finish(reference, args, whole)
    seconds = _finish(reference, args, f"{whole}-again")
    expected = weights_of(RunFolder(home / "runs" / whole))
    assert weights_of(RunFolder(home / "runs" / f"{whole}-again")) == expected
    kills, runs, where = 0, 0, Counter()
    while kills < KILLS:
        name = f"{whole}-{runs}"
        run, used = RunFolder(home / "runs" / name), 0.0
        for _ in range(6):
            began, children = time.monotonic(), _start(reference, args, name)
            time.sleep(rng.uniform(0, 1.2 * seconds))
            victims = rng.choice(([children[0]], [children[1]], children))
            alive = [child for child in victims if child.poll() is None]
            for child in alive:
                child.send_signal(signal.SIGKILL)
            _end_others(children)
            for child in children:
                assert "Traceback" not in child.stderr, child.stderr
            used += time.monotonic() - began
            if not alive:
                break
            kills += len(alive)
            where["both ranks" if len(alive) == 2 else f"rank {children.index(alive[0])}"] += 1
        used += _finish(reference, args, name)
        assert weights_of(run) == expected
        assert run.status().state == "done"
        least = least_seconds(read_json_lines(_log(reference, name, 0)))  # rank 0 writes the ledger
        assert least <= read_json(run.ledger)["seconds"] <= used + 1
        runs += 1
        shutil.rmtree(run.path)
    tell(method=method, trouble=f"kills of ranks ({engine})", times=kills, runs=runs, where=where)
