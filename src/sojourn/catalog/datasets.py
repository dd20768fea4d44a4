"""Short names of data sets on the Hugging Face Hub."""

from dataclasses import dataclass, field
from pathlib import Path

from sojourn.catalog.tables import load_rows, to_row
from sojourn.config.messages import did_you_mean
from sojourn.errors import UserError

LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class DatasetFacts:
    """A short name for a data set on the hub: where it is, which part of it, our names for its columns, its size."""

    name: str
    hub: str
    source: str
    date: str
    config: str | None = None
    split: str = "train"
    eval_split: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    lines: bool = False
    documents: int | None = None
    text_bytes: int | None = None
    language: str = "en"
    description: str = ""


def datasets(user: Path | None = None) -> tuple[DatasetFacts, ...]:
    """Every data set that has a short name."""
    return tuple(
        _dataset(name, row, f"{where}: dataset.{name}") for name, (row, where) in load_rows("dataset", user).items()
    )


def _dataset(name: str, row: dict[str, object], where: str) -> DatasetFacts:
    from sojourn.config.data import Columns  # pydantic, which finding the run folder does without

    facts = to_row(DatasetFacts, {"name": name, **row}, where, "data set")
    if facts.language not in LANGUAGES:
        raise UserError(f"{where}: `language` is {facts.language}; known: {', '.join(LANGUAGES)}")
    if (facts.documents is None) != (facts.text_bytes is None):
        raise UserError(f"{where}: `documents` and `text_bytes` go together")
    for key in facts.columns:
        if key not in Columns.model_fields:
            raise UserError(f"{where}: `columns`: unknown name `{key}`{did_you_mean(key, Columns.model_fields)}")
    return facts
