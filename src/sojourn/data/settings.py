"""The data settings that `prepare` works with."""

from __future__ import annotations

from sojourn.config.data import DataConfig
from sojourn.config.schema import RunConfig
from sojourn.data.sources.dataset_info import named_sources


def data_settings(config: RunConfig) -> DataConfig:
    """A run's data section: with the base model's tokenizer where none is named, and in place of names of
    dataset_info.json what it says of them."""
    data, base, revision = config.data, config.model.base, config.model.revision
    tokenizer = data.tokenizer
    if base and tokenizer == "auto":
        tokenizer = f"{base}@{revision}" if revision else base
    sources, eval_sources = (named_sources(some, data.dataset_dir) for some in (data.sources, data.eval_sources))
    return data.model_copy(
        update={"tokenizer": tokenizer, "sources": sources, "eval_sources": eval_sources, "dataset_dir": None}
    )
