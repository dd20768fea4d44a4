"""`sojourn runs`: all runs at a glance, one of them with its loss; `loss.svg` at the end of training."""

import json
import math
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from conftest import called, sojourn
from sojourn.plot.loss import loss_points, loss_svg, loss_text
from sojourn.run.folder import RunFolder
from tiny import losses, run_of, stop_after


@pytest.fixture(scope="module")
def runs(tiny):
    """A finished run, and one that was stopped after 5 of 12 steps."""
    done, words = tiny.whole("data.eval_fraction=0.2", "train.eval_every=6"), tiny.words()
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 5)
        assert called("train", *words).returncode == 3
    return done, run_of(words)


def test_runs_are_listed_with_state_step_loss_cost_and_path(runs):
    done, stopped = runs
    listed = {row["name"]: row for row in json.loads(called("runs", "--json").stdout)}
    one, other = listed[done.path.name], listed[stopped.path.name]
    assert (one["state"], one["step"], one["total_steps"]) == ("done", 12, 12)
    assert (other["state"], other["step"], other["message"]) == ("stopped", 5, stopped.status().message)
    assert one["loss"] == losses(done)[-1] and one["seconds"] > 0 and one["path"] == str(done.path)
    lines = called("runs").stdout.splitlines()
    assert lines[0].split() == ["NAME", "STATE", "STEP", "LOSS", "TIME", "COST", "PATH"]
    assert any(line.split()[:3] == [stopped.path.name, "stopped", "5/12"] for line in lines)


@pytest.mark.parametrize("number", [0, 1])
def test_training_leaves_a_plot_of_its_losses_however_it_ends(runs, number):
    run = runs[number]
    svg = ET.fromstring(run.loss_plot.read_text())  # noqa: S314
    drawn = {line[0].text: line.get("points").split() for line in svg.iter("{http://www.w3.org/2000/svg}polyline")}
    assert len(drawn["training"]) == len(losses(run)) == (12, 5)[number]
    assert ("held-out" in drawn) == (number == 0)


def test_one_run_is_shown_with_its_loss_as_a_plot(runs):
    done, stopped = runs
    said = called("runs", "show", done.path.name).stdout
    assert (
        f"{done.path.name}: done, step 12/12" in said and "held-out loss" in said and "models: final, best, 12" in said
    )
    assert f"{max(losses(done)):.4g} ┤" in said and f"{min(losses(done)):.4g} ┤" in said
    assert f"stopped by {stopped.status().message}, step 5/12" in called("runs", "show", str(stopped.path)).stdout
    shown = json.loads(called("runs", "show", stopped.path.name, "--json").stdout)
    assert [loss for _, loss in shown["train"]] == losses(stopped) and shown["models"] == ["5"]
    absent = called("runs", "show", "absent")
    assert absent.returncode == 2 and absent.stderr.count("\n") == 1


def test_a_hundred_runs_with_damaged_ones_are_listed_without_torch(runs, home):
    """Each kind of damage: missing, empty, another type, a folder or a dead link where a file belongs, a cut line."""
    for number in range(100):
        shutil.copytree(runs[0].path, home / "runs" / f"r{number:03d}", ignore=shutil.ignore_patterns("*.safetensors"))
    damages = ("", "{", "[1]", '{"state": 3, "step": "x"}', '{"state": "running", "step": -1}')
    for number, text in enumerate(damages):
        for file in ("status.json", "ledger.json", "metrics.jsonl", "run.yaml"):
            (home / "runs" / f"r{number:03d}" / file).write_text(text)
    (home / "runs/r005/status.json").unlink()
    (home / "runs/r006/metrics.jsonl").unlink()
    (home / "runs/r006/metrics.jsonl").mkdir()
    (home / "runs/r007/ledger.json").unlink()
    (home / "runs/r007/ledger.json").symlink_to(home / "nowhere")
    (home / "runs/r008/metrics.jsonl").write_bytes(b'{"kind": "train", "step": 1, "loss": 2.5}\n{"kind": "train", "st')
    (home / "runs/not-a-run").mkdir()
    (home / "runs/a-file").write_text("")
    check = "import sys; sys.argv = ['sojourn', 'runs', '--json']\nfrom sojourn.cli.main import _run\ncode = _run()\n"
    check += "sys.exit(code or sum(name in sys.modules for name in ('torch', 'numpy', 'transformers')))"
    said = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    listed = {row["name"]: row for row in json.loads(said.stdout)}
    assert len(listed) == 100
    assert [listed[f"r{number:03d}"]["state"] for number in range(7)] == ["unknown"] * 6 + ["done"]
    assert listed["r006"]["loss"] is None and listed["r007"]["seconds"] == 0 and listed["r008"]["loss"] == 2.5
    for name in ("r000", "r003", "r006", "r008"):
        assert called("runs", "show", name).returncode == 0
    assert called("runs").returncode == 0


def test_without_runs_it_says_how_to_make_one(home):
    said = called("runs")
    assert said.returncode == 0 and "sojourn train" in said.stdout


def test_a_terminal_without_braille_gets_plain_characters(runs):
    import os

    said = sojourn(
        "runs", "show", runs[0].path.name, env={**os.environ, "PYTHONIOENCODING": "cp1252"}, encoding="cp1252"
    )
    assert said.returncode == 0 and "|" in said.stdout and "*" in said.stdout


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0], [1e-9, 1e9], [-1.0, 0.0], [3.0] * 5000], ids=str)
def test_any_losses_can_be_plotted(values):
    points = [(float(step), loss) for step, loss in enumerate(values, 1)]
    ET.fromstring(loss_svg("a <run> & more \x00", points, points[:1]))  # noqa: S314
    for braille in (True, False):
        lines = loss_text(points, width=20, height=4, braille=braille)
        assert len(lines) == (5 if values else 0) and all(len(line) <= 31 for line in lines)


def test_losses_that_are_no_numbers_are_left_out():
    lines = [{"kind": "train", "step": 1, "loss": value} for value in (None, "x", math.nan, math.inf, True, 10**400)]
    assert loss_points([*lines, {"kind": "train", "loss": 1.0}, {"kind": "eval", "step": 1, "loss": 2}], "train") == []


def test_the_plot_shows_the_curve():
    """Falling losses run from the upper left to the lower right."""
    lines = loss_text([(step, 10.0 - step) for step in range(1, 10)], width=9, height=9, braille=False)
    columns = [line.partition("|")[2] for line in lines[:-1]]
    assert columns[0].index("*") < columns[-1].index("*") and lines[0].strip().startswith("9 |")


def test_an_unwritable_plot_ends_nothing(tiny):
    words = tiny.words("train.steps=1")
    run = run_of(words)
    (run.path / "loss.svg").mkdir(parents=True)
    said = called("train", *words)
    assert said.returncode == 0 and "loss.svg" in said.stdout and RunFolder(run.path).has_final()
