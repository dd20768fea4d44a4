"""Odd files in a run folder: the run resumes, or one line says which file is wrong; nothing hangs."""

from __future__ import annotations

import os
import shutil

import pytest

from conftest import called
from sojourn.errors import Stopped
from sojourn.storage.files import write_json
from test_files import ODD
from tiny import run_of, run_train, same_weights, stop_after

pytestmark = pytest.mark.skipif(os.name != "posix", reason="fifos and devices are POSIX")

FILES = ("status.json", "metrics.jsonl", "events.jsonl", "environment.json", "ledger.json", "ladder.json",
         "trackers.json", "checkpoints/latest")  # fmt: skip
WRONG_TYPES = {
    "state": 5, "step": "x", "total_steps": [], "message": {}, "pid": "y", "started": None, "resumable": 3, "id": 7,
    "device": [], "data": 5, "base": [], "seconds": "x", "kind": [1], "loss": "x", "time": "y", "train.micro_batch": {},
}  # fmt: skip
CONTENTS = {"a list": "[1]", "a text": '"x"', "a number": "3", "null": "null", "nothing": "", "half a character":
            '{"message": "\\ud800", "state": "stopped", "step": 4}'}  # fmt: skip


@pytest.fixture(scope="module")
def stopped_once(tiny, tmp_path_factory):
    """A run that stopped at step 4 of 6, as `words`, and a copy of its folder."""
    words = tiny.words("train.steps=6", "save.every_steps=2")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 4)
        run_train(words)
    return words, shutil.copytree(run_of(words).path, tmp_path_factory.mktemp("stopped") / "run", symlinks=True)


@pytest.fixture
def stopped(stopped_once):
    """Its words and folder, as it was when it stopped."""
    words, copy = stopped_once
    run = run_of(words)
    shutil.rmtree(run.path)
    shutil.copytree(copy, run.path, symlinks=True)
    return words, run


def _replace(path, make):
    path.unlink(missing_ok=True)
    make(path)


def _write(text):
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    "make",
    [*(make for name, make in ODD.items() if name != "a folder"),
     *(pytest.param(_write(text), marks=pytest.mark.slow if number % 3 else []) for number, text in
       enumerate(CONTENTS.values())),
     lambda path: write_json(path, WRONG_TYPES)],
    ids=[*(name for name in ODD if name != "a folder"), *CONTENTS, "wrong types"],
)  # fmt: skip
def test_a_run_resumes_whatever_its_records_have_become(tiny, stopped, make, monkeypatch):
    """The checkpoints hold all that decides the result."""
    monkeypatch.setattr("sojourn.storage.files._MOST_LINES_BYTES", 1 << 26)
    words, run = stopped
    for file in FILES:
        _replace(run.path / file, make)
    done = called("train", *words)
    assert (done.returncode, done.stderr) == (0, "") and "resuming from step 4" in done.stdout
    assert same_weights(run, tiny.whole("train.steps=6", "save.every_steps=2"))


@pytest.mark.parametrize("file", FILES)
def test_a_folder_in_place_of_a_file_is_named(stopped, file):
    words, run = stopped
    _replace(run.path / file, lambda path: path.mkdir())
    done = called("train", *words)
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 1
    assert done.returncode == 0 or (done.returncode in (1, 2) and file in done.stderr)


@pytest.mark.parametrize("make", ODD.values(), ids=list(ODD))
def test_an_odd_run_yaml_is_replaced_or_named_in_one_line(tiny, stopped, make):
    """The checkpoints know the settings that decide the result."""
    words, run = stopped
    _replace(run.config, make)
    done = called("train", *words)
    if done.returncode == 0:
        assert same_weights(run, tiny.whole("train.steps=6", "save.every_steps=2"))
    else:
        assert "run.yaml" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("value", ["x", {}, [1], -3, 10**30, None, True])
def test_a_fallback_that_is_no_setting_is_ignored(stopped, value):
    words, run = stopped
    settings = ("micro_batch", "offload", "loss_chunk", "activation_checkpointing", "cuda_graphs")
    write_json(run.ladder, {"device": "cpu", **{f"train.{key}": value for key in settings}})
    done = called("train", *words)
    assert (done.returncode, done.stderr) == (0, "")
