"""A hundred cut connections, over every phase of a launch, and killed laptops: the run ends as if undisturbed."""

from __future__ import annotations

import shutil
import signal
import time
from collections import Counter
from random import Random

from laptop import RUN, Laptop
from remote_box import NOT_STARTED, PASSWORD, RemoteBox, files_with, needs_box

pytestmark = needs_box

CUTS, CUTS_A_LAUNCH = 100, 16


def test_a_hundred_cut_connections_change_nothing(box: RemoteBox, laptop: Laptop) -> None:
    rng, cuts, launches, where = Random("cuts"), 0, 0, Counter[str]()
    while cuts < CUTS:
        run, cuts_here, late = f"cut-{launches}", 0, launches % 2 == 1  # late: not before the job has started there
        if not late:
            shutil.rmtree(box.root / "root/autodl-tmp/.sojourn/envs", ignore_errors=True)  # it is installed anew
        process = laptop.start("launch", *RUN, f"name={run}", "--on", "box")
        while process.poll() is None:
            time.sleep(rng.uniform(0.0, 0.6 if late else 1.5))
            phase = box.phase_of(run)
            if (late and phase == NOT_STARTED) or process.poll() is not None or cuts_here == CUTS_A_LAUNCH:
                continue
            if box.cut():
                cuts, cuts_here = cuts + 1, cuts_here + 1
                where[phase] += 1
        out, err = process.communicate()
        assert process.returncode == 0, out + err
        assert laptop.weights(run) == laptop.weights("undisturbed")
        launches += 1
    print(f"{cuts} cuts in {launches} launches: {dict(where)}")
    assert len(where) > 2 and where[NOT_STARTED] < 0.9 * cuts, where
    assert files_with(PASSWORD, laptop.folder, box.root / "root") == []


def test_a_killed_laptop_types_the_same_again(box: RemoteBox, laptop: Laptop) -> None:
    rng, kills, launches = Random("laptop"), 0, 0
    while kills < 20:
        run = f"killed-laptop-{launches}"
        words = ("launch", *RUN, f"name={run}", "--on", "box")
        for _ in range(8):
            process = laptop.start(*words)
            time.sleep(rng.uniform(0.2, 6.0))
            if process.poll() is not None:
                break
            process.kill()
            process.communicate()
            kills += 1
        laptop.run(*words)
        assert laptop.weights(run) == laptop.weights("undisturbed")
        launches += 1
    print(f"{kills} kills in {launches} launches")


def test_an_unplugged_cable_is_waited_for(box: RemoteBox, laptop: Laptop) -> None:
    process = laptop.start("launch", *RUN, "name=unplugged", "--on", "box")
    time.sleep(4)
    with box.unplugged():
        time.sleep(25)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert laptop.weights("unplugged") == laptop.weights("undisturbed")


def test_ctrl_c_only_stops_watching(box: RemoteBox, laptop: Laptop) -> None:
    laptop.run("launch", *RUN, "train.steps=100000", "name=watched", "--on", "box", "--detach")
    for words in (("logs", "watched", "-f"), ("launch", *RUN, "train.steps=100000", "name=watched", "--on", "box")):
        process = laptop.start(*words)
        time.sleep(5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 130 and "not watching any more" in out and "Traceback" not in err, out[-500:] + err
        assert box.status_of("watched")["state"] == "running"
    done = laptop.run("stop", "watched")
    assert "stopped at step" in done.stdout and box.status_of("watched")["resumable"]
