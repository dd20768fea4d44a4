"""The supervisor, in cases that take longer: damaged files, GPU errors of every kind, ends cut short, a real run."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervised_job import SupervisedJob, supervised_job, tool


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SupervisedJob]:
    with supervised_job(tmp_path / "home") as made:
        yield made


SMI = """import json, os, sys
folder = os.path.dirname(os.path.abspath(__file__))
gpu = json.load(open(folder + "/gpu.json"))
print(gpu["text"])
sys.exit(gpu.get("code", 0))
"""


@pytest.mark.parametrize("name", ["status.json", "state.json", "spec.json", "supervisor.json", "shim.json"])
@pytest.mark.parametrize("content", [b"", b'{"state": "run', b"[]"], ids=["empty", "cut", "list"])
def test_a_damaged_file_and_a_killed_supervisor_do_not_disturb_the_trainer(
    job: SupervisedJob, name: str, content: bytes
) -> None:
    job.phases("wait:go", "steps:2", "final", "done")
    pid = job.start()
    job.until_trainer()
    job.until(lambda: job.status().get("seconds", 0) > 0.3)
    os.kill(pid, signal.SIGKILL)
    (job.folder / name).write_bytes(content)
    job.until_supervisor(other_than=pid)
    job.let("go")
    status = job.until_state("done")
    assert job.attempts() == 1
    assert status["seconds"] > 0.3


def test_a_trainer_that_computes_silently_is_not_stalled(job: SupervisedJob) -> None:
    job.spec["stall_minutes"] = 0.5 / 60
    code = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass"
    job.spec["phases"] = [{"name": "train", "argv": [sys.executable, "-c", code], "restart": True}]
    job.start()
    assert job.until_state("done")["restarts"] == 0


def test_nvidia_smi_that_never_worked_is_no_gpu_error(job: SupervisedJob, tmp_path: Path) -> None:
    tool(tmp_path / "tools", "nvidia-smi", "import sys; print('No devices were found'); sys.exit(6)")
    job.phases("wait:go", "final")
    job.start(env={**os.environ, "PATH": f"{tmp_path / 'tools'}:{os.environ['PATH']}"})
    job.until_trainer()
    time.sleep(0.6)
    job.let("go")
    job.until_state("done")


@pytest.mark.parametrize(
    ("before", "after", "code", "message"),
    [
        ("00000000:01:00.0, 97, 0", "Unable to determine the device handle: GPU is lost.", 15, "GPU is lost"),
        ("00000000:01:00.0, 97, 1", "00000000:01:00.0, 97, 2", 0, "rose from 1 to 2"),
        ("00000000:01:00.0, 97, 0\n00000000:02:00.0, 9, 0", "00000000:02:00.0, 9, 0", 0, "no longer lists"),
        ("00000000:01:00.0, 97, [N/A]", "Failed to initialize NVML: Unknown Error", 255, "failed 3 times"),
    ],
)
def test_a_broken_gpu_ends_the_job_without_a_restart(
    job: SupervisedJob, tmp_path: Path, before: str, after: str, code: int, message: str
) -> None:
    tools = tmp_path / "tools"
    tool(tools, "nvidia-smi", SMI)
    gpu = tools / "gpu.json"
    gpu.write_text(json.dumps({"text": before}))
    job.phases("print:ready", "hang")
    job.start(env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"})
    job.until(lambda: "ready" in job.log())
    time.sleep(0.5)  # the first reading is what later ones are compared with
    (tools / "new.json").write_text(json.dumps({"text": after, "code": code}))
    (tools / "new.json").replace(gpu)
    status = job.until_state("failed")
    assert (status["reason"], status["resumable"], status["restarts"]) == ("gpu", True, 0)
    assert message in status["message"]
    assert "saved at SIGTERM" in job.log()


def test_a_supervisor_killed_with_its_trainer_is_revived_and_starts_another(job: SupervisedJob) -> None:
    job.phases("wait:go", "final")
    pid, trainer = job.start(), job.until_trainer()
    os.kill(pid, signal.SIGKILL)
    os.kill(trainer, signal.SIGKILL)
    job.until(lambda: job.attempts() == 2)
    job.let("go")
    job.until_state("done")


def test_progress_gives_a_crashing_trainer_new_restarts(job: SupervisedJob) -> None:
    job.spec["max_restarts"] = 1
    job.phases("resume", "steps:5", "first:3/1", "final")
    job.start()
    assert job.until_state("done")["restarts"] == 3


def test_a_box_where_another_run_trains_stays_on(job: SupervisedJob, tmp_path: Path) -> None:
    tool(tmp_path / "tools", "poweroff", f"open({str(tmp_path / 'off')!r}, 'a').write('off')")
    job.spec.update(
        platform="autodl", disks=[{"path": "/", "survives": "stop"}],
        stop={"when_done": True, "action": "power_off", "command": [str(tmp_path / "tools/poweroff")]},
    )  # fmt: skip
    with supervised_job(job.home, "other") as other:
        other.phases("hang").start()
        other.until_trainer()
        job.phases("final", "done").start()
        assert "other still runs on this box" in job.until_state("done")["stop_action"]
    assert not (tmp_path / "off").exists()


def test_a_supervisor_killed_at_the_end_is_revived_and_finishes_it(job: SupervisedJob, tmp_path: Path) -> None:
    tool(tmp_path / "tools", "poweroff", f"open({str(tmp_path / 'off')!r}, 'a').write('off')")
    job.spec.update(
        platform="autodl", disks=[{"path": "/", "survives": "stop"}],
        stop={"when_done": True, "action": "power_off", "command": [str(tmp_path / "tools/poweroff")]},
    )  # fmt: skip
    job.phases("final", "done").write_spec()
    (job.folder / "attached").touch()
    pid = job.start()
    job.until_state("holding")
    os.kill(pid, signal.SIGKILL)
    job.until_supervisor(other_than=pid)
    job.until_state("holding")
    (job.folder / "pulled").touch()
    assert job.until_state("done")["stop_action"] == "done"
    assert job.attempts() == 1


def test_a_trainer_that_stops_at_its_own_limit_is_stopped_and_resumes(job: SupervisedJob) -> None:
    job.phases("first:1/3", "final")
    job.start()
    status = job.until_state("stopped")
    assert (status["reason"], status["resumable"], status["exit_code"]) == ("limit", True, 3)
    job.start("--again")
    job.until_state("done")


def test_a_real_run_survives_kills_of_supervisor_and_trainer_and_is_verified(
    words: list[str], home: Path, tmp_path: Path
) -> None:
    with supervised_job(tmp_path / "box") as job:
        mirror = tmp_path / "mirror"
        train = [sys.executable, "-m", "sojourn", "train", *words, "train.steps=30", "save.every_steps=5",
                 f"save.mirror={mirror}"]  # fmt: skip
        job.run = home / "runs/t"
        job.spec.update(
            phases=[{"name": "train", "argv": train, "restart": True}], mirror=str(mirror), run_folder=str(job.run),
            env={"SOJOURN_HOME": str(home)}, home=str(home),
        )  # fmt: skip
        pid = job.start()
        job.until((job.run / "checkpoints/step-00000005").exists, "a checkpoint")
        os.kill(job.record("phase-train")["trainer"]["pid"], signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        status = job.until_state("done", "failed")
        assert (status["state"], status["verified"], status["restarts"]) == ("done", True, 1), status
        assert (status["step"], status["total_steps"]) == (30, 30)
        assert not (job.run / "checkpoints/step-00000031").exists()


def test_an_address_that_never_answers_does_not_hold_up_the_end(job: SupervisedJob) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        (job.folder / "secrets/n").write_text(f"http://127.0.0.1:{silent.getsockname()[1]}/x")
        job.spec.update(notify=[{"kind": "webhook", "secret": "secrets/n"}], notify_seconds=0.3)
        job.phases("final", "done")
        job.start()
        job.until_state("done")
    assert "notification webhook failed: no answer in time" in job.log("supervisor")
