"""A machine that is lost with its disk: the same line on the next one goes on from the mirror (Colab, SkyPilot)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared import write_chats
from sojourn.config.load import load_run
from sojourn.remote.bundle import Bundle, make_bundle

RUN = (
    "smoke", "model.d_model=64", "data.vocab_size=400", "data.sources=my.jsonl", "data.max_length=64",
    "train.global_batch=8", "train.device=cpu", "train.precision=fp32", "train.rehearse=off", "log.tensorboard=off",
    "limits.session=off", "log.every_steps=1", "train.steps=200", "save.every_steps=10",
)  # fmt: skip


def _start(made: Bundle, home: Path, *flags: str) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("SOJOURN_HOME", "PYTHONPATH")}
    argv = [sys.executable, str(made.path.resolve()), "--home", str(home), *flags]
    return subprocess.Popen(
        argv, env={**env, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, cwd="/",
    )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="the start script runs on rented Linux machines")
def test_a_lost_machine_is_continued_from_the_mirror_with_the_same_weights(home: Path, tmp_path: Path) -> None:
    write_chats(home / "my.jsonl")
    mirror = tmp_path / "drive"
    settings = {"save.mirror": str(mirror)}
    made = make_bundle(load_run(list(RUN)), settings=settings, mirror_disks=(str(mirror),))
    mirror.mkdir()
    first = tmp_path / "first machine"
    trainer = _start(made, first, "--train")
    while not any(mirror.rglob("step-*/.mirror.json")):
        assert trainer.poll() is None, trainer.stdout and trainer.stdout.read()
        time.sleep(0.02)
    os.killpg(trainer.pid, signal.SIGKILL)
    trainer.wait()
    assert not (first / "runs" / made.run / "final").exists()
    shutil.rmtree(first)
    second = _start(made, tmp_path / "second machine", "--train")
    output, _ = second.communicate(timeout=600)
    assert second.returncode == 0, output
    assert "resum" in output
    shutil.move(mirror, tmp_path / "kept")
    mirror.mkdir()
    whole = _start(made, tmp_path / "undisturbed", "--train")
    assert whole.communicate(timeout=600) and whole.returncode == 0
    weights = [
        tmp_path / name / "runs" / made.run / "final" / "model.safetensors"
        for name in ("second machine", "undisturbed")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
