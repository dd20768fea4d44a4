"""One row of a workload's table: a program and how it is set. Peers in `benchmarks/` build on it too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OURS = "sojourn"
REFERENCE = "transformers"  # the row whose losses all others must reproduce


@dataclass(frozen=True)
class BenchRow:
    """`settings`: keys of our configuration, or fields of a peer's task. `runner`: the program."""

    name: str
    title: str
    runner: str
    settings: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    different_model: bool = False  # of the same size: its losses are not compared
