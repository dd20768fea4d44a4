"""Which objective trains a run: decided by what the rows of its data hold."""

from __future__ import annotations

from collections.abc import Callable

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.errors import UserError
from sojourn.train.objective.base import Objective
from sojourn.train.objective.supervised import make_supervised

# By the artefact's `kind`: "rows" of documents, or "pairs": rows of chosen, rejected, chosen, rejected, …
OBJECTIVES: dict[str, Callable[[RunConfig], Objective]] = {"rows": make_supervised}


def make_objective(config: RunConfig, artefact: Artefact) -> Objective:
    make = OBJECTIVES.get(artefact.facts["kind"])
    if make is None:
        raise UserError(
            "data.sources: training on preference pairs is not supported yet; to train on the chosen answers alone: "
            "data.columns.prompt=prompt data.columns.completion=chosen"
        )
    return make(config)
