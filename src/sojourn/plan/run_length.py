"""How long a run is: steps and tokens, from its settings and the sizes of its files. No file is opened."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sojourn.catalog.datasets import datasets
from sojourn.config.data import COMPRESSION_RATIO, DataConfig
from sojourn.config.messages import printable
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError

BYTES_PER_TOKEN = 4.0
_TOKENS_PER_TASK = 30
_ASSUMED_STEPS = 1000
_FIX = "give data.sources, train.tokens or train.steps"
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".parquet")
_NAMED = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?::[^/\\:]+)?", re.ASCII)  # ORG/NAME
_FILES = (*_COMPRESSED, ".json", ".jsonl", ".ndjson", ".txt", ".text", ".md", ".csv", ".tsv", ".zip", ".tar")


def estimate_tokens(data: DataConfig) -> int:
    """Of one epoch."""
    total = 0.0
    for source in data.sources:
        if source.path.startswith("builtin:instructions"):
            total += source.weight * int(source.take or 20_000) * _TOKENS_PER_TASK
        elif source.path.startswith("builtin:text"):
            total += source.weight * int(source.size or 10_000_000) / BYTES_PER_TOKEN
        else:
            total += source.weight * _bytes_at(Path(source.path).expanduser()) / BYTES_PER_TOKEN
    return int(total)


def _bytes_at(path: Path) -> int:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    if path.exists() and not files:
        raise UserError(f"data.sources: {path}: an empty folder; name another, or give train.tokens or train.steps")
    if not all(file.is_file() for file in files):
        raise UserError(
            f"data.sources: {path}: no such file or data set; correct it, or give train.tokens or train.steps"
        )
    return sum(file.stat().st_size * (COMPRESSION_RATIO if file.suffix.lower() in _COMPRESSED else 1) for file in files)


def _remote_source(data: DataConfig) -> str | None:
    """The first source that is a data set's name, whose size is not known here."""
    short = {_plain(row.name) for row in datasets()}
    for source in data.sources:
        word = source.path
        if word.startswith("builtin:") or Path(word).expanduser().exists():
            continue
        named = _plain(word.partition(":")[0]) in short or word.startswith("hub:")
        if named or (_NAMED.fullmatch(word) and Path(word).suffix.lower() not in _FILES):
            return word
    return None


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


@dataclass(frozen=True)
class RunLength:
    """`assumed`: why the length had to be assumed, if it had."""

    steps: int
    tokens: int
    assumed: str | None = None


def run_length(config: RunConfig) -> RunLength:
    train = config.train
    per_step = train.global_batch * config.data.max_length
    if train.steps is not None:
        return RunLength(train.steps, train.steps * per_step)
    if train.tokens is None:
        unknown = "no data is named" if not config.data.sources else None
        if unknown is None and (there := _remote_source(config.data)):
            unknown = f"the size of {printable(there)} is not known here"
        if unknown is not None:
            fix = "give train.tokens or train.steps" if config.data.sources else _FIX
            assumed = f"{unknown}, so {_ASSUMED_STEPS:,} steps are assumed; {fix}"
            return RunLength(_ASSUMED_STEPS, _ASSUMED_STEPS * per_step, assumed)
    tokens = (
        int(train.tokens) if train.tokens is not None else int((train.epochs or 1.0) * estimate_tokens(config.data))
    )
    return RunLength(max(1, round(tokens / per_step)), tokens)
