"""A run's configuration while its `auto`s are decided, with the reason of each decision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sojourn.config.schema import RunConfig
from sojourn.errors import UserError


class Unsupported(UserError):
    """The device, or the model on it, cannot do what a setting asks for."""


@dataclass
class Resolved:
    config: RunConfig
    reasons: dict[str, str] = field(default_factory=dict)

    def choose(self, section: str, key: str, value: Any, reason: str) -> None:
        self.config = with_value(self.config, section, key, value)
        self.reasons[f"{section}.{key}"] = f"{value}: {reason}"


def with_value(config: RunConfig, section: str, key: str, value: Any) -> RunConfig:
    old = getattr(config, section)
    return config.model_copy(update={section: old.model_copy(update={key: value})})
