"""The demo's first losses are golden: a change that moves them is noticed."""

import json
import os
import platform
import shutil
import subprocess
import sys

import pytest

import golden


@pytest.fixture(scope="module")
def known() -> dict[str, list[float]]:
    return json.loads(golden.FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def machine_type(known) -> str:
    """As the demo sees it: with all of this machine's threads."""
    if not any(name.startswith(f"{platform.machine()} ") for name in known):
        return "not among them"
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    code = "import golden; print(golden.machine_type())"
    folder = golden.FILE.parent
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def losses(home):
    """Of a new process: some of torch's libraries keep the number of threads that a forked one's parent started with,
    and then sum in another order."""
    return golden.demo_losses(home)


def test_the_first_losses_are_identical_on_every_run(losses, home, tmp_path):
    shutil.copytree(home / "prepared", tmp_path / "prepared")
    assert golden.demo_losses(tmp_path) == losses


def test_the_first_losses_are_the_recorded_ones(losses, known, machine_type):
    if machine_type in known:
        assert losses == known[machine_type]
    for recorded in known.values():
        assert losses == pytest.approx(recorded, rel=1e-3)


def test_the_first_loss_is_that_of_a_model_that_knows_nothing(losses):
    from math import log

    from sojourn.config.load import load_run

    assert losses[0] == pytest.approx(log(int(load_run(["demo"]).config.data.vocab_size)), rel=0.02)
