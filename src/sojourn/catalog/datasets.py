"""Short names of data sets on the Hugging Face Hub."""

from dataclasses import dataclass, field
from pathlib import Path

from sojourn.catalog.tables import load_rows, to_row
from sojourn.config.messages import did_you_mean
from sojourn.errors import UserError


@dataclass(frozen=True)
class DatasetFacts:
    """A short name for a data set on the hub: where it is, which part of it, and our names for its columns."""

    name: str
    hub: str
    source: str
    date: str
    config: str | None = None
    split: str = "train"
    eval_split: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    lines: bool = False
    description: str = ""


def datasets(user: Path | None = None) -> tuple[DatasetFacts, ...]:
    """Every data set that has a short name."""
    return tuple(
        _dataset(name, row, f"{where}: dataset.{name}") for name, (row, where) in load_rows("dataset", user).items()
    )


def _dataset(name: str, row: dict[str, object], where: str) -> DatasetFacts:
    from sojourn.config.data import Columns  # pydantic, which finding the run folder does without

    facts = to_row(DatasetFacts, {"name": name, **row}, where, "data set")
    for key in facts.columns:
        if key not in Columns.model_fields:
            raise UserError(f"{where}: `columns`: unknown name `{key}`{did_you_mean(key, Columns.model_fields)}")
    return facts
