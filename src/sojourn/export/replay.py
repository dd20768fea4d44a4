"""Replays an export in the first runtime of its format that runs here, and says what it found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sojourn.errors import UserError
from sojourn.export.formats import find_format
from sojourn.export.gate import Replay, check
from sojourn.export.reference import Reference
from sojourn.export.tolerances import find_tolerance
from sojourn.infer.runtimes.registry import available, open_runtime, refusal

Say = Callable[[str], None]


@dataclass
class GateResult:
    """`replay`: None where no runtime could run here. `unopened`: why the runtime could not open the export."""

    replay: Replay | None = None
    unopened: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def drift(self) -> str | None:
        """The first difference in one line."""
        if self.unopened is not None:
            return self.unopened
        return str(self.replay.differences[0]) if self.replay is not None and self.replay.differences else None

    def facts(self) -> dict[str, Any]:
        replay = self.replay.facts() if self.replay is not None else None
        return {"passed": self.drift is None, "replay": replay, "unopened": self.unopened, "notes": self.notes}


def replay_export(
    folder: Path,
    format_name: str,
    quantization: str,
    reference: Reference,
    say: Say,
    runtimes: Sequence[str] | None = None,
) -> GateResult:
    """`runtimes`: instead of the format's own."""
    result = GateResult(notes=list(reference.notes))
    for name in runtimes or find_format(format_name).runtimes:
        reason = available(name) or refusal(name, folder)
        if reason:
            result.notes.append(f"not replayed in {name}: {reason}")
            say(f"note: {result.notes[-1]}")
            continue
        say(f"replaying {len(reference.answers)} probes in {name}")
        try:
            runtime = open_runtime(name, folder)
        except UserError as error:
            result.unopened = str(error)
            return result
        with runtime:
            result.replay = check(reference, runtime, find_tolerance(format_name, quantization, name))
        return result
    return result
