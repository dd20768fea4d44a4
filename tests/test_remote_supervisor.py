"""The supervisor on a box: real processes, killed one by one and together; limits, GPU errors, disks, the end."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mounts import mounted_tmpfs
from sojourn.remote.box import supervisor
from supervised_job import SupervisedJob, supervised_job, tool

CANARY = "canary-token-5309"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SupervisedJob]:
    with supervised_job(tmp_path / "home") as made:
        yield made


# ------------------------------------------------------------------------------------------------- the course of a job


def test_phases_run_in_order_and_a_second_start_changes_nothing(job: SupervisedJob) -> None:
    (job.folder / "secrets/hf_token").write_text(CANARY)
    job.spec["secret_env_files"] = {"HF_TOKEN_PATH": str(job.folder / "secrets/hf_token")}
    job.spec.update(price_per_hour=3600.0, currency="CNY", spent_before=100.0, seconds_before=50.0)
    prepare = [sys.executable, "-c", "import os; print('prepares with', os.path.exists(os.environ['HF_TOKEN_PATH']))"]
    job.phases("print:\x1b[1mhello\x1b[0m", "wait:go", "steps:3", "checkpoint:3", "final", "done", prepare=prepare)
    pid = job.start()
    job.until_trainer()
    running = job.until(lambda: (status := job.status())["phase"] == "train" and status)
    assert (running["state"], running["pid"]) == ("running", pid)
    assert supervisor.is_alive(running["pid"], running["started"])
    assert job.start() == pid
    job.let("go")
    status = job.until_state("done")
    expected = {
        "exit_code": 0,
        "resumable": False,
        "reason": "",
        "verified": True,
        "stop_action": "none",
        "restarts": 0,
    }
    assert {key: status[key] for key in expected} == expected
    assert (status["step"], status["total_steps"]) == (3, 10)
    assert status["money"] - 100 == pytest.approx(status["seconds"] - 50, abs=0.01)  # 1 CNY a second
    assert job.log("prepare") == "prepares with True\n"
    assert job.record("exit-prepare")["code"] == job.record("exit-train")["code"] == 0
    assert not (job.folder / "secrets").exists()
    assert job.start() == pid
    assert job.attempts() == 1


def test_a_finished_job_starts_again_when_asked_and_its_cost_goes_on(job: SupervisedJob) -> None:
    job.phases("steps:1", "final", "done")
    job.start()
    first = job.until_state("done")["seconds"]
    job.start("--again")
    job.until(lambda: job.attempts() == 2)
    assert job.until_state("done")["seconds"] > first
    job.spec["max_restarts"] = 7  # another specification is another launch
    job.start()
    job.until(lambda: job.attempts() == 3)
    job.until_state("done")


def test_many_starts_at_once_make_one_supervisor_and_one_trainer(job: SupervisedJob) -> None:
    job.phases("wait:go", "final").write_spec()
    argv = [sys.executable, supervisor.__file__, "start", str(job.folder)]
    starts = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    pids = {start.communicate()[0].strip() for start in starts}
    assert len(pids) == 1
    job.until_trainer()
    job.let("go")
    job.until_state("done")
    assert job.attempts() == 1


def test_a_session_that_ends_with_sighup_leaves_everything_running(job: SupervisedJob) -> None:
    job.phases("wait:go", "final").write_spec()
    line = f"{sys.executable} {supervisor.__file__} start {job.folder}; kill -HUP 0"
    done = subprocess.run(
        ["setsid", "--wait", "sh", "-c", line], capture_output=True, text=True, check=False, timeout=60
    )
    pid = int(done.stdout)  # its streams are closed, or this would wait
    os.kill(pid, signal.SIGHUP)
    job.until_trainer()
    assert os.getsid(pid) != os.getsid(0)
    job.let("go")
    assert job.until_state("done")["pid"] == pid


@pytest.mark.parametrize(("sent", "state"), [("SIGHUP", "done"), ("SIGTERM", "stopped")])
def test_a_signal_before_its_pid_is_known_is_not_lost(job: SupervisedJob, sent: str, state: str) -> None:
    job.phases("final").write_spec()
    code = f"""
import os, signal, sys
from pathlib import Path
from sojourn.remote.box import supervisor

write_json = supervisor.write_json

def write_and_get_a_signal(path, *value):
    write_json(path, *value)
    if path.name == "supervisor.json":
        os.kill(os.getpid(), signal.{sent})

supervisor.write_json = write_and_get_a_signal
sys.exit(supervisor.start(Path({str(job.folder)!r})))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert job.until_state("done", "stopped", "lost")["state"] == state


# ------------------------------------------------------------------------------------------------------------ restarts


def test_a_crashed_trainer_is_started_again(job: SupervisedJob) -> None:
    job.phases("first:2/1", "steps:2", "final")
    job.start()
    status = job.until_state("done")
    assert (status["restarts"], job.attempts()) == (2, 3)


def test_crashes_without_a_new_step_end_the_job_and_leave_it_resumable(job: SupervisedJob) -> None:
    job.spec["max_restarts"] = 2
    job.phases("steps:2", "print:boom", "exit:1")
    job.start()
    status = job.until_state("failed")
    assert (status["reason"], status["resumable"], status["exit_code"], job.attempts()) == ("crash", True, 1, 3)
    assert "2 restarts without a new step" in status["message"]
    assert status["message"].endswith("exits with 1")
    assert (job.folder / "secrets").exists()


def test_wrong_input_fails_at_once_with_the_last_line(job: SupervisedJob) -> None:
    job.phases("print:train.steps: -1 is not a number of steps", "print:", "first:9/2")
    job.start()
    status = job.until_state("failed")
    assert (status["reason"], status["exit_code"], job.attempts()) == ("input", 2, 1)
    assert status["message"] == "train.steps: -1 is not a number of steps"


def test_a_program_that_is_not_there_is_said_and_not_tried_again(job: SupervisedJob) -> None:
    job.spec["phases"] = [{"name": "train", "argv": ["/no/such/python"], "restart": True}]
    job.start()
    status = job.until_state("failed")
    assert (status["reason"], status["restarts"]) == ("start", 0)
    assert "/no/such/python: could not be started" in status["message"]


def test_a_failing_phase_ends_the_job_and_the_next_start_skips_what_is_done(job: SupervisedJob) -> None:
    job.phases("final", prepare=["sh", "-c", "echo prepared"])
    job.spec["phases"].insert(1, {"name": "rehearse", "argv": ["sh", "-c", f"echo no; test -e {job.folder}/go"]})
    job.start()
    status = job.until_state("failed")
    assert (status["phase"], status["reason"], status["restarts"]) == ("rehearse", "crash", 0)
    job.let("go")
    job.start("--again")
    job.until_state("done")
    assert job.log("prepare") == "prepared\n"
    assert job.log("rehearse") == "no\nno\n"


# ------------------------------------------------------------------------------------------------------------- stopping


def test_stop_lets_the_trainer_save(job: SupervisedJob) -> None:
    job.phases("steps:2", "hang")
    job.start()
    job.until_trainer()
    assert job.command("stop").returncode == 0
    status = job.until_state("stopped")
    assert (status["reason"], status["exit_code"], status["resumable"]) == ("stop", 3, True)
    assert "saved at SIGTERM" in job.log()
    assert "nothing to stop" in job.command("stop").stdout


def test_a_trainer_that_ignores_sigterm_is_killed_after_the_grace_with_all_it_started(job: SupervisedJob) -> None:
    job.spec["grace_seconds"] = 0.3
    job.phases("ignore_term", "child", "print:ready", "hang")
    job.start()
    job.until_trainer()
    job.until(lambda: "ready" in job.log())
    job.command("stop")
    status = job.until_state("stopped")
    assert (status["reason"], status["exit_code"]) == ("stop", 137)
    assert "without a save" in status["message"]
    assert supervisor.processes_of(job.folder) == []


def test_the_budget_stops_the_trainer_and_a_start_with_the_same_budget_starts_nothing(job: SupervisedJob) -> None:
    job.spec.update(price_per_hour=3600.0, currency="CNY", budget=5.0, spent_before=1.0)
    job.phases("steps:1", "hang")
    job.start()
    status = job.until_state("stopped")
    assert (status["reason"], status["resumable"], status["exit_code"]) == ("budget", True, 3)
    assert status["money"] >= 4.5
    job.start("--again")
    assert job.until_state("stopped")["reason"] == "budget"
    assert job.attempts() == 1
    job.spec["budget"] = 1e6
    job.start()
    job.until(lambda: job.attempts() == 2)


def test_the_deadline_stops_the_trainer(job: SupervisedJob) -> None:
    job.spec["deadline"] = time.time() + 1
    job.phases("hang")
    job.start()
    assert job.until_state("stopped")["reason"] == "deadline"


def test_a_stalled_trainer_is_killed_and_started_again(job: SupervisedJob) -> None:
    job.spec["stall_minutes"] = 1 / 60
    job.phases("ignore_term", "first:1/hang", "final")
    job.start()
    status = job.until_state("done")
    assert (status["restarts"], job.attempts()) == (1, 2)
    assert "no sign of progress" in job.log("supervisor")


# ---------------------------------------------------------------------------------------------------------- GPU errors


def test_xid_in_the_kernel_s_log_ends_the_job(job: SupervisedJob, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tool(tools, "nvidia-smi", "print('00000000:3B:00.0, 97, 0')")
    read = "import os\nhere = os.path.dirname(os.path.abspath(__file__))\nopen(here + '/asked', 'a').write('.')\n"
    tool(tools, "dmesg", f"{read}print(open(here + '/log').read())")
    old = "[1] NVRM: Xid (PCI:0000:3b:00): 79, of an earlier tenant\n[2] NVRM: Xid (PCI:0000:3b:00): 31, a fault\n"
    (tools / "log").write_text(old)
    job.phases("print:ready", "hang")
    job.start(env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"})
    job.until(lambda: (tools / "asked").exists() and len((tools / "asked").read_text()) > 1, "a second look")
    job.until(lambda: "ready" in job.log())
    assert job.status()["state"] == "running"
    (tools / "new").write_text(old + "[9] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
    (tools / "new").replace(tools / "log")
    assert "fallen off the bus" in job.until_state("failed")["message"]


def test_a_crash_with_an_ecc_error_is_not_repeated(job: SupervisedJob) -> None:
    job.phases("print:RuntimeError: CUDA error: uncorrectable ECC error encountered", "exit:1")
    job.start()
    status = job.until_state("failed")
    assert (status["reason"], status["restarts"], job.attempts()) == ("gpu", 0, 1)


# --------------------------------------------------------------------------------------------------------------- kills


def test_a_killed_supervisor_is_revived_and_adopts_the_trainer_and_its_cost(job: SupervisedJob) -> None:
    job.spec.update(price_per_hour=3600.0, currency="CNY")
    job.phases("wait:go", "steps:2", "final")
    pid = job.start()
    began = int(job.record("supervisor")["started"].rpartition("/")[2]) / os.sysconf("SC_CLK_TCK")
    trainer = job.until_trainer()
    for _ in range(3):
        os.kill(pid, signal.SIGKILL)
        pid = job.until_supervisor(other_than=pid)
    assert job.until_trainer() == trainer
    job.let("go")
    status = job.until_state("done")
    job.until(lambda: not supervisor.lives(job.record("supervisor")), "its end")  # status.json is written first
    elapsed = job.record("state")["uptime"] - began
    assert job.attempts() == 1
    assert status["restarts"] == 0
    assert elapsed - 1.5 <= status["seconds"] <= elapsed + 0.02  # nothing forgotten, nothing counted twice


def test_a_killed_shim_is_replaced_and_the_trainer_goes_on(job: SupervisedJob) -> None:
    job.phases("wait:go", "steps:2", "final", "done")
    pid = job.start()
    trainer = job.until_trainer()
    shim = job.record("shim")["pid"]
    os.kill(shim, signal.SIGKILL)
    job.until(lambda: job.record("shim")["pid"] != shim)
    os.kill(pid, signal.SIGKILL)  # the new shim guards the supervisor too
    job.until_supervisor(other_than=pid)
    job.let("go")
    status = job.until_state("done")  # nobody saw its exit code: the run's own status says it
    assert (status["exit_code"], job.attempts()) == (0, 1)
    assert job.record("phase-train")["trainer"]["pid"] == trainer


def test_a_killed_trainer_is_started_again(job: SupervisedJob) -> None:
    job.phases("wait:go", "final")
    job.start()
    trainer = job.until_trainer()
    os.kill(trainer, signal.SIGKILL)
    job.until(lambda: job.attempts() == 2)
    job.let("go")
    assert job.until_state("done")["restarts"] == 1


def test_when_all_are_killed_the_job_is_lost_and_the_next_start_resumes_it(job: SupervisedJob) -> None:
    job.phases("steps:2", "wait:go", "final")
    job.start()
    job.until_trainer()
    job.kill_everything()
    status = job.status()
    assert (status["state"], status["resumable"], status["reason"]) == ("lost", True, "lost")
    assert json.loads(job.command("status").stdout)["state"] == "lost"
    job.let("go")
    job.start()
    status = job.until_state("done")
    assert (status["restarts"], job.attempts()) == (0, 2)


def test_after_a_reboot_no_process_of_before_is_taken_for_ours(job: SupervisedJob) -> None:
    """The same pids live, in another boot."""
    job.phases("wait:go", "final")
    job.start()
    job.until_trainer()
    job.kill_everything()
    me = supervisor.identity(os.getpid())
    other = {**me, "started": "another-boot/" + me["started"].partition("/")[2]}
    for name in ("status", "supervisor", "shim"):
        (job.folder / f"{name}.json").write_text(json.dumps({**job.record(name), **other}))
    record = job.record("phase-train")
    (job.folder / "phase-train.json").write_text(json.dumps({**record, "trainer": other}))
    assert job.status()["state"] == "lost"
    job.let("go")
    job.start()
    assert job.until_state("done")["pid"] != os.getpid()


def test_a_stop_reaches_a_trainer_whose_supervisor_and_shim_are_gone(job: SupervisedJob) -> None:
    job.phases("hang")
    pid = job.start()
    job.until_trainer()
    for process in (job.record("shim")["pid"], pid):
        os.kill(process, signal.SIGKILL)
    job.until(lambda: job.status()["state"] == "lost")
    assert job.command("stop").returncode == 0
    assert job.until_state("stopped")["exit_code"] in (3, None)
    assert "saved at SIGTERM" in job.log()


def test_a_supervisor_that_gets_sigterm_stops_the_trainer_gracefully(job: SupervisedJob) -> None:
    job.phases("hang")
    pid = job.start()
    job.until_trainer()
    os.kill(pid, signal.SIGTERM)
    status = job.until_state("stopped")
    assert (status["reason"], status["exit_code"]) == ("signal", 3)


def test_when_its_folder_is_removed_everything_ends(job: SupervisedJob) -> None:
    job.phases("ignore_term", "hang")
    pid = job.start()
    trainer = job.until_trainer()
    shim = job.record("shim")["pid"]
    shutil.rmtree(job.folder.rename(job.home / "removed"))
    for process in (trainer, pid, shim):
        job.until(lambda process=process: supervisor.start_time(process) is None, f"the end of {process}")


# ---------------------------------------------------------------------------------------------------------------- disks


def test_a_disk_that_fills_up_stops_the_trainer_while_it_can_still_save(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", "size=8m") as disk, supervised_job(disk / "home") as job:
        job.spec["min_free_bytes"] = 4 << 20
        job.phases("steps:1", f"fill:{5 << 20}", "hang")
        job.start()
        status = job.until_state("stopped")
        assert (status["reason"], status["resumable"], status["exit_code"]) == ("disk", True, 3)
        assert "MiB are free" in status["message"]


def test_a_disk_without_a_free_byte_does_not_hide_how_the_job_ended(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", "size=4m") as disk, supervised_job(disk / "home") as job:
        job.phases("wait:full", "exit:2")
        job.start()
        job.until_trainer()
        (job.folder / ".full").touch()
        with contextlib.suppress(OSError), (disk / "filling").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        (job.folder / ".full").rename(job.folder / "full")
        status = job.until_state("failed")
        assert (status["reason"], status["exit_code"]) == ("input", 2)


# ------------------------------------------------------------------------------------------------- the end of a job


def test_a_damaged_checkpoint_is_named_and_keeps_the_box(job: SupervisedJob, tmp_path: Path) -> None:
    tool(tmp_path / "tools", "poweroff", f"open({str(tmp_path / 'off')!r}, 'a').write('off')")
    job.spec.update(
        platform="autodl", disks=[{"path": str(tmp_path), "survives": "stop"}],
        stop={"when_done": True, "action": "power_off", "command": [str(tmp_path / "tools/poweroff")]},
    )  # fmt: skip
    job.phases("checkpoint:3", "checkpoint:4", "final", "wait:go", "done")
    job.start()
    job.until((job.run / "final/model.safetensors").exists)
    weights = job.run / "checkpoints/step-00000003/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    job.let("go")
    status = job.until_state("done")
    assert not status["verified"]
    assert "checkpoints/step-00000003: model.safetensors does not match manifest.json" in status["message"]
    assert status["stop_action"].startswith("refused: checkpoints/step-00000003 has no verified copy")
    assert not (tmp_path / "off").exists()


def mirrored(job: SupervisedJob, mirror: Path) -> None:
    for name in ("checkpoints/step-00000003", "final"):
        (mirror / job.name / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", str(job.run / name), str(mirror / job.name / name)], check=True)
        (mirror / job.name / name / ".mirror.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "verified", "off"),
    [(None, True, True), ("checkpoints/step-00000003/state.json", False, False)],
)
def test_a_box_whose_disk_does_not_survive_goes_only_with_a_byte_identical_mirror(
    job: SupervisedJob, tmp_path: Path, damage: str | None, verified: bool, off: bool
) -> None:
    mirror = tmp_path / "nas"
    tool(tmp_path / "tools", "poweroff", f"open({str(tmp_path / 'off')!r}, 'a').write('off')")
    link = tmp_path / "hy-tmp"
    link.symlink_to(job.home)
    job.spec.update(
        platform="gpushare", mirror=str(mirror),
        disks=[{"path": str(link), "survives": "stop", "kept_hours": 24}, {"path": str(mirror), "survives": "release"}],
        stop={"when_done": True, "action": "power_off", "command": [str(tmp_path / "tools/poweroff")]},
    )  # fmt: skip
    job.phases("checkpoint:3", "final", "wait:go", "done")
    job.start()
    job.until((job.run / "final/model.safetensors").exists)
    mirrored(job, mirror)
    if damage is not None:
        (mirror / job.name / damage).write_bytes(b"other")
    job.let("go")
    status = job.until_state("done")
    assert status["verified"] == verified
    assert (status["stop_action"] == "done") == off
    if off:
        job.until((tmp_path / "off").exists)
    else:
        assert "wiped 24 h after a power-off" in status["stop_action"]


def test_a_box_of_an_unknown_platform_is_never_powered_off(job: SupervisedJob, tmp_path: Path) -> None:
    tool(tmp_path / "tools", "poweroff", f"open({str(tmp_path / 'off')!r}, 'a').write('off')")
    job.spec.update(
        platform="generic", disks=[{"path": "/", "survives": "release"}],
        stop={"when_done": True, "action": "power_off", "command": [str(tmp_path / "tools/poweroff")]},
    )  # fmt: skip
    job.phases("final", "done")
    job.start()
    assert "unknown platform" in job.until_state("done")["stop_action"]
    assert not (tmp_path / "off").exists()


def test_the_box_waits_for_a_laptop_that_follows_and_goes_when_it_has_pulled(
    job: SupervisedJob, tmp_path: Path
) -> None:
    tool(tmp_path / "tools", "release", f"open({str(tmp_path / 'off')!r}, 'a').write('off')")
    job.spec.update(
        platform="autodl", disks=[{"path": "/", "survives": "stop"}],
        stop={"when_done": True, "action": "release", "command": [str(tmp_path / "tools/release")]},
    )  # fmt: skip
    job.phases("final", "done")
    job.write_spec()
    (job.folder / "attached").touch()
    job.start()
    job.until_state("holding")
    (job.folder / "attached").touch()
    items = json.loads((job.folder / "verified.json").read_text())["items"]
    pulled = {item["name"]: item["digest"] for item in items}
    assert list(pulled) == ["final"]
    (job.folder / ".pulled").write_text(json.dumps({"verified": pulled}))
    (job.folder / ".pulled").rename(job.folder / "pulled")
    assert job.until_state("done")["stop_action"] == "done"
    job.until((tmp_path / "off").exists)


def test_a_laptop_that_goes_away_is_not_waited_for_and_the_box_is_not_released(
    job: SupervisedJob, tmp_path: Path
) -> None:
    tool(tmp_path / "tools", "release", f"open({str(tmp_path / 'off')!r}, 'a').write('off')")
    job.spec.update(
        platform="autodl", disks=[{"path": "/", "survives": "stop"}], lease_seconds=1.0,
        stop={"when_done": True, "action": "release", "command": [str(tmp_path / "tools/release")]},
    )  # fmt: skip
    job.phases("wait:go", "final", "done")
    job.start()
    job.let("go")
    job.until(lambda: (job.folder / "attached").touch() or job.status()["state"] == "holding")
    status = job.until_state("done")
    assert "does not survive a release; on your laptop, type: sojourn pull t --what all" in status["stop_action"]


# -------------------------------------------------------------------------------------------------------- notifications


@contextlib.contextmanager
def listening(code: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that keeps what is posted to it."""
    posted: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append({"path": self.path, "headers": dict(self.headers), "body": json.loads(body)})
            self.send_response(code)
            self.send_header("Location", "http://127.0.0.1:9/")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", posted
    server.shutdown()


def test_everybody_is_notified_and_no_secret_is_left_in_any_file_or_process_list(
    job: SupervisedJob, tmp_path: Path
) -> None:
    with listening() as (url, posted), listening(500) as (broken, _), listening(302) as (moved, moved_posts):
        kinds = ["webhook", "autodl", "serverchan", "bark", "webhook", "webhook", "bark"]
        secrets = [f"{url}/{CANARY}-0", f"{CANARY}-1", f"{CANARY}-2", f"{CANARY}-3", f"{broken}/{CANARY}-4",
                   f"{moved}/{CANARY}-5", f"{url}/own/{CANARY}-6"]  # fmt: skip
        for index, secret in enumerate(secrets):
            (job.folder / f"secrets/notify-{index}").write_text(secret)
        job.spec["notify"] = [{"kind": kind, "secret": f"secrets/notify-{i}"} for i, kind in enumerate(kinds)]
        for index in (1, 2, 3):
            job.spec["notify"][index]["url"] = f"{url}/{kinds[index]}"
        message = tmp_path / "message"
        job.spec["notify"].append({"kind": "command", "argv": ["sh", "-c", f"cat > {message}"]})
        (job.folder / "secrets/command").write_text("sh -c 'exit 1'")
        job.spec["notify"].append({"kind": "command", "secret": "secrets/command"})
        job.phases("steps:1", f"print:the token {CANARY}-1 was refused", "wait:go", "first:9/2")
        job.start()
        job.until_trainer()
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
        assert not any(b"-token-5309" in line and str(job.trainer).encode() not in line for line in lines)
        job.let("go")
        status = job.until_state("failed")
    assert status["message"] == "the token *** was refused"
    assert [post["path"] for post in posted] == [f"/{CANARY}-0", "/autodl", "/serverchan", "/bark", "/own/push"]
    hook, autodl, serverchan, bark, own = (post["body"] for post in posted)
    assert (hook["run"], hook["state"], hook["text"]) == ("t", "failed", status["message"])
    assert autodl == {"title": "Sojourn: t failed", "name": "t", "content": status["message"]}
    assert posted[1]["headers"]["Authorization"] == f"{CANARY}-1"
    assert serverchan["desp"] == bark["body"] == status["message"]
    assert (bark["device_key"], own["device_key"]) == (f"{CANARY}-3", f"{CANARY}-6")
    assert message.read_text() == f"Sojourn: t failed\n\n{status['message']}\n"
    assert len(moved_posts) == 1
    log = job.log("supervisor")
    assert "notification webhook failed: HTTP 500" in log
    assert "notification webhook failed: HTTP 302" in log
    assert "notification command failed: exit code 1" in log
    written = [path for path in job.folder.rglob("*") if path.is_file() and path.name not in ("train.log",)]
    spec = [path for path in written if path.name.startswith(("spec", "exit"))]  # the fake trainer's own words
    assert not [path for path in set(written) - set(spec) if CANARY.encode() in path.read_bytes()]
    assert not (job.folder / "secrets").exists()


def test_requests_go_where_each_service_documents_them() -> None:
    message = {"title": "t", "text": "x", "run": "r"}
    kinds = [("autodl", "TOKEN"), ("serverchan", "SCT123"), ("serverchan", "sctp77tabc"), ("bark", "KEY")]
    found = [supervisor.notification_request({"kind": kind}, secret, message).full_url for kind, secret in kinds]
    assert found == [
        "https://www.autodl.com/api/v1/wechat/message/send", "https://sctapi.ftqq.com/SCT123.send",
        "https://77.push.ft07.com/send/sctp77tabc.send", "https://api.day.app/push",
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------- a real trainer
