"""What GPTQ and AWQ calibrate on: rows of the run's training data, else built-in text, as token ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from sojourn.data import builtin
from sojourn.data.artefact import Artefact, artefact_of
from sojourn.errors import UserError
from sojourn.evals.held_out import prepare_file
from sojourn.export.open_source import Source
from sojourn.infer.runtimes.transformers_tokenizer import open_tokenizer
from sojourn.storage.files import write_text

ROW_LENGTH = 2048  # tokens; longer rows are cut
TOKENS = {"cuda": 262_144, "cpu": 8_192}
_TEXT_BYTES = 400_000
_SEED = 1  # the perplexity is measured on text of another


def calibration_rows(source: Source, device: str, folder: Path, say: Callable[[str], None]) -> list[list[int]]:
    """Packed rows from all over the training data, the same ones each time. `folder`: for a file that the export does
    not have in the end."""
    artefact = _trained_on(source)
    if artefact is None:
        reason = "the model is of no run here" if source.run is None else "the run's prepared data is not here"
        say(f"note: calibrating on built-in text: {reason}")
        artefact = _builtin(source, folder)
    rows = choose_rows(artefact, TOKENS[device])
    what = "rows of the run's training data" if source.run is not None else "rows"
    say(f"calibrating on {len(rows):,} {what}, {sum(map(len, rows)):,} tokens")
    return rows


def choose_rows(artefact: Artefact, tokens: int) -> list[list[int]]:
    """Evenly spread over the split, about `tokens` together."""
    split = artefact.train
    mean = max(1, min(len(split.tokens) // max(1, len(split)), ROW_LENGTH))
    count = min(len(split), -(-tokens // mean))
    chosen = np.unique(np.linspace(0, len(split) - 1, count).round().astype(int))
    return [split.row(int(index))[0][:ROW_LENGTH].tolist() for index in chosen]


def _trained_on(source: Source) -> Artefact | None:
    try:
        return artefact_of(source.run) if source.run is not None else None
    except UserError:
        return None


def _builtin(source: Source, folder: Path) -> Artefact:
    path, tokenizer = folder / "calibration.txt", source.weights.tokenizer_folder
    write_text(path, "\n\n".join(one.text for one in builtin.text(_TEXT_BYTES, _SEED)))
    config = source.weights.config
    context = int((config.get("text_config") or config).get("max_position_embeddings") or ROW_LENGTH)
    return prepare_file(str(path), tokenizer, bool(open_tokenizer(tokenizer).chat_template), context, None)
