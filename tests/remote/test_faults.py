"""What goes wrong on a box while the laptop is closed or open: each ends as promised, with nothing lost."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

from laptop import RUN, Laptop
from remote_box import RemoteBox, needs_box

pytestmark = needs_box

LONG = ("train.steps=100000", "save.every_steps=50")


def _launch(laptop: Laptop, run: str, *words: str, code: int | None = 0) -> str:
    done = laptop.run("launch", *RUN, f"name={run}", "--on", "box", *words, code=code)
    return done.stdout + done.stderr


def _until(condition: Callable[[], object], what: str, seconds: float = 180.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def _ended(box: RemoteBox, run: str) -> bool:
    return box.status_of(run).get("state") in ("done", "stopped", "failed")


def test_a_killed_supervisor_comes_back_and_the_run_ends_the_same(box: RemoteBox, laptop: Laptop) -> None:
    _launch(laptop, "supervisor", "--detach")
    for _ in range(3):
        box.kill("supervisor.py run") or box.kill("supervisor.py")
        time.sleep(1)
    _launch(laptop, "supervisor")
    assert laptop.weights("supervisor") == laptop.weights("undisturbed")


def test_a_killed_trainer_is_restarted_and_ends_the_same(box: RemoteBox, laptop: Laptop) -> None:
    process = laptop.start("launch", *RUN, "name=trainer", "--on", "box")
    killed = 0
    for _ in range(2):
        with contextlib.suppress(AssertionError):
            _until(lambda: box.phase_of("trainer") == "train" and box.processes("sojourn train"), "it trains", 60)
            time.sleep(3)
            killed += box.kill("sojourn train")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0 and killed, out + err
    assert laptop.weights("trainer") == laptop.weights("undisturbed")


def test_all_processes_of_the_box_are_killed_and_the_same_launch_goes_on(box: RemoteBox, laptop: Laptop) -> None:
    process = laptop.start("launch", *RUN, "name=reboot", "--on", "box")
    _until(lambda: box.phase_of("reboot") == "rehearse", "it rehearses")  # to train takes a fraction of a second
    process.kill()
    box.reboot()
    process.communicate()
    assert "lost" in laptop.run("runs").stdout
    _launch(laptop, "reboot")
    assert laptop.weights("reboot") == laptop.weights("undisturbed")


def test_the_budget_ends_a_run_with_the_laptop_closed(box: RemoteBox, laptop: Laptop) -> None:
    _launch(laptop, "budget", *LONG, "--detach", "--price", "¥360", "--budget", "¥9")
    _until(lambda: _ended(box, "budget"), "the budget ends it")
    status = box.status_of("budget")
    assert (status["state"], status["reason"], status["resumable"]) == ("stopped", "budget", True)
    assert 0 < status["money"] <= 9.5
    assert _checkpoints(box, "budget")
    assert box.shutdown_calls() == []


def test_the_deadline_ends_a_run(box: RemoteBox, laptop: Laptop) -> None:
    said = _launch(laptop, "deadline", *LONG, "--deadline", "90s", code=3)
    assert "deadline" in said and _checkpoints(box, "deadline")


def test_a_stalled_trainer_is_restarted(box: RemoteBox, laptop: Laptop) -> None:
    box.set_gpu(**{"utilization.gpu": 0})
    _launch(laptop, "stall", *LONG, "--detach", "--stall", "6s")
    assert box.kill("sojourn train", signal.SIGSTOP)
    _until(lambda: box.status_of("stall").get("restarts", 0) > 0, "it is restarted")
    laptop.run("stop", "stall", code=None)


def test_a_gpu_error_ends_a_run_resumable(box: RemoteBox, laptop: Laptop) -> None:
    _launch(laptop, "gpu", *LONG, "--detach")
    box.set_gpu(lost=True)
    _until(lambda: _ended(box, "gpu"), "the error is seen")
    status = box.status_of("gpu")
    assert (status["state"], status["reason"], status["resumable"]) == ("failed", "gpu", True)
    box.set_gpu()


def test_a_full_disk_loses_nothing(box: RemoteBox, laptop: Laptop) -> None:
    process = laptop.start("launch", *RUN, "train.steps=200", "name=full", "--on", "box")
    _until(lambda: len(_checkpoints(box, "full")) >= 1, "a checkpoint")
    filler = box.root / "root" / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    time.sleep(5)
    filler.unlink()
    process.communicate(timeout=240)
    _launch(laptop, "full", "train.steps=200")
    laptop.run("train", *RUN, "train.steps=200", "name=not-full")
    assert laptop.weights("full") == laptop.weights("not-full")


def test_a_changed_host_key_is_refused(box: RemoteBox, laptop: Laptop) -> None:
    old = (box.root / "etc/ssh/box_ed25519").read_bytes()
    try:
        box.new_host_key()
        box.reboot()
        for words in (("host", "check", "box"), ("launch", *RUN, "name=mitm", "--on", "box")):
            done = laptop.run(*words, code=None)
            assert done.returncode != 0 and "host key" in done.stderr and "Traceback" not in done.stderr
    finally:
        (box.root / "etc/ssh/box_ed25519").write_bytes(old)
        box.reboot()


def _checkpoints(box: RemoteBox, run: str) -> list[Path]:
    return sorted((box.root / "root/autodl-tmp/runs" / run / "checkpoints").glob("step-*"))


def test_the_laptop_is_closed_and_the_model_waits(box: RemoteBox, laptop: Laptop) -> None:
    _launch(laptop, "closed", "--detach")
    _until(lambda: _ended(box, "closed"), "it ends by itself")
    laptop.run("pull", "closed")
    assert laptop.weights("closed") == laptop.weights("undisturbed")
