"""How long a run is: steps and tokens, from its settings and the sizes of its files, which are weighed, not read."""

from __future__ import annotations

from pathlib import Path

from sojourn.config.schema import DataConfig, RunConfig
from sojourn.errors import UserError

_BYTES_PER_TOKEN = 4.0
_TOKENS_PER_TASK = 30
_ASSUMED_STEPS = 1000


def estimate_tokens(data: DataConfig) -> int:
    """Of one epoch."""
    total = 0.0
    for source in data.sources:
        if source.path.startswith("builtin:instructions"):
            total += source.weight * int(source.take or 20_000) * _TOKENS_PER_TASK
        elif source.path.startswith("builtin:text"):
            total += source.weight * int(source.size or 10_000_000) / _BYTES_PER_TOKEN
        else:
            total += source.weight * _bytes_at(Path(source.path).expanduser()) / _BYTES_PER_TOKEN
    return int(total)


def _bytes_at(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if not path.is_file():
        raise UserError(
            f"data.sources: {path}: no such file, so its size is not known; give train.tokens or train.steps"
        )
    return path.stat().st_size


def length_of(config: RunConfig) -> tuple[int, int, str | None]:
    """Steps and tokens of the whole run, and what was assumed of it, if anything was."""
    train = config.train
    per_step = train.global_batch * config.data.max_length
    if train.steps is not None:
        return train.steps, train.steps * per_step, None
    if not config.data.sources and train.tokens is None:
        assumed = (
            f"no data is named, so {_ASSUMED_STEPS:,} steps are assumed; give data.sources, train.tokens or train.steps"
        )
        return _ASSUMED_STEPS, _ASSUMED_STEPS * per_step, assumed
    tokens = (
        int(train.tokens) if train.tokens is not None else int((train.epochs or 1.0) * estimate_tokens(config.data))
    )
    return max(1, round(tokens / per_step)), tokens, None
