"""Two Kaggle sessions for real: the script that Kaggle runs, a bundle as its data set, the first one's outputs as the
second one's input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared import write_chats
from sojourn.config.load import load_run
from sojourn.remote.bundle import Bundle, make_bundle
from sojourn.remote.platforms.kaggle import KaggleRun, boot_script

RUN = (
    "smoke", "model.d_model=64", "data.vocab_size=400", "data.sources=my.jsonl", "data.max_length=64",
    "train.global_batch=8", "train.device=cpu", "train.precision=fp32", "train.rehearse=off", "log.tensorboard=off",
    "log.every_steps=1", "train.steps=300", "save.every_steps=10", "limits.session=off", "name=demo",
)  # fmt: skip


def _session(folder: Path, number: int) -> tuple[subprocess.Popen[str], Path]:
    """A machine with its own /kaggle and /tmp."""
    script = folder / f"boot{number}.py"
    script.write_text(boot_script(KaggleRun("demo", "ada", "sojourn-demo", number, 12.0, 0.0)), encoding="utf-8")
    working, home = folder / f"working{number}", folder / f"home{number}"
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SOJOURN_HOME")}
    env = {
        **clean, "OMP_NUM_THREADS": "1", "SOJOURN_KAGGLE_INPUT": str(folder / "input"),
        "SOJOURN_KAGGLE_WORKING": str(working), "SOJOURN_KAGGLE_HOME": str(home),
    }  # fmt: skip
    argv = [sys.executable, str(script)]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), working


def _stop(made: Bundle, home: Path) -> None:
    subprocess.run([sys.executable, str(made.path), "--home", str(home), "--stop"], check=True, capture_output=True)


@pytest.mark.skipif(sys.platform != "linux", reason="Kaggle's machines run Linux")
def test_a_second_session_continues_the_first(home: Path, tmp_path: Path) -> None:
    write_chats(home / "my.jsonl")
    made = make_bundle(load_run(list(RUN)), tmp_path / "input" / "datasets" / "bundle.sojourn", platform="kaggle")
    first, working = _session(tmp_path, 1)
    while not any(working.glob("runs/demo/checkpoints/step-*/manifest.json")):
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.02)
    _stop(made, tmp_path / "home1")
    output, _ = first.communicate(timeout=600)
    result = json.loads((working / "sojourn-result.json").read_text())
    assert (first.returncode, result["state"]) == (0, "stopped"), output
    assert any("checkpoints/step-" in name for name in result["files"])
    assert sorted(path.name for path in working.iterdir()) == ["runs", "sojourn-result.json"]
    shutil.move(working, tmp_path / "input" / "sojourn-demo-s1")
    second, working = _session(tmp_path, 2)
    output, _ = second.communicate(timeout=600)
    result = json.loads((working / "sojourn-result.json").read_text())
    assert (second.returncode, result["state"]) == (0, "done"), output
    assert "continuing from" in output and "resum" in output
    assert "runs/demo/final/model.safetensors" in result["files"]
    lines = [json.loads(line) for line in (working / "runs/demo/metrics.jsonl").read_text().splitlines()]
    steps = {line["step"] for line in lines if line.get("kind") == "train"}
    assert steps == set(range(1, 301))
