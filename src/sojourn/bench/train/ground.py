"""The common ground of a workload, made once: weights, an adapter, a tokenizer, and the rows that all read.

FOLDER/
  SHAPE-HASH/       base/ (weights and tokenizer), adapter/, data.jsonl
  home/prepared/    the rows
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sojourn.bench.train.texts import identity, write_data
from sojourn.bench.train.workloads import Workload
from sojourn.errors import RunFailed

_VOCABULARY = 32_000  # of the tokenizer; a model's own may be larger
_TRAINED_ON = 4_000_000
_BYTES_A_TOKEN = 6  # more than any of the texts has, so that rows suffice
_USUAL_STEPS = 25
_SMALLEST, _LARGEST, _LARGEST_OWN = 300_000, 16_000_000, 100_000_000  # bytes of data
ALPHA = 2  # over the rank


@dataclass(frozen=True)
class Ground:
    workload: Workload
    folder: Path
    home: Path

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def adapter(self) -> Path:
        return self.folder / "adapter"

    @property
    def data(self) -> Path:
        return self.folder / "data.jsonl"


def folder_of(workload: Workload, steps: int, work: Path, own: str | None = None) -> Path:
    """Workloads that start from the same weights and read the same data share it."""
    shape, size = workload.shape, _size(workload, steps, own)
    facts = [2, asdict(shape), workload.documents, workload.row_length, workload.rank, size, identity(own)]
    says = json.dumps(facts)
    return work / f"{shape.family}-{shape.parameters / 1e6:.0f}m-{hashlib.sha256(says.encode()).hexdigest()[:8]}"


def lay(workload: Workload, steps: int, device: str, work: Path, own: str | None = None) -> Ground:
    """Finds what an earlier call left, or makes it whole; `own` are texts or chats of the user's."""
    folder = folder_of(workload, steps, work, own)
    ground = Ground(workload, folder, work / "home")
    if folder.is_dir():
        return ground
    stage = work / f".stage-{os.getpid()}-{folder.name}"
    try:
        stage.mkdir(parents=True)
        made = Ground(workload, stage, ground.home)
        write_data(workload, made.data, _size(workload, steps, own), own)
        _write_tokenizer(workload, made)
        _write_weights(made, device)
        stage.rename(folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return ground


def _size(workload: Workload, steps: int, own: str | None) -> int:
    """Bytes of data; short runs have the same, so that they share the rest too."""
    tokens = workload.rows * workload.row_length * max(steps, _USUAL_STEPS)
    return min(_LARGEST if own is None else _LARGEST_OWN, max(_SMALLEST, tokens * _BYTES_A_TOKEN))


def settings(ground: Ground, steps: int, every: int, device: str) -> dict[str, Any]:
    """The run as a user would write it. No warm-up and a constant rate: every peer can do that."""
    workload = ground.workload
    method: dict[str, Any] = {"kind": workload.method}
    if workload.adapters:
        method |= {"rank": workload.rank, "alpha": ALPHA * workload.rank, "adapter": str(ground.adapter.absolute())}
    return {
        "model": {"base": str(ground.base.absolute())},
        "method": method,
        "data": {"sources": [str(ground.data.absolute())], "max_length": workload.row_length, "eval_fraction": 0},
        "train": {
            "steps": steps, "global_batch": workload.rows, "micro_batch": workload.micro_batch, "lr": workload.lr,
            "weight_decay": workload.weight_decay, "beta1": 0.9, "beta2": 0.95, "clip": 1.0, "seed": 0,
            "device": device, "warmup": 0, "schedule": "constant",
        },
        "save": {"every": "24h", "keep": 1},
        "log": {"every_steps": every, "tensorboard": "off"},
    }  # fmt: skip


def rows_of(ground: Ground, run: Path) -> Path:
    """The prepared artefact of the run in the file `run`: the one that `sojourn train` will find."""
    from sojourn.config.load import load_run
    from sojourn.data.inputs import data_settings
    from sojourn.data.prepare import prepare

    config = load_run([str(run)]).config
    return prepare(data_settings(config), ground.home / "prepared", split_digits=config.advanced.split_digits).path


def _write_tokenizer(workload: Workload, ground: Ground) -> None:
    from sojourn.config.data import DataConfig
    from sojourn.data.tokenize.tokenizer import train_tokenizer

    size = min(_VOCABULARY, workload.shape.vocab)
    words = train_tokenizer(DataConfig.model_validate({"vocab_size": size}), _texts(ground.data), ground.folder)
    words.save(ground.base, words.template("chatml"), workload.row_length)


def _texts(path: Path) -> Iterator[str]:
    read = 0
    with path.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            text = record.get("text") or "\n".join(turn["content"] for turn in record["messages"])
            yield from text[:_TRAINED_ON].split("\n\n")
            read += len(text)
            if read > _TRAINED_ON:
                return


def _write_weights(ground: Ground, device: str) -> None:
    """In a process of its own: this one must not hold memory of the GPU."""
    from sojourn.bench.memory import watched

    task, log = ground.folder / "task.json", ground.folder / "log.txt"
    facts = {
        "shape": asdict(ground.workload.shape), "settings": ground.workload.shape.settings, "device": device,
        "length": ground.workload.row_length, "base": str(ground.base),
        "adapter": str(ground.adapter) if ground.workload.documents == "chats" and find_spec("peft") else None,
        "rank": ground.workload.rank, "alpha": ALPHA * ground.workload.rank,
    }  # fmt: skip
    task.write_text(json.dumps(facts), encoding="utf-8")
    command = [sys.executable, "-c", "from sojourn.bench.train.weights import main; main()", str(task)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    if watched(command, environment, log)[0]:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise RunFailed(f"{ground.workload.name}: the weights could not be written: {(said or ['nothing said'])[-1]}")
    task.unlink()
    log.unlink()
