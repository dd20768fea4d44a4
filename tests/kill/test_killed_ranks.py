"""Runs of two ranks, DDP and FSDP, of which one or both are killed at random moments, again and again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from fork_server import Child, ForkServer
from kill.killed_run import Reference, needs_fork, weights_of
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json

pytestmark = needs_fork

KILLS = 25  # a test
_END = 15.0  # seconds after which the other rank is killed, as torchrun does


def _start(server: ForkServer, args: list[str], home: Path) -> list[Child]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "SOJOURN_HOME": str(home), "TOKENIZERS_PARALLELISM": "false", "WORLD_SIZE": "2",
              "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    envs = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return [server.start("train", *args, env=env, cwd=str(home)) for env in envs]


def _end_others(children: list[Child]) -> float:
    """When rank 0, which writes the ledger, had ended."""
    until, ended = time.monotonic() + _END, None
    while any(child.poll() is None for child in children):
        if ended is None and children[0].poll() is not None:
            ended = time.monotonic()
        if time.monotonic() > until:
            for child in children:
                child.kill()
        time.sleep(0.01)
    return ended or time.monotonic()


def _finish(server: ForkServer, args: list[str], home: Path) -> float:
    began, children = time.monotonic(), _start(server, args, home)
    codes = [child.wait() for child in children]
    assert codes == [0, 0], "\n".join(child.stdout[-2000:] + child.stderr for child in children)
    return time.monotonic() - began


def _args(reference: Reference, engine: str, name: str) -> list[str]:
    return [*reference.args, f"parallel.engine={engine}", f"name={name}"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("method", ["pretrain", "lora"])
def test_killed_ranks_change_nothing(references, tell, method, engine):
    reference, rng = references(method), Random(f"ranks {method} {engine}")
    server, home, whole = reference.fork_server, reference.home, f"ranks-{engine}"
    _finish(server, _args(reference, engine, whole), home)
    seconds = _finish(server, _args(reference, engine, f"{whole}-again"), home)
    expected = weights_of(RunFolder(home / "runs" / whole))
    assert weights_of(RunFolder(home / "runs" / f"{whole}-again")) == expected
    kills, runs, where = 0, 0, Counter()
    while kills < KILLS:
        name = f"{whole}-{runs}"
        args, run, used, lived = _args(reference, engine, name), RunFolder(home / "runs" / name), 0.0, 0.0
        for _ in range(6):
            began, children = time.monotonic(), _start(server, args, home)
            time.sleep(rng.uniform(0, 1.2 * seconds))
            victims = rng.choice(([children[0]], [children[1]], children))
            alive = [child for child in victims if child.poll() is None]
            for child in alive:
                child.send_signal(signal.SIGKILL)
            lived += max(0.0, _end_others(children) - began - 1)
            for child in children:
                assert "Traceback" not in child.stderr, child.stderr
            used += time.monotonic() - began
            if not alive:
                break
            kills += len(alive)
            where["both ranks" if len(alive) == 2 else f"rank {children.index(alive[0])}"] += 1
        last = _finish(server, args, home)
        used, lived = used + last, lived + max(0.0, last - 1)
        assert weights_of(run) == expected
        assert run.status().state == "done" and lived <= read_json(run.ledger)["seconds"] <= used + 1
        runs += 1
        shutil.rmtree(run.path)
    tell(method=method, trouble=f"kills of ranks ({engine})", times=kills, runs=runs, where=where)
