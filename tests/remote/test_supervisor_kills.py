"""Random SIGKILLs of supervisor, shim and trainer over every phase of a job; every Python that a box may have."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.remote.box import supervisor
from supervised_job import SupervisedJob, supervised_job

PHASE = """
import fcntl, os, sys, time
from pathlib import Path
run, name = Path(os.environ["RUN"]), sys.argv[1]
run.mkdir(parents=True, exist_ok=True)
held = open(run / "lock", "a")
try:
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    (run / "two-at-once").touch()
steps = run / f"{name}-steps"
done = len(steps.read_text().splitlines()) if steps.exists() else 0
for step in range(done, 10):
    with open(steps, "a") as file:
        file.write(f"{step}\\n")
    (run / ".status").write_text('{"state": "running", "step": %d, "total_steps": 10}' % step)
    os.replace(run / ".status", run / "status.json")
    time.sleep(0.05)
if name == "train":
    (run / ".status").write_text('{"state": "done", "step": 10, "total_steps": 10, "updated": %r}' % time.time())
    os.replace(run / ".status", run / "status.json")
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SupervisedJob]:
    with supervised_job(tmp_path / "home", max_restarts=1000) as made:
        yield made


def victims(job: SupervisedJob) -> dict[str, int]:
    records = {"supervisor": job.record("supervisor"), "shim": job.record("shim")}
    found = {name: record["pid"] for name, record in records.items() if supervisor.lives(record)}
    trainers = supervisor.processes_of(job.folder)
    return {**found, **({"trainer": trainers[0]} if trainers else {})}


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_killed_and_whenever_the_job_ends_done(job: SupervisedJob, seed: int) -> None:
    """One process at a time is killed; where all are gone at once the job is started again, as a user would."""
    chance = random.Random(seed)
    program = job.home / "phase.py"
    program.write_text(PHASE)
    names = ("prepare", "train")
    job.spec["phases"] = [
        {"name": name, "argv": [shutil.which("python3"), str(program), name], "restart": True} for name in names
    ]
    began, kills = time.monotonic(), 0
    job.start()
    while (status := job.status())["state"] not in supervisor.TERMINAL:
        assert time.monotonic() - began < 240, (status, job.log("supervisor"))
        time.sleep(chance.uniform(0, 0.6))
        if status["state"] == "lost" and not victims(job):
            job.start()
        alive = victims(job)
        if alive and kills < 12:
            with contextlib.suppress(ProcessLookupError):
                os.kill(alive[chance.choice(sorted(alive))], signal.SIGKILL)
            kills += 1
    elapsed = time.monotonic() - began
    assert job.status()["state"] == "done", job.log("supervisor")
    assert not (job.run / "two-at-once").exists()
    for name in names:
        assert (job.run / f"{name}-steps").read_text().split() == [str(step) for step in range(10)]
    assert job.status()["seconds"] <= elapsed + 0.02
    job.until(lambda: not victims(job), "the end of all processes")


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13"])
def test_every_python_of_a_box_runs_it(job: SupervisedJob, version: str) -> None:
    python = shutil.which(f"python{version}")
    works = python and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0
    if not works:
        pytest.skip(f"there is no python{version} here")
    job.phases("steps:2", "checkpoint:2", "final", "done").write_spec()
    argv = [str(python), supervisor.__file__, "start", str(job.folder)]
    pid = int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    job.until_supervisor(other_than=0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    status = job.until_state("done", "failed", "lost")
    if status["state"] == "lost":  # it was killed before it had started anything
        subprocess.run(argv, check=True)
        status = job.until_state("done", "failed")
    assert (status["state"], status["verified"]) == ("done", True), job.log("supervisor")
    assert "Traceback" not in job.log("supervisor")
