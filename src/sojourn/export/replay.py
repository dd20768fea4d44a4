"""Replays an export in the first runtime of its format that runs here, and says what it found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from sojourn.errors import UserError
from sojourn.export.formats import find_format
from sojourn.export.gate import Replay, check
from sojourn.export.reference import Reference
from sojourn.export.tolerances import find_tolerance
from sojourn.infer.runtimes.registry import available, open_runtime
from sojourn.infer.runtimes.transformers_runtime import gguf_file
from sojourn.infer.safetensors_reader import SafetensorsFile

Say = Callable[[str], None]

_SHARE = 1 / 3  # of the free memory that a model in fp32 may take


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
        reason = available(name) or too_large(name, folder)
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


def too_large(runtime: str, path: Path) -> str:
    """Empty, or why transformers cannot hold the model in fp32 here."""
    if runtime != "transformers":
        return ""
    import psutil

    needed, free = 4 * count_parameters(path), psutil.virtual_memory().available
    if needed <= free * _SHARE:
        return ""
    return f"the model takes {needed / 2**30:.1f} GiB in fp32, more than a third of the {free / 2**30:.1f} GiB free"


def count_parameters(path: Path) -> int:
    """From the headers of the safetensors or GGUF files."""
    file = gguf_file(path)
    if file is not None:
        import gguf

        return sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(file).tensors)
    files = path.glob("*.safetensors") if path.is_dir() else ()
    return sum(prod(entry.shape) for file in files for entry in SafetensorsFile(file).entries.values())
