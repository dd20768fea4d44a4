"""The planner's worker pool: cases run in parallel, one at a time is timed alone, and none stays stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.planner import child
from benchmarks.planner.child import Task
from benchmarks.planner.process import Need
from benchmarks.planner.protocol import ASK, DONE, GO, LEAVE, READY, Line
from benchmarks.planner.worker_pool import WorkerPool

from fork_server import needs_fork

_NONE = Need()
pytestmark = pytest.mark.slow  # only benchmarks/ uses it


def _state(pid: int) -> str:
    """A letter: T is stopped, Z has ended; empty: gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _wait(path: Path) -> str:
    until = time.monotonic() + 30
    while not path.is_file() and time.monotonic() < until:
        time.sleep(0.005)
    return path.read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)


def _turn(line: Line, task: Task, work=lambda: {}) -> None:
    """The protocol at the end of a case."""
    line.say(ASK)
    line.wait_for(GO)
    _write(Path(task.out), json.dumps({"measured": work()}))
    line.say(DONE)
    line.wait_for(LEAVE)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs cases by name and returns what each measured, in the order in which they ended."""

    def go(works, limit=60.0, room=0, jobs=4, need=_NONE, **named):
        monkeypatch.setattr(child, "work", lambda task, line: works[task.name](line, task))
        names = {
            name: Task(name, {}, "", str(tmp_path / f"{name}.json"), str(tmp_path / f"{name}.log")) for name in works
        }
        results = {}
        tasks = [(task, need) for task in names.values()]
        WorkerPool(forks=True).run(
            tasks, lambda task, found: results.setdefault(task.name, found["measured"]), room, jobs, limit, **named
        )
        return results

    return go


def test_all_other_cases_are_stopped_while_one_is_timed(run, tmp_path):
    def timed(line, task):
        pids = [int(pid) for pid in _wait(tmp_path / "pids").split()]

        def work():
            began = time.monotonic()
            time.sleep(0.5)
            return {"began": began, "ended": time.monotonic(), "states": [_state(pid) for pid in pids]}

        _turn(line, task, work)

    def busy(line, task):
        with subprocess.Popen(["sleep", "60"]) as started:
            _write(tmp_path / "pids", f"{os.getpid()} {started.pid}")
            ticks = []
            while not (tmp_path / "timed.json").is_file() or time.monotonic() < ticks[-1] + 0.05:
                ticks.append(time.monotonic())
                time.sleep(0.002)
            started.kill()
        _turn(line, task, lambda: {"ticks": ticks})

    results = run({"timed": timed, "busy": busy})
    assert list(results) == ["timed", "busy"] and results["timed"]["states"] == ["T", "T"]
    ticks, began, ended = results["busy"]["ticks"], results["timed"]["began"], results["timed"]["ended"]
    assert not [tick for tick in ticks if began < tick < ended] and ticks[0] < began
    assert results["timed"]["quiet"] >= 0.5


def test_a_case_that_is_killed_or_hangs_does_not_block_the_others(run):
    def killed(line, task):
        _turn(line, task, lambda: os.kill(os.getpid(), signal.SIGKILL))

    results = run(
        {"killed": killed, "idle": lambda line, task: time.sleep(60), "good": _turn, "gone": lambda *given: None}, 1.0
    )
    assert results["killed"]["failed"] == "ended with -9: nothing said"
    assert results["gone"]["failed"] == "ended with 0: nothing said"
    assert results["idle"]["failed"] == "took longer than 1 s" and "failed" not in results["good"]
    assert list(results)[-1] == "idle"


def test_a_case_that_hangs_while_it_is_timed_is_killed_and_the_next_is_timed(run):
    results = run({"hangs": lambda line, task: _turn(line, task, lambda: time.sleep(60)), "good": _turn}, 1.0)
    assert results["hangs"]["failed"] == "took longer than 1 s" and "failed" not in results["good"]


def test_time_while_stopped_does_not_count_against_the_limit(run, tmp_path):
    def slow(line, task):
        for _ in range(100):  # one long sleep would go on while it is stopped
            time.sleep(0.01)
        _turn(line, task)

    results = run({"long": lambda line, task: _turn(line, task, lambda: time.sleep(2.0) or {}), "slow": slow}, 2.5)
    assert "failed" not in results["slow"] and results["slow"]["seconds"] > 0.9


def test_only_as_many_cases_run_in_parallel_as_memory_allows(run, tmp_path):
    def alone(line, task):
        (tmp_path / task.name).touch()
        _turn(line, task, lambda: {"seen": len(list(tmp_path.glob("case-?")))})

    cases = {f"case-{letter}": alone for letter in "abcd"}
    results = run(cases, room=100, need=Need(60, 60))
    assert [found["seen"] for found in results.values()] == [1, 2, 3, 4]  # no two fit together
    assert run(cases, room=100, need=Need(60, 60), until=time.monotonic()) == {}  # and none begins when time is up


def test_memory_for_whole_steps_is_given_to_one_case_at_a_time_and_waiting_does_not_count(run, tmp_path):
    def case(line, task):
        (tmp_path / task.name).touch()
        for name in ("one", "two"):
            _wait(tmp_path / name)  # both are there at once
        line.say(READY)
        line.wait_for(GO)
        began = time.monotonic()
        time.sleep(0.8)
        _turn(line, task, lambda: {"began": began, "ended": time.monotonic()})

    results = list(run({"one": case, "two": case}, limit=1.5, room=100, need=Need(10, 80)).values())
    assert len(results) == 2 and not any("failed" in found for found in results)
    assert results[1]["began"] > results[0]["ended"] and results[1]["seconds"] < 1.5


def test_a_case_that_ran_out_of_memory_beside_others_is_run_again_alone(run, tmp_path):
    def short(line, task):
        again = (tmp_path / "tried").is_file()
        (tmp_path / "tried").touch()
        if again:
            return _turn(line, task)
        _wait(tmp_path / "there")
        return _write(Path(task.out), json.dumps({"measured": {"failed": "…", "out_of_memory": True}}))

    def other(line, task):
        (tmp_path / "there").touch()
        _wait(tmp_path / "short.json")
        time.sleep(0.3)
        _turn(line, task)

    results = run({"short": short, "other": other}, room=100, need=Need(10, 20))
    assert list(results) == ["other", "short"] and "failed" not in results["short"]


ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))}
_STOPPABLE = """
import os, sys, time
from pathlib import Path
from benchmarks.planner import child, measure
from benchmarks.planner.worker_pool import WorkerPool
from benchmarks.planner.protocol import ASK, GO

def work(task, line):
    (folder / f"{task.name}.pid").write_text(str(os.getpid()))
    if task.name == "tiny-whole":
        while len(list(folder.glob("*.pid"))) < 2:
            time.sleep(0.01)
        line.say(ASK)
        line.wait_for(GO)
        (folder / "quiet").touch()
    time.sleep(600)

folder = Path(sys.argv[1])
child.work, measure.make_pool = work, lambda *given: WorkerPool(forks=True)
plan = measure.make_plan(["tiny-whole,tiny-pretrain"], None, 4, 60.0, None, True, False, folder, None, None)
measure.measure(plan, print)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_case_is_left_however_the_command_ends(tmp_path, number):
    with subprocess.Popen(
        [sys.executable, "-c", _STOPPABLE, str(tmp_path)], stderr=subprocess.DEVNULL, env=ENVIRONMENT
    ) as command:
        _wait(tmp_path / "quiet")
        pids = {path.stem: int(path.read_text()) for path in tmp_path.glob("*.pid")}
        assert _state(pids["tiny-pretrain"]) == "T" != _state(pids["tiny-whole"])
        command.send_signal(number)
        assert command.wait(20) != 0
    until = time.monotonic() + 10
    while any(_state(pid) not in ("", "Z") for pid in pids.values()) and time.monotonic() < until:
        time.sleep(0.01)
    assert all(_state(pid) in ("", "Z") for pid in pids.values())


_SPAWNED = """
import sys
from pathlib import Path
from benchmarks.planner import measure
from benchmarks.planner.worker_pool import WorkerPool

measure.make_pool = lambda *given: WorkerPool(forks=False, why="a test")
plan = measure.make_plan(["tiny-pretrain"], None, 4, 60.0, None, True, False, Path(sys.argv[1]), None, None)
row = measure.measure(plan, print)["rows"][0]["measured"]
assert row["step_seconds"] > 0 and row["quiet"] > 0, row
"""


@needs_fork
@pytest.mark.parametrize("really", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forked", "new"])
def test_without_fork_each_case_starts_its_own_python(tmp_path, fork_server, really):
    """Forked: the Python that is started is a fork of the fork server, as if it were new."""
    command = [sys.executable, "-c", _SPAWNED, str(tmp_path)]
    with (tmp_path / "said").open("w+") as said:
        code = fork_server.popen(command, said, subprocess.STDOUT, ENVIRONMENT, fork_children=not really).wait()
        assert code == 0 and "each case starts a Python of its own" in (text := said.read()), text
