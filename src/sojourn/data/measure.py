"""How many documents and tokens a source on this machine has, extrapolated from an excerpt (`sources/excerpt.py`).

Nothing is written, downloaded or trained; without the tokenizer, tokens are estimated.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from sojourn.config.data import DataConfig, Source
from sojourn.data.encode import PAIR, TEXT, Encoder, filter_reason
from sojourn.data.inputs import Inputs
from sojourn.data.length_quantiles import length_quantiles
from sojourn.data.packing import pack_best_fit
from sojourn.data.preview import Preview, open_template
from sojourn.data.sources.chunks import Chunk, parse_chunk
from sojourn.data.sources.document import Document
from sojourn.data.sources.excerpt import read_excerpt, record_size
from sojourn.data.sources.source import OpenedSource, open_source
from sojourn.data.sources.values import BadRecord
from sojourn.data.tokenize.chat_template import Template
from sojourn.data.tokenize.estimate_tokens import TokenEstimate
from sojourn.data.tokenize.tokenizer import TokenizerBundle
from sojourn.data.write import encoder_config

_EXCERPT_BYTES = 2 << 20
_TOKENIZED_BYTES = 300_000
_SIMULATED_ROWS, _SIMULATED_PIECES = 256, 20_000
_MIN_FITTED = 8
_FIRST = 20


@dataclass(frozen=True)
class MeasuredSource:
    """All of a source, before `take`, `weight` and evaluation.

    bytes      of the texts
    tokens     after truncation
    lengths    quantiles of the tokens of pieces
    records    that were tokenized; `bad` of them cannot be used, `first_bad` says why
    """

    documents: float
    bytes: float
    tokens: float
    lengths: tuple[int, ...]
    records: int = 0
    bad: int = 0
    first_bad: str = ""


def measure_source(
    source: Source, data: DataConfig, tokenizer: TokenizerBundle | None, estimate: TokenEstimate
) -> MeasuredSource:
    """Extrapolated from an excerpt of a source on this machine; tokens are estimated where there is no tokenizer."""
    opened = open_source(source, data.columns, False, lambda line: None, data.encoding)
    template, template_error = open_template(data, tokenizer)
    preview = Preview([], [], False, template, template_error, [])
    if not opened.is_builtin or tokenizer is not None:
        return _measure_opened(opened, data, tokenizer, preview, estimate)
    settings = source.model_dump_json(), data.model_dump_json(), template.source if template else ""
    return _measure_builtin(_BuiltinSource(*settings, estimate, opened, data, preview))


@dataclass(frozen=True)
class _BuiltinSource:
    """Our own data with settings: two that are equal are measured once."""

    source: str
    data: str
    template: str
    estimate: TokenEstimate
    opened: OpenedSource = field(compare=False)
    config: DataConfig = field(compare=False)
    preview: Preview = field(compare=False)


@lru_cache(maxsize=16)  # of the plans of a board, most are of the same data: 0.5 s each
def _measure_builtin(one: _BuiltinSource) -> MeasuredSource:
    return _measure_opened(one.opened, one.config, None, one.preview, one.estimate)


def _measure_opened(
    opened: OpenedSource, data: DataConfig, tokenizer: TokenizerBundle | None, preview: Preview, estimate: TokenEstimate
) -> MeasuredSource:
    """`preview`: of its template only."""
    excerpt = read_excerpt(opened, _EXCERPT_BYTES)
    chunks = excerpt.thinned(_TOKENIZED_BYTES)
    if why := _unusable(chunks):
        return MeasuredSource(0.0, 0.0, 0.0, (), first_bad=why)
    if tokenizer is None:
        found = _estimated(chunks, data, preview.template, estimate)
    else:
        found = _encoded(opened, chunks, data, tokenizer, preview)
    if not found.documents:
        return MeasuredSource(0.0, 0.0, 0.0, (), found.records, found.bad, found.first_bad)
    taken = np.array([record_size(record) for chunk in chunks for record in chunk.records], np.float64)
    pieces = _pieces(_predicted(found.document_lengths, taken, excerpt.sizes), data, found.is_chat)
    usable, times = found.documents / len(taken), excerpt.records / len(excerpt.sizes)
    size = found.bytes / taken.sum() * excerpt.sizes.sum() * times
    tokens = usable * times * float(pieces.sum()) * found.sides
    return MeasuredSource(
        usable * excerpt.records, size, tokens, length_quantiles(pieces), found.records, found.bad, found.first_bad
    )


def simulate_fill(groups: list[tuple[tuple[int, ...], float]], row_length: int) -> float:
    """The share of packed rows that holds tokens, by packing pieces of each group's lengths in these numbers."""
    total = sum(count for _, count in groups)
    tokens = sum(count * sum(lengths) / len(lengths) for lengths, count in groups if lengths)
    wanted = min(total, _SIMULATED_PIECES, max(1.0, total * _SIMULATED_ROWS * row_length / max(1.0, tokens)))
    parts = [
        np.resize(np.random.default_rng(0).permutation(lengths), max(1, round(wanted * count / total)))
        for lengths, count in groups
        if lengths and count
    ]
    pieces = np.minimum(np.concatenate(parts), row_length)
    return float(pieces.sum() / (row_length * len(pack_best_fit(pieces, row_length))))


def _unusable(chunks: list[Chunk]) -> str:
    """Why the first records cannot be used, where none of them can: then the others are not looked at."""
    for chunk in chunks[:1]:
        parsed = parse_chunk(replace(chunk, records=chunk.records[:_FIRST], lines=chunk.lines[:_FIRST]))
        if not parsed.documents and parsed.bad:
            return ": ".join(parsed.bad[0])
    return ""


@dataclass(frozen=True)
class _Tokenized:
    """Some records: how many there are, documents in them, bytes of their texts, tokens of each before truncation;
    `sides` of a document: 2 for preference pairs."""

    records: int
    documents: int
    bytes: int
    document_lengths: np.ndarray
    is_chat: bool
    sides: int
    bad: int
    first_bad: str


def _predicted(lengths: np.ndarray, sizes: np.ndarray, all_sizes: np.ndarray) -> np.ndarray:
    """The tokens of each record from its bytes, by those that were tokenized."""
    if len(lengths) == len(sizes) > _MIN_FITTED and sizes.std() > 0:
        slope = float(np.cov(sizes, lengths)[0, 1] / sizes.var(ddof=1))
        start = float(lengths.mean() - slope * sizes.mean())
        if slope > 0 and start > -0.5 * lengths.mean():
            return np.asarray(np.maximum(1, np.rint(start + slope * all_sizes)), np.int64)
    per_byte = float(lengths.mean() / sizes.mean())
    return np.asarray(np.maximum(1, np.rint(all_sizes * per_byte)), np.int64)


def _pieces(lengths: np.ndarray, data: DataConfig, is_chat: bool) -> np.ndarray:
    """The lengths of what `truncate` makes of documents of these lengths."""
    most, choice = data.max_length, data.long_chats if is_chat else data.long_texts
    if choice != "split":
        return np.minimum(lengths, most) if choice == "truncate" else lengths[lengths <= most]
    whole, rest = np.divmod(lengths, most)
    return np.concatenate([np.full(int(whole.sum()), most), rest[rest > 1]])


def _encoded(
    opened: OpenedSource, chunks: list[Chunk], data: DataConfig, tokenizer: TokenizerBundle, preview: Preview
) -> _Tokenized:
    with nullcontext() if tokenizer.fast_file else tempfile.TemporaryDirectory() as folder:
        file = tokenizer.fast_file_in(Path(folder or "."))
        config = encoder_config(Inputs(data, [opened], [], tokenizer), tokenizer, preview, file)
        encoder = Encoder(replace(config, language_sample=0.0))
        found = [encoder(chunk) for chunk in chunks]
    kinds, lengths, sizes = (
        np.concatenate([np.zeros(0, np.int64), *parts])
        for parts in zip(*((one.kinds, one.document_lengths, one.sizes) for one in found), strict=True)
    )
    bad = [one for chunk in found for one in chunk.bad]
    return _Tokenized(
        sum(one.records for one in found), len(kinds), int(sizes.sum()), lengths, bool((kinds != TEXT).any()),
        2 if (kinds == PAIR).any() else 1, len(bad), ": ".join(bad[0]) if bad else "",
    )  # fmt: skip


def _estimated(chunks: list[Chunk], data: DataConfig, template: Template | None, estimate: TokenEstimate) -> _Tokenized:
    parsed = [parse_chunk(chunk) for chunk in chunks]
    documents = [one for chunk in parsed for one in chunk.documents if not filter_reason(one, data.clean)]
    lengths = [max(map(estimate, _texts(one, template))) + (not one.is_chat) for one in documents]
    bad = [one for chunk in parsed for one in chunk.bad]
    return _Tokenized(
        sum(chunk.records for chunk in parsed), len(documents), sum(one.size for one in documents),
        np.array(lengths, np.int64), any(one.is_chat for one in documents),
        2 if any(one.rejected for one in documents) else 1, len(bad), ": ".join(bad[0]) if bad else "",
    )  # fmt: skip


def _texts(document: Document, template: Template | None) -> list[str]:
    if not document.is_chat:
        return [document.text]
    if template is not None:
        with suppress(BadRecord):
            sides = (document.messages, document.rejected)
            return [template.text(side, document.tools) for side in sides if side]
    return ["\n".join(document.contents())]
