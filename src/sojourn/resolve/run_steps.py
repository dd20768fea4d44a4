"""How many steps a run has, from the rows of its data: plans and runs count alike."""

from __future__ import annotations

import math

from sojourn.config.schema import TrainConfig


def run_steps(train: TrainConfig, rows: int, tokens_per_row: float) -> tuple[int, int | None]:
    """The number of steps, and the row (counted over all epochs) that ends the run, if it ends by epochs."""
    if train.steps is not None:
        return train.steps, None
    if train.tokens is not None:
        return max(1, round(train.tokens / (train.global_batch * max(1.0, tokens_per_row)))), None
    last_row = max(1, round((train.epochs or 1.0) * rows))
    return math.ceil(last_row / train.global_batch), last_row
