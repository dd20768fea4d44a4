"""Replays an export in the first runtime of its format that runs here, and says what it found."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sojourn.errors import UserError
from sojourn.export.formats import find_format
from sojourn.export.gate import Replay, check
from sojourn.export.own_code import needs_code
from sojourn.export.reference import Reference
from sojourn.export.tolerances import find_tolerance
from sojourn.export.weights_check import compare_weights, gguf_errors
from sojourn.infer.runtimes.base import Runtime
from sojourn.infer.runtimes.registry import available, open_runtime, refusal
from sojourn.infer.runtimes.transformers_runtime import gguf_file
from sojourn.infer.weight_source import WeightSource

Say = Callable[[str], None]
_PATH = re.compile(r"(?<![^\s=(“])(?:~?/|[A-Za-z]:[/\\])[^\s;,:)”]+")  # notes are published with the export


@dataclass
class GateResult:
    """`replay`: None where no runtime could run here. `wrong_tensor`: the first whose weights are not the source's.
    `tensors`: how many were compared. `unopened`: why the runtime could not open the export."""

    replay: Replay | None = None
    wrong_tensor: str | None = None
    tensors: int = 0
    unopened: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def drift(self) -> str | None:
        """The first difference in one line."""
        if self.unopened is not None:
            return self.unopened
        first = self.replay.differences[0] if self.replay is not None and self.replay.differences else None
        return str(first) if first is not None else self.wrong_tensor

    def facts(self) -> dict[str, Any]:
        found = {key: getattr(self, key) for key in ("wrong_tensor", "tensors", "unopened", "notes")}
        return {
            "passed": self.drift is None,
            "replay": self.replay.facts() if self.replay is not None else None,
            **found,
        }


def replay_export(
    folder: Path,
    format_name: str,
    quantization: str,
    reference: Reference,
    say: Say,
    runtimes: Sequence[str] | None = None,
    weights: WeightSource | None = None,
    trust_remote_code: bool = False,
) -> GateResult:
    """`runtimes`: instead of the format's own. `weights`: of the source, where it is at hand. `trust_remote_code`: as
    the run of the source has it."""
    result = GateResult(notes=list(reference.notes))

    def note(line: str) -> None:
        result.notes.append(_PATH.sub(lambda path: re.split(r"[/\\]", path[0])[-1], line))
        say(f"note: {line}")

    if not trust_remote_code and needs_code(folder):
        note("it needs its own Python code, which runs only while a run with model.trust_remote_code=true is exported")
        return result
    for name in runtimes or find_format(format_name).runtimes:
        reason = available(name) or refusal(name, folder)
        if reason:
            note(f"not replayed in {name}: {reason}")
            continue
        say(f"replaying {len(reference.answers)} probes in {name}")
        tolerance = find_tolerance(quantization)
        try:
            with open_runtime(name, folder, trust_remote_code) as runtime:
                result.replay = check(reference, runtime, tolerance)
                if result.drift is None and weights is not None:
                    _check_weights(result, folder, runtime, weights, tolerance.weights)
        except UserError as error:
            result.unopened = str(error)
        break
    is_gguf = gguf_file(folder) is not None
    if result.drift is None and result.replay is not None and weights is not None and is_gguf and not result.tensors:
        reason = _check_gguf_weights(result, folder, weights, find_tolerance(quantization).weights)
        if reason:
            note(f"weights are not compared tensor by tensor: {reason}")
    return result


def _check_gguf_weights(result: GateResult, folder: Path, weights: WeightSource, most: float) -> str:
    """In transformers, which reads GGUF files on its own. Returns why it could not."""
    reason = refusal("transformers", folder)
    if reason:
        return reason
    try:
        with open_runtime("transformers", folder) as runtime:
            _check_weights(result, folder, runtime, weights, most)
    except UserError as error:
        return str(error)
    return ""


def _check_weights(result: GateResult, folder: Path, runtime: Runtime, weights: WeightSource, most: float) -> None:
    if runtime.weights() is None:
        return
    file = gguf_file(folder)
    wrong = list(compare_weights(weights, runtime, most, gguf_errors(file, most) if file is not None else None))
    result.tensors = len(weights.names())
    if wrong:
        more = f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
        result.wrong_tensor = f"weights, {wrong[0][0]}: {wrong[0][1]}{more}"
