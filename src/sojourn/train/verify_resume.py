"""Verifies resuming on a user's own run: train, kill, resume, and compare with a run that was not killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sojourn.config.load import to_yaml, with_settings
from sojourn.config.schema import RunConfig
from sojourn.errors import RunFailed
from sojourn.run.folder import RunFolder
from sojourn.run.home import prepared_folder
from sojourn.storage.files import read_json, read_json_lines, read_json_object

_TOLERANCE = 1e-3  # relative, of losses on a GPU: its sums have no fixed order
_LOG_TAIL = 1500  # characters


@dataclass(frozen=True)
class Verdict:
    """`difference`: the largest relative difference of the losses."""

    steps: int
    killed_at: int
    continued_from: int
    identical: bool
    difference: float
    device: str

    @property
    def holds(self) -> bool:
        return self.identical or (self.device != "cpu" and self.difference <= _TOLERANCE)

    @property
    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}

    @property
    def message(self) -> str:
        summary = (
            f"killed at step {self.killed_at}, resumed from step {self.continued_from}, {self.steps} steps in all: "
        )
        if self.identical:
            return f"{summary}the same weights, bit for bit, as without the kill"
        if self.holds:
            hint = "for the same bits: train.deterministic=on"
            return f"{summary}losses within {self.difference:.1e} of those without the kill ({hint})"
        return f"{summary}NOT the same: losses differ by {self.difference:.1e}"


def verify(config: RunConfig, steps: int, say: Callable[[str], None]) -> Verdict:
    every = max(1, steps // 4)
    with tempfile.TemporaryDirectory(prefix="sojourn-verify-") as scratch:
        runs = {}
        for name in ("undisturbed", "killed"):
            settings: dict[str, Any] = {
                "name": name, "save.folder": str(Path(scratch) / name), "save.resume": "auto", "save.mirror": None,
                "save.every_steps": every, "save.keep": 3, "log.every_steps": 1, "log.trackers": [],
                "train.steps": steps,
                "train.epochs": None, "train.tokens": None, "train.eval_every": None, "train.patience": None,
                "limits.budget": None, "limits.time": None,
            }  # fmt: skip
            file = Path(scratch) / f"{name}.yaml"
            file.write_text(to_yaml(with_settings(config, settings)), encoding="utf-8")
            runs[name] = RunFolder(Path(scratch) / name)
        say(f"training {steps} steps undisturbed")
        _train(Path(scratch) / "undisturbed.yaml")
        say(f"training them again, to be killed after step {every}")
        killed_at = _train_and_kill(Path(scratch) / "killed.yaml", runs["killed"], every)
        say(f"killed at step {killed_at}; resuming")
        _train(Path(scratch) / "killed.yaml")
        return compare(runs["undisturbed"], runs["killed"], steps, killed_at)


def _start(file: Path) -> subprocess.Popen[str]:
    home = os.environ.get("SOJOURN_HOME", str(prepared_folder().parent.resolve()))
    return subprocess.Popen(
        [sys.executable, "-m", "sojourn", "train", str(file)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "SOJOURN_HOME": home},
    )  # fmt: skip


def _train(file: Path) -> None:
    process = _start(file)
    output, _ = process.communicate()
    if process.returncode != 0:
        raise RunFailed(f"training failed: {output.strip()[-_LOG_TAIL:]}")


def _train_and_kill(file: Path, run: RunFolder, after: int) -> int:
    """Kills the run one step or more after its first checkpoint; returns the step."""
    process = _start(file)
    try:
        while process.poll() is None:
            saved = any(event["kind"] == "saved" for event in read_json_lines(run.events))
            step = _step(run)
            if saved and step > after:
                break
            time.sleep(0.002)
        if process.poll() == 0:
            raise RunFailed("the run ended before it could be killed; train more steps: --steps 100")
        if process.poll() is not None:
            raise RunFailed(
                f"training failed: {(process.stdout.read() if process.stdout else '').strip()[-_LOG_TAIL:]}"
            )
    finally:
        _kill_all(process)
    return _step(run)


def _kill_all(process: subprocess.Popen[str]) -> None:
    """Kills the process and its children."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        for one in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.communicate()


def _step(run: RunFolder) -> int:
    return max((line["step"] for line in run.read_metrics() if line.get("kind") == "train"), default=0)


def compare(undisturbed: RunFolder, killed: RunFolder, steps: int, killed_at: int) -> Verdict:
    """Compares a run that was not killed with one that was killed and resumed, after the same number of steps."""
    curves = [
        {line["step"]: line["loss"] for line in run.read_metrics() if line.get("kind") == "train"}
        for run in (undisturbed, killed)
    ]
    differences = [_relative(curves[0].get(step), curves[1].get(step)) for step in range(1, steps + 1)]
    starts = [event["step"] for event in read_json_lines(killed.events) if event["kind"] == "start"]
    manifests = [read_json(run.checkpoints / f"step-{steps:08d}" / "manifest.json") for run in (undisturbed, killed)]
    parts = ("model.safetensors", "optimizer.safetensors")
    identical = all(manifests) and all(manifests[0][part]["sha256"] == manifests[1][part]["sha256"] for part in parts)
    device = str(read_json_object(killed.environment).get("device", "cpu"))
    return Verdict(steps, killed_at, starts[-1], identical, max(differences), device)


def _relative(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return float("inf")
    return abs(one - other) / max(abs(one), 1e-12)
