"""A LoRA of a real model (`SOJOURN_REAL_MODEL`), trained for a few steps by the real command, and the prompts that its
exports answer."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conftest import sojourn
from sojourn.run.folder import RunFolder

REAL = os.environ.get("SOJOURN_REAL_MODEL", "")
needs_model = pytest.mark.skipif(not Path(REAL).is_dir() or not REAL, reason="SOJOURN_REAL_MODEL names no folder")
TOKENS = 64  # of greedy text
PROMPTS = tuple(f"Tell me about the number {number}." for number in range(10)) + tuple(
    f"Write a sentence about {thing}."
    for thing in ("cats", "rain", "Paris", "bread", "the sea", "trains", "snow", "books", "tea", "mountains")
)
_HOUR = 3600
_RUN = (
    "data.sources=builtin:instructions", "data.take=60", "data.eval_fraction=0", "data.max_length=128",
    "train.steps=15", "train.global_batch=4", "method.kind=lora", "train.lr=1e-3", "train.rehearse=off", "name=lora",
)  # fmt: skip


@dataclass(frozen=True)
class RealLora:
    home: Path
    name: str = "lora"

    @property
    def final(self) -> Path:
        return RunFolder(self.home / "runs" / self.name).final

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = sojourn(*arguments, env={**os.environ, "SOJOURN_HOME": str(self.home)}, timeout=_HOUR)
        assert done.returncode == 0, done.stderr
        return done

    def export(self, verb: str, model: str, out: Path, *more: str) -> dict[str, Any]:
        """What the gate found."""
        gate: dict[str, Any] = json.loads(self.command(verb, model, "--out", str(out), "--json", *more).stdout)["gate"]
        assert gate["passed"], gate
        return gate


def train_lora(home: Path) -> RealLora:
    made = RealLora(home)
    made.command("train", f"model.base={REAL}", *_RUN)
    return made
