"""The files that all rows of a workload share, made once: weights, adapter, tokenizer, data and prepared rows.

FOLDER/
  SHAPE-HASH/       base/ (weights and tokenizer), adapter/, data.jsonl
  home/prepared/    the prepared rows
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

from sojourn.bench.train.training_data import data_fingerprint, write_data
from sojourn.bench.train.workloads import Workload
from sojourn.errors import RunFailed

_TOKENIZER_VOCAB = 32_000  # a model's own vocabulary may be larger
_TOKENIZER_BYTES = 4_000_000  # of text that the tokenizer is trained on
_BYTES_PER_TOKEN = 6  # an upper bound, so that there are enough rows
_DEFAULT_STEPS = 25
_MIN_BYTES, _MAX_BYTES, _MAX_OWN_BYTES = 300_000, 16_000_000, 100_000_000  # of data
ALPHA_PER_RANK = 2  # lora_alpha / r


@dataclass(frozen=True)
class WorkloadFiles:
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


def files_folder(workload: Workload, steps: int, work: Path, own: str | None = None) -> Path:
    """Workloads with the same weights and the same data share a folder."""
    shape, size = workload.shape, _size(workload, steps, own)
    facts = [2, asdict(shape), workload.documents, workload.row_length, workload.rank, size, data_fingerprint(own)]
    key = json.dumps(facts)
    return work / f"{shape.family}-{shape.parameters / 1e6:.0f}m-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def make_files(workload: Workload, steps: int, device: str, work: Path, own: str | None = None) -> WorkloadFiles:
    """Reuses the files of an earlier call, or makes all of them; `own`: the user's texts or chats."""
    folder = files_folder(workload, steps, work, own)
    files = WorkloadFiles(workload, folder, work / "home")
    if folder.is_dir():
        return files
    stage = work / f".stage-{os.getpid()}-{folder.name}"
    try:
        stage.mkdir(parents=True)
        made = WorkloadFiles(workload, stage, files.home)
        write_data(workload, made.data, _size(workload, steps, own), own)
        _write_tokenizer(workload, made)
        _write_weights(made, device)
        stage.rename(folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return files


def _size(workload: Workload, steps: int, own: str | None) -> int:
    """Bytes of data; the same for all short runs, so that they share their files."""
    tokens = workload.rows * workload.row_length * max(steps, _DEFAULT_STEPS)
    return min(_MAX_BYTES if own is None else _MAX_OWN_BYTES, max(_MIN_BYTES, tokens * _BYTES_PER_TOKEN))


def run_settings(files: WorkloadFiles, steps: int, every: int, device: str) -> dict[str, Any]:
    """The run's configuration. No warm-up and a constant learning rate, which every peer supports."""
    workload = files.workload
    method: dict[str, Any] = {"kind": workload.method}
    if workload.has_adapters:
        method |= {
            "rank": workload.rank,
            "alpha": ALPHA_PER_RANK * workload.rank,
            "adapter": str(files.adapter.absolute()),
        }
    return {
        "model": {"base": str(files.base.absolute())},
        "method": method,
        "data": {"sources": [str(files.data.absolute())], "max_length": workload.row_length, "eval_fraction": 0},
        "train": {
            "steps": steps, "global_batch": workload.rows, "micro_batch": workload.micro_batch, "lr": workload.lr,
            "weight_decay": workload.weight_decay, "beta1": 0.9, "beta2": 0.95, "clip": 1.0, "seed": 0,
            "device": device, "warmup": 0, "schedule": "constant",
        },
        "save": {"every": "24h", "keep": 1},
        "log": {"every_steps": every, "tensorboard": "off"},
    }  # fmt: skip


def prepare_rows(files: WorkloadFiles, run: Path) -> Path:
    """The prepared artefact that `sojourn train RUN` will use."""
    from sojourn.config.load import load_run
    from sojourn.data.prepare import prepare_run

    config = load_run([str(run)]).config
    return prepare_run(config, files.home / "prepared").path


def _write_tokenizer(workload: Workload, files: WorkloadFiles) -> None:
    from sojourn.config.data import DataConfig
    from sojourn.data.tokenize.tokenizer import train_tokenizer

    size = min(_TOKENIZER_VOCAB, workload.shape.vocab)
    bundle = train_tokenizer(DataConfig.model_validate({"vocab_size": size}), _texts(files.data), files.folder)
    bundle.save(files.base, bundle.template("chatml"), workload.row_length)


def _texts(path: Path) -> Iterator[str]:
    read = 0
    with path.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            text = record.get("text") or "\n".join(turn["content"] for turn in record["messages"])
            yield from text[:_TOKENIZER_BYTES].split("\n\n")
            read += len(text)
            if read > _TOKENIZER_BYTES:
                return


def _write_weights(files: WorkloadFiles, device: str) -> None:
    """In its own process: this one must not hold GPU memory."""
    from sojourn.bench.process_memory import run_sampled

    task, log = files.folder / "task.json", files.folder / "log.txt"
    facts = {
        "shape": asdict(files.workload.shape), "settings": files.workload.shape.settings, "device": device,
        "length": files.workload.row_length, "base": str(files.base),
        "adapter": str(files.adapter) if files.workload.documents == "chats" and find_spec("peft") else None,
        "rank": files.workload.rank, "alpha": ALPHA_PER_RANK * files.workload.rank,
    }  # fmt: skip
    task.write_text(json.dumps(facts), encoding="utf-8")
    command = [sys.executable, "-c", "from sojourn.bench.train.random_weights import main; main()", str(task)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    if run_sampled(command, environment, log)[0]:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise RunFailed(f"{files.workload.name}: the weights could not be written: {(lines or ['no output'])[-1]}")
    task.unlink()
    log.unlink()
