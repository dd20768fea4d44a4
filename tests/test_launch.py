"""`--gpus 0,1` as a user types it: ranks are started, killed, fail, and are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from conftest import called, clean_environment
from fork_server import Child, ForkServer, needs_fork
from sojourn.config.load import load_run
from sojourn.launch import agent as launching
from tiny import Tiny, events, losses, run_of, saved_steps

RUN = ("train.micro_batch=1", "train.steps=14", "save.every_steps=4", "parallel.gpus=0,1")

# Faults, run on every rank before it trains: Python code that knows the rank and the restart count.
_WRONG = """
import os, signal
if "RANK" in os.environ:
    rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    import torch
    from sojourn.train.step import Stepper
    gradients = Stepper.gradients
    def struck(self, batches):
        step = struck.steps = struck.steps + 1
        if rank == 1:
            WRONG
        return gradients(self, batches)
    struck.steps = 0
    Stepper.gradients = struck
"""


def _start(fork_server: ForkServer, words: list[str], wrong: str = "pass") -> Child:
    """torchrun's own agent, which starts the ranks as its children."""
    return fork_server.start("train", *words, preamble=_WRONG.replace("WRONG", wrong), fork_children=True)


_FULL = "if start == 0 and step == 6: raise torch.OutOfMemoryError('CUDA out of memory.')"
_KILLED = "if start == 1 and step == 5: os.kill(os.getpid(), signal.SIGKILL)"


@needs_fork
@pytest.mark.parametrize(
    ("wrong", "starts"),
    [
        pytest.param(_FULL, [0, 4], id="memory"),
        pytest.param(f"{_FULL}\n            {_KILLED}", [0, 4, 8], id="memory, then a kill", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_run_out_of_memory_or_are_killed_restart_and_end_the_same(tiny, fork_server, wrong, starts):
    """On the second of two ranks, with an engine whose ranks cannot agree any more when one fails."""
    words = tiny.words(*RUN, "parallel.engine=fsdp")
    out, err = (process := _start(fork_server, words, wrong)).communicate(timeout=300)
    run = run_of(words)
    assert process.returncode == 0, err
    assert "2 ranks share the cpu" in out and "done: the model is in" in out
    assert [event["restart"] for event in events(run, "restarted")] == list(range(1, len(starts)))
    assert [event["step"] for event in events(run, "start")] == starts
    assert losses(run) == pytest.approx(losses(tiny.whole("train.micro_batch=1", "train.steps=14")), rel=1e-5)
    assert "Traceback" not in err and "rank 1: step 6: out of memory (CUDA out of memory.)" in err
    assert "restarted after a rank had ended (restart 1)" in out
    assert (run.logs / "process-1.log").is_file() and "Traceback" in (run.logs / "process-1.log").read_text()


@needs_fork
def test_a_rank_that_fails_ends_all_with_its_own_traceback_and_nothing_restarts(tiny, fork_server):
    words = tiny.words(*RUN)
    out, err = (process := _start(fork_server, words, "if step == 3: nonsense = {}['missing']")).communicate(
        timeout=300
    )
    assert process.returncode == 1
    assert "sojourn: rank 1: Traceback" in err and "KeyError: 'missing'" in err
    assert "KeyError" in err.split("Traceback", 2)[1], "the first traceback is that of the one that failed"
    assert "began again" not in out and run_of(words).status().resumable


@needs_fork
@pytest.mark.parametrize(
    ("how", "new_pythons"),
    [
        pytest.param("Ctrl-C", False, id="Ctrl-C"),
        pytest.param("Ctrl-C", True, id="Ctrl-C, every rank a new Python", marks=pytest.mark.slow),
        pytest.param("kill -9 of the one that started them", True, id="kill -9", marks=pytest.mark.slow),
    ],
)
def test_what_stops_the_command_stops_and_saves_its_ranks(tiny, fork_server, how, new_pythons):
    words = tiny.words(*RUN, "train.steps=5000", "save.every_steps=null")
    pipe, env = subprocess.PIPE, {**clean_environment(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sojourn", "train", *words]
    if new_pythons:
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env)
    else:
        process = fork_server.start("train", *words, env=env, fork_children=True)
    run = run_of(words)
    while len(run.read_metrics()) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    process.send_signal(signal.SIGINT if how == "Ctrl-C" else signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    if how == "Ctrl-C":
        assert process.returncode == 3 and err.count("\n") == 1 and "stopped by Ctrl-C at step" in err
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    step = run.status().step
    assert run.status().state == "stopped" and run.status().resumable and saved_steps(run) == [step] and step >= 3


@needs_fork
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2], ids=lambda number: number.name)
def test_a_warning_of_slurm_to_the_launcher_saves_and_stops_its_ranks(tiny, fork_server, number):
    words = tiny.words(*RUN, "train.steps=5000", "save.every_steps=null")
    process, run = _start(fork_server, words), run_of(words)
    while len(run.read_metrics()) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 3 and err.count("\n") == 1 and f"stopped by {number.name} at step" in err, err
    assert run.status().state == "stopped" and saved_steps(run) == [run.status().step]


@needs_fork
def test_a_second_ctrl_c_to_the_launcher_leaves_without_a_traceback(tiny, fork_server):
    words = tiny.words(*RUN, "train.steps=5000")
    slow = (
        "import time\nfrom sojourn.train.checkpoint.saving import Saver\nSaver.save = lambda *_, **__: time.sleep(600)"
    )
    process = fork_server.start("train", *words, preamble=slow, fork_children=True)
    run = run_of(words)
    while not any(line["step"] >= 3 for line in run.read_metrics()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130 and "Traceback" not in err and "interrupted" in err, err


# A worker whose launcher, torchrun, dies of a signal that it does not know.
_ORPHANED = """
import os, signal, sys, time
from sojourn.launch.worker import worker_process
started, ready = os.pipe()
if os.fork():
    os.read(started, 1)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(60)
def stopped(*_):
    open(sys.argv[1], "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, stopped)
os.environ.update(RANK="0", WORLD_SIZE="2")
with worker_process():
    os.write(ready, b"x")
    time.sleep(60)
"""


@needs_fork
def test_ranks_stop_when_torchrun_is_gone(fork_server, tmp_path):
    signalled = tmp_path / "signalled"
    with (tmp_path / "said").open("w") as said:
        command = [sys.executable, "-c", _ORPHANED, str(signalled)]
        launcher = fork_server.popen(command, said, subprocess.STDOUT, dict(os.environ))
    assert launcher.wait() == -signal.SIGUSR1
    until = time.monotonic() + 60
    while not signalled.exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_cannot_be_launched_is_refused_before_anything_starts(tiny: Tiny, tmp_path: Path) -> None:
    for extra, message in (
        (("train.global_batch=1",), "1 rows cannot be shared by 2 ranks"),
        (("parallel.nodes=2",), "2 machines need parallel.master=HOST"),
        (("parallel.nodes=2", "parallel.master=nowhere.invalid"), "nowhere.invalid cannot be reached from here"),
        (("parallel.nodes=2", "parallel.master=x", "parallel.node=2"), "2 machines are counted from 0"),
    ):
        result = called("train", *tiny.words(*RUN, *extra))
        assert result.returncode == 2 and result.stderr.count("\n") == 1 and message in result.stderr, result


@pytest.mark.slow
def test_a_run_of_several_ranks_is_rehearsed_and_verified_by_them(tiny):
    words = tiny.words("train.micro_batch=1", "parallel.gpus=0,1", "parallel.engine=fsdp")
    command = [sys.executable, "-m", "sojourn"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    tried = subprocess.run([*command, "rehearse", *words], capture_output=True, text=True, env=env, check=False)
    assert tried.returncode == 0 and "ready: sojourn train" in tried.stdout and "ok   checkpoint" in tried.stdout, tried
    full = [*command, "rehearse", *words, "save.min_free=100TiB"]
    refused = subprocess.run(full, capture_output=True, text=True, env=env, check=False)
    assert refused.returncode == 1 and refused.stderr.count("this run should not start") == 1, refused
    proved = subprocess.run(
        [*command, "verify-resume", *words, "--steps", "40"], capture_output=True, text=True, env=env, check=False
    )
    assert proved.returncode == 0 and "the same weights, bit for bit" in proved.stdout, proved
    assert not list((tiny.home / "runs").glob(".rehearsal*"))


def test_a_launch_leaves_nothing_in_the_environment_of_this_process(tiny, monkeypatch):
    seen = []
    monkeypatch.setattr(launching, "_run_agent", lambda config, args: seen.append(os.environ[launching.VERDICT]))
    for _ in range(2):
        assert launching.launch(load_run(tiny.words(*RUN)).config, ["train"], 2) == 0
        assert launching.VERDICT not in os.environ
    assert len(set(seen)) == 2 and not any(Path(path).parent.exists() for path in seen)
