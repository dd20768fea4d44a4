"""The training rows that `prepare` would make, to the row: from the prepared artefact, or, where data is small, by the
code of `prepare`. Nothing is written, downloaded or trained.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sojourn.config.data import DataConfig
from sojourn.data.artefact import Artefact
from sojourn.data.inputs import Inputs, open_sources
from sojourn.data.length_quantiles import length_quantiles
from sojourn.data.preview import make_preview
from sojourn.data.route import Router
from sojourn.data.row_writer import RowCounter
from sojourn.data.sample import hold_out, take_sample
from sojourn.data.tokenize.tokenizer import TokenizerBundle
from sojourn.data.write import encode_all, encoder_config
from sojourn.errors import UserError
from sojourn.storage.file_digests import FileDigests

_WHOLE_BYTES = 1_500_000  # of sources: so much is read and tokenized in about half a second
_HASHED_BYTES = 128 << 20  # of files whose digest is not known yet: more take too long to hash


@dataclass(frozen=True)
class MeasuredRows:
    """One epoch of training rows; `lengths` are quantiles of the tokens of their pieces."""

    rows: int
    tokens: int
    lengths: tuple[int, ...]


def exact_rows(
    data: DataConfig, tokenizer: TokenizerBundle | None, folder: Path, split_digits: bool
) -> MeasuredRows | None:
    """From the artefact of these settings in `folder`, or by the code of `prepare`; None where neither can be.

    `tokenizer`: None where one is to be trained.
    """
    is_prepared = any(folder.glob("*/artefact.json"))
    if tokenizer is None and not is_prepared:
        return None
    inputs = open_sources(data, lambda line: None, tokenizer, split_digits)
    return (_find_prepared(inputs, folder) if is_prepared else None) or _count_rows(inputs)


def _find_prepared(inputs: Inputs, folder: Path) -> MeasuredRows | None:
    digests = FileDigests(folder / ".digests.json")
    opened = [one for one in (*inputs.sources, *inputs.eval_sources) if not one.is_builtin]
    files = [Path(part.name) for one in opened for part in one.parts]
    if sum(file.stat().st_size for file in files if digests.known(file) is None) > _HASHED_BYTES:
        return None
    target = folder / inputs.artefact_hash(digests)
    if not (target / "artefact.json").is_file():
        return None
    train = Artefact(target).train
    ends = np.append(train.documents[1:], train.rows[-1:]) if len(train.documents) else train.documents
    return MeasuredRows(len(train), int(train.rows[-1]), length_quantiles(ends - train.documents))


def _count_rows(inputs: Inputs) -> MeasuredRows | None:
    """Every row; None where there is too much data, or its tokenizer is not trained yet."""
    data, tokenizer = inputs.data.model_copy(update={"workers": 1}), inputs.tokenizer
    if tokenizer is None or sum(opened.size for opened in inputs.sources) > _WHOLE_BYTES:
        return None
    inputs = hold_out(take_sample(replace(inputs, data=data, eval_sources=[]), lambda line: None), lambda line: None)
    preview = make_preview(inputs)
    unit = 2 if preview.pairs else 1
    with tempfile.TemporaryDirectory() as folder:
        writers = {
            name: RowCounter(Path(), np.dtype("<u4"), data.max_length * unit, data.packing, unit)
            for name in ("train", "eval")
        }
        router = Router(inputs.data, inputs.held_out, dict(writers), unit)
        config = encoder_config(inputs, tokenizer, preview, tokenizer.fast_file_in(Path(folder)))
        config = replace(config, language_sample=0.0)
        for opened, for_eval, encoded in encode_all(inputs, config, router, lambda line: None):
            router.add(opened, for_eval, encoded)
        router.tally.check_bad()
    for writer in writers.values():
        writer.close()
    train = writers["train"]
    if not train.pieces:
        raise UserError("data.sources: no document to train on")
    return MeasuredRows(train.rows, train.tokens, length_quantiles(np.concatenate(train.lengths)))
