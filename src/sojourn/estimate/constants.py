"""Measured figures of the estimate, from fit.toml, which `python -m benchmarks.planner.fit` writes."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from importlib import resources
from typing import Any

_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


@cache
def constants() -> dict[str, Any]:
    return read(resources.files("sojourn.estimate").joinpath("fit.toml").read_text(encoding="utf-8"))


def read(text: str) -> dict[str, Any]:
    table: dict[str, Any] = _toml.loads(text)
    return table
