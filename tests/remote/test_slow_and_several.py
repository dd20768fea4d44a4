"""A slow network, two boxes, a box that vanishes: the run ends with the same weights and its cost adds up."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from laptop import RUN, Laptop
from remote_box import RemoteBox, needs_box, remote_box
from slow_link import slow_link
from sojourn.storage.files import read_json_lines, read_json_object

pytestmark = needs_box

STEPS = ("train.steps=200", "save.every_steps=10")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory, laptop: Laptop) -> Iterator[RemoteBox]:
    """A machine of unknown kind."""
    with remote_box(tmp_path_factory.mktemp("second"), ()) as made:
        laptop.add(made, "second", "--home", "/root/data")
        yield made


@pytest.fixture(scope="module")
def longer(laptop: Laptop) -> bytes:
    laptop.run("train", *RUN, *STEPS, "name=longer")
    return laptop.weights("longer")


def test_a_link_of_300_ms_and_2_percent_loss(box: RemoteBox, laptop: Laptop) -> None:
    with slow_link(box.address, 22, delay=0.15, loss=0.02) as link:
        line = f"ssh -p {link.local_port} root@127.0.0.1"
        laptop.run("host", "add", "slow", line, "--price", "¥2", SOJOURN_SSH_PASSWORD=box.password)
        laptop.run("launch", *RUN, "name=slow", "--on", "slow", timeout=900)
        assert laptop.weights("slow") == laptop.weights("undisturbed")
        laptop.run("host", "remove", "slow", "--force")


def test_a_run_moves_and_its_curve_and_cost_go_on(
    box: RemoteBox, second: RemoteBox, laptop: Laptop, longer: bytes
) -> None:
    laptop.run("launch", *RUN, *STEPS, "name=moved", "--on", "box", "--detach")
    laptop.run("move", "moved", "--to", "second")
    assert laptop.weights("moved") == longer
    run = laptop.home / "runs" / "moved"
    steps = [line["step"] for line in read_json_lines(run / "metrics.jsonl") if line["kind"] == "train"]
    assert steps == sorted(steps) and sorted(set(steps)) == list(range(1, 201))
    first = box.status_of("moved")
    last = read_json_object(second.root / "root/data/.sojourn/jobs/moved/status.json")
    assert first["money"] > 0 and last["money"] > first["money"]
    assert last["seconds"] > first["seconds"]
    assert second.shutdown_calls() == []


def test_a_box_vanishes_and_the_next_one_goes_on(box: RemoteBox, second: RemoteBox, laptop: Laptop) -> None:
    long = ("train.steps=1500", "save.every_steps=50")
    words = ("launch", *RUN, *long, "name=spot", "--on", "second,box")
    process = laptop.start(*words)
    there = laptop.home / "runs" / "spot" / "checkpoints"
    until = time.monotonic() + 240
    while not list(there.glob("step-*")) and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.2)
    second.power_off()
    try:
        out, err = process.communicate(timeout=400)
    finally:
        second.boot()
    assert process.returncode == 0, out + err
    assert "spot goes on on box" in out
    laptop.run("train", *RUN, *long, "name=no-spot")
    assert laptop.weights("spot") == laptop.weights("no-spot")


def test_two_boxes_that_cannot_meet_are_refused_in_one_line(box: RemoteBox, second: RemoteBox, laptop: Laptop) -> None:
    done = laptop.run("launch", *RUN, "name=nodes", "--on", "box,second", "--nodes", "2", code=2)
    assert "cannot reach box on port 29500" in done.stderr and "Traceback" not in done.stderr


def test_two_boxes_of_one_network_train_one_run(box: RemoteBox, second: RemoteBox, laptop: Laptop) -> None:
    box.connect_to(second)
    laptop.run("launch", *RUN, "name=together", "--on", "box,second", "--nodes", "2")
    ours, alone = (
        [
            line["loss"]
            for line in read_json_lines(laptop.home / "runs" / run / "metrics.jsonl")
            if line["kind"] == "train"
        ]
        for run in ("together", "undisturbed")
    )
    assert ours == pytest.approx(alone, abs=1e-3)
