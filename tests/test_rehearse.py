"""A minute before the run: what it finds, what it refuses, and that it leaves nothing behind."""

import json
import math

import pytest

from conftest import called
from sojourn.config.load import load_run
from sojourn.run.home import run_folder
from sojourn.train.ranks import Ranks
from sojourn.train.rehearse import rehearse


def _rehearse(words: list[str]):
    config = load_run(words).config
    return rehearse(config, run_folder(config.name), Ranks())


def _levels(report) -> dict[str, str]:
    return {one.name: one.level for one in report.findings}


def test_a_run_that_will_go_through_is_told_so_and_nothing_is_left(words, home):
    report = _rehearse(words)
    assert report.refused is None
    assert set(_levels(report)) == {"loss", "data", "memory", "checkpoint", "disk", "time"}
    assert set(_levels(report).values()) == {"ok"}
    assert report.facts["checkpoint_bytes"] > 0 and report.facts["step_seconds"] > 0
    assert list((home / "runs").iterdir()) == []


def test_rehearsing_changes_nothing_of_the_run(words):
    from sojourn.train.loop import train

    def losses(name: str, *more: str) -> list[float]:
        config = load_run([*words, f"name={name}", *more]).config
        run = run_folder(name)
        train(config, run)
        return [line["loss"] for line in run.read_metrics() if line["kind"] == "train"]

    assert losses("with") == losses("without", "train.rehearse=off")


@pytest.mark.parametrize(
    ("extra", "name", "message"),
    [
        ("save.min_free=100000TiB", "run", "free some space, or set save.folder"),
        ("limits.time=0.001s", "time", "limits.time leaves"),
        ("save.mirror={chats}", "mirror", ""),
    ],
)
def test_what_would_stop_the_run_later_is_refused_now(words, chats, extra, name, message):
    report = _rehearse([*words, extra.format(chats=chats)])
    assert _levels(report)[name] == "fail" and message in report.refused


def test_a_nan_loss_is_refused(words, monkeypatch):
    from sojourn.train.step import Stepper

    real = Stepper.gradients
    monkeypatch.setattr(Stepper, "gradients", lambda *given: (math.nan, real(*given)[1]))
    assert "loss: is NaN or infinite" in _rehearse(words).refused


def test_running_out_of_memory_finds_the_fallback_that_fits(words, monkeypatch):
    import torch

    from sojourn.train.step import Stepper

    real = Stepper.gradients

    def tight(stepper, batches):
        if stepper.batcher.micro_batch > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(stepper, batches)

    monkeypatch.setattr(Stepper, "gradients", tight)
    report = _rehearse([*words, "train.micro_batch=8"])
    assert report.refused is None and report.facts["micro_batch"] == 2


def test_the_verb_answers_in_json_and_by_its_exit_code(words, chats, fork_server):
    good = fork_server.run("rehearse", *words, "--json")
    assert good.returncode == 0, good.stderr
    found = json.loads(good.stdout)
    assert found["starts"] is True and found["micro_batch"] == 8
    bad = called("rehearse", *words, f"save.mirror={chats}")
    assert bad.returncode == 1 and "this run should not start: mirror:" in bad.stderr
    assert "Traceback" not in bad.stderr
