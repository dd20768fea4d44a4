"""How long a run is: steps and tokens, as `prepare` and `train` would count them."""

from __future__ import annotations

from dataclasses import dataclass

from sojourn.config.messages import printable
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.plan.epoch import NAME_DATA, Epoch, measure_epoch
from sojourn.resolve.run_steps import run_steps

_ASSUMED_STEPS = 1000


@dataclass(frozen=True)
class RunLength:
    """`tokens`: without padding.

    epoch    one epoch of the data, where its size is known
    exact    the run takes just so many steps
    assumed  why the length had to be assumed, if it had
    notes    what to know of the data besides
    """

    steps: int
    tokens: int
    epoch: Epoch | None = None
    exact: bool = False
    assumed: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Quantiles of the tokens of documents; none where nothing is known of them."""
        return self.epoch.lengths if self.epoch else ()


def run_length(config: RunConfig, vocab: int) -> RunLength:
    """`vocab`: of the model, for tokens that must be estimated."""
    train = config.train
    is_given = train.steps is not None or train.tokens is not None
    epoch, notes = None, tuple[str, ...]()
    try:
        epoch = measure_epoch(config, vocab)
    except UserError as error:
        if not is_given:
            raise
        notes = (f"the data was not measured: {error}",)
    if epoch is None:
        return _unmeasured(config, notes)
    row_tokens = epoch.tokens / epoch.rows
    steps, last_row = run_steps(train, round(epoch.rows), row_tokens)
    tokens = round(row_tokens * (last_row or steps * train.global_batch))
    exact, assumed = train.steps is not None or epoch.exact, None if is_given else epoch.assumed
    return RunLength(steps, tokens, epoch, exact, assumed, epoch.notes)


def _unmeasured(config: RunConfig, notes: tuple[str, ...]) -> RunLength:
    train, full_row = config.train, config.data.max_length
    if train.steps is not None or train.tokens is not None:
        steps, _ = run_steps(train, 1, full_row)
        return RunLength(steps, steps * train.global_batch * full_row, exact=train.steps is not None, notes=notes)
    named = [source.path for source in config.data.sources]
    unknown = f"the size of {printable(', '.join(named))} is not known here" if named else "no data is named"
    fix = "give train.tokens or train.steps" if named else NAME_DATA
    assumed = f"{unknown}, so {_ASSUMED_STEPS:,} steps are assumed; {fix}"
    return RunLength(_ASSUMED_STEPS, _ASSUMED_STEPS * train.global_batch * full_row, assumed=assumed, notes=notes)
