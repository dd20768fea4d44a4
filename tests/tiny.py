"""Runs of about a second that tests disturb on purpose. One home for all tests of a file, so that data is prepared once
and each undisturbed run, to compare with, is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from budget import shared_cost
from shared import Shared, write_chats
from sojourn.config.load import load_run
from sojourn.run.folder import RunFolder
from sojourn.run.home import run_folder
from sojourn.storage.files import read_json_lines
from sojourn.train import steps as steps_module
from sojourn.train.faults.guard import Guard
from sojourn.train.loop import train
from sojourn.train.step import Stepper

LORA = ("method.kind=lora", "method.rank=4", "train.lr=1e-3")


@dataclass
class Tiny:
    home: Path
    shared: Shared
    _whole: dict[tuple[str, ...], RunFolder] = field(default_factory=dict)
    _count: int = 0

    @cached_property
    def chats(self) -> Path:
        return write_chats(self.home / "chats.jsonl")

    @cached_property
    def base(self) -> Path:
        return self.shared.copy_base(self.home)

    def words(self, *extra: str) -> list[str]:
        """The command line of a new run: 12 steps of 8 rows, in 32 bits on a CPU, saved at the end alone."""
        self._count += 1
        existing = any(word.startswith("method.kind=") for word in extra)
        model = [f"model.base={self.base}"] if existing else ["smoke", "model.d_model=64", "data.vocab_size=400"]
        return [
            *model, f"data.sources={self.chats}", "data.max_length=64", "train.global_batch=8", "train.steps=12",
            "train.device=cpu", "train.precision=fp32", "train.rehearse=off", "limits.session=off", "log.every_steps=1",
            "log.tensorboard=off", f"name=r{self._count}", *extra,
        ]  # fmt: skip

    def whole(self, *extra: str) -> RunFolder:
        """The same run left in peace."""
        if extra not in self._whole:
            with shared_cost():
                self._whole[extra] = run_train(self.words(*extra))
        return self._whole[extra]


@contextmanager
def tiny_home(folder: Path, shared: Shared) -> Iterator[Tiny]:
    shared.copy_prepared(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOJOURN_HOME", str(folder))
        patch.chdir(folder)
        yield Tiny(folder, shared)


def run_of(words: list[str]) -> RunFolder:
    return run_folder(str(load_run(words).config.name))


def run_train(words: list[str]) -> RunFolder:
    config = load_run(words).config
    run = run_folder(str(config.name))
    train(config, run)
    return run


def stop_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """A limit is reached when this call has made so many steps."""
    counts, made = steps_module._count_step, []

    def count(*arguments: Any) -> None:
        counts(*arguments)
        made.append(1)

    patch.setattr(steps_module, "_count_step", count)
    patch.setattr(Guard, "should_stop", lambda self: "a test" if len(made) >= steps else None)


def after_step(patch: pytest.MonkeyPatch, actions: dict[int, Callable[[], Any]]) -> None:
    """After so many steps of this call, in the training's own thread."""
    real, made = Stepper.update, []

    def update(self: Stepper) -> None:
        real(self)
        made.append(1)
        actions.get(len(made), lambda: None)()

    patch.setattr(Stepper, "update", update)


def losses(run: RunFolder) -> list[float]:
    return [line["loss"] for line in run.read_metrics() if line["kind"] == "train"]


def events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(run.events) if line["kind"] == kind]


def weights(run: RunFolder) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(next(run.final.glob("*model.safetensors")))


def saved_steps(run: RunFolder) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.checkpoints.glob("step-*"))


def same_weights(one: RunFolder, other: RunFolder) -> bool:
    import torch

    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
