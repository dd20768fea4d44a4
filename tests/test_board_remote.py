"""The board and runs on hosts, with a real sshd."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from plain_sshd import PlainSshd, needs_sshd, plain_sshd
from sojourn.board import live_runs, remote_copies
from sojourn.board.live_runs import LiveRuns
from sojourn.board.remote_copies import RemoteCopies
from sojourn.board.series import RunSeries
from sojourn.remote.hosts import Host, save_host
from sojourn.remote.job import BoxPaths

pytestmark = needs_sshd


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainSshd]:
    with plain_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def host(sshd: PlainSshd, monkeypatch: pytest.MonkeyPatch, home: Path) -> Host:
    monkeypatch.setenv("SOJOURN_CONFIG", str(sshd.config))
    made = replace(sshd.host, name="box", home=str(home / "there"))
    save_host(made, replace=True)
    return made


def _wait(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)
    assert condition()


def _steps(path: Path) -> list[float]:
    series = RunSeries(path)
    series.update()
    return series.chart("loss", "step", 100)[0]


def _append(path: Path, *steps: int) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps({"time": 1.0, "kind": "train", "step": one, "loss": 2.0}) + "\n" for one in steps)


def test_the_metrics_of_a_run_on_a_host_follow_it_while_somebody_looks(host, home, monkeypatch):
    monkeypatch.setattr(remote_copies, "_SECONDS", 0.1)
    monkeypatch.setattr(remote_copies, "_IDLE_SECONDS", 3.0)
    there = Path(BoxPaths(host, "far").run_folder)
    there.mkdir(parents=True)
    (there / "identity.json").write_text('{"run_id": "a"}')
    (there / "run.yaml").write_text("extends: smoke\n")
    _append(there / "metrics.jsonl", 1, 2)
    copies = RemoteCopies(home / "copies")
    copy = copies.folder_of("box", "far")
    _wait(lambda: _steps(copy.metrics) == [1, 2])
    assert copy.config.read_text() == "extends: smoke\n" and copies.error("box", "far") is None
    _append(there / "metrics.jsonl", 3)
    _wait(lambda: _steps(copies.folder_of("box", "far").metrics) == [1, 2, 3])
    (there / "metrics.jsonl").unlink()  # another run takes the name
    _append(there / "metrics.jsonl", 7)
    (there / "identity.json").write_text('{"run_id": "b"}')
    _wait(lambda: _steps(copies.folder_of("box", "far").metrics) == [7])
    _wait(lambda: not [one for one in threading.enumerate() if one.name == "copy box:far"])  # nobody asks


def test_a_host_that_does_not_answer_is_named_and_nothing_waits(host, home, monkeypatch):
    monkeypatch.setattr(live_runs, "_HOST_PATIENCE", 60.0)  # on a busy machine an answer takes longer than usual
    save_host(replace(host, name="gone", port=1), replace=True)
    runs = LiveRuns([home / "runs"], home / "tags.json")
    assert runs.snapshot()["hosts"] == []  # before any host was asked
    for thread in runs.look_at_hosts():
        thread.join(180)
    states = {one["name"]: one for one in runs.snapshot()["hosts"]}
    assert states["gone"]["state"] == "unreachable" and "gone" in states["gone"]["error"]
    assert states["box"]["state"] == "ok"
    monkeypatch.setattr(remote_copies, "_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(remote_copies, "_IDLE_SECONDS", 5.0)
    copies = RemoteCopies(home / "copies")
    copies.folder_of("gone", "run")
    _wait(lambda: copies.error("gone", "run") is not None)
