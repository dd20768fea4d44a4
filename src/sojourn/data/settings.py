"""The data settings that `prepare` works with."""

from __future__ import annotations

from sojourn.config.data import DataConfig
from sojourn.config.schema import RunConfig


def data_settings(config: RunConfig) -> DataConfig:
    """A run's data section, with the base model's tokenizer where none is named."""
    base, revision = config.model.base, config.model.revision
    if not base or config.data.tokenizer != "auto":
        return config.data
    return config.data.model_copy(update={"tokenizer": f"{base}@{revision}" if revision else base})
