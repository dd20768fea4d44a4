"""Which objective trains a run: decided by what the rows of its data hold."""

from __future__ import annotations

from collections.abc import Callable

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.data.inputs import open_inputs
from sojourn.data.settings import data_settings
from sojourn.data.sources.chunks import parse_record
from sojourn.errors import UserError
from sojourn.train.objective.base import Objective
from sojourn.train.objective.supervised import make_supervised

# By the artefact's `kind`: "rows" of documents, or "pairs": rows of chosen, rejected, chosen, rejected, …
OBJECTIVES: dict[str, Callable[[RunConfig], Objective]] = {"rows": make_supervised}


def make_objective(config: RunConfig, artefact: Artefact) -> Objective:
    make = OBJECTIVES.get(artefact.facts["kind"])
    if make is None:
        raise UserError(f"data.sources: training on preference pairs is not supported yet{_chosen_alone(config)}")
    return make(config)


def _chosen_alone(config: RunConfig) -> str:
    """How to train on the chosen answers, with the columns that the first source has; empty where there is no way."""
    chunk = next(open_inputs(data_settings(config), lambda line: None).sources[0].chunks(), None)
    if chunk is None or not chunk.records:
        return ""
    record, columns = parse_record(chunk.records[0]), config.data.columns
    chosen = next((name for name in (columns.chosen, "chosen", "chosen_messages") if name in record), None)
    prompts = (columns.prompt, "prompt", "instruction", "question")
    prompt = next((name for name in prompts if name in record and isinstance(record[name], str)), None)
    if chosen is None:
        return ""
    if isinstance(record[chosen], list) and len(record[chosen]) > 1:
        return f"; to train on the chosen answers alone: data.columns.messages={chosen}"
    if prompt is None or not isinstance(record[chosen], str):
        return ""
    columns_given = f"data.columns.prompt={prompt} data.columns.completion={chosen}"
    return f"; to train on the chosen answers alone: {columns_given}"
