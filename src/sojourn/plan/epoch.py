"""One epoch of a run's data as `prepare` would make it: rows, tokens, and how long the documents are.

Files and built-in data are counted (`data/exact_rows.py`) or measured (`data/measure.py`), data sets of the catalogue
have their sizes there, and of others only `take` is known.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sojourn.catalog.datasets import DatasetFacts, datasets
from sojourn.config.data import COMPRESSION_RATIO, DataConfig, Source
from sojourn.config.messages import normalize, printable
from sojourn.config.schema import RunConfig
from sojourn.data.length_quantiles import QUANTILES
from sojourn.data.settings import data_settings
from sojourn.data.sources.files import find_files, is_compressed, user_path
from sojourn.data.sources.hub import is_hub_name
from sojourn.data.tokenize.estimate_tokens import TokenEstimate, piece_lengths, tokens_per_byte
from sojourn.errors import UserError
from sojourn.estimate.workload import Workload
from sojourn.resolve.workload import USUAL_DOCUMENT
from sojourn.run.home import prepared_folder

if TYPE_CHECKING:
    from sojourn.data.tokenize.tokenizer import TokenizerBundle

NAME_DATA = "give data.sources, train.tokens or train.steps"
_USUAL_FILL = 0.97  # of packed rows, where lengths are not known
_CHAT_TOKENS = 12  # of a template, for one question and its answer
_SIGMA = 0.7  # of the logarithm of document lengths, where only their mean is known
_BYTES_PER_TOKEN = 4.0
_ONE_DOCUMENT = 0.97  # of a row: documents that fill more count as one that fills it


@dataclass(frozen=True)
class SourceSize:
    """A source before `take`, `weight` and evaluation; `lengths` are quantiles of the tokens of its pieces."""

    documents: float
    bytes: float
    tokens: float
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Epoch:
    """`lengths` are quantiles of the tokens of its pieces.

    exact    `prepare` makes just these rows
    assumed  what is not known of the data, and was assumed
    notes    what to know of the data besides
    """

    rows: float
    tokens: float
    lengths: tuple[int, ...] = ()
    exact: bool = False
    assumed: str | None = None
    notes: tuple[str, ...] = ()


def measure_epoch(config: RunConfig, vocab: int) -> Epoch | None:
    """None where nothing is known of the data's size. `vocab`: of the model, for tokens that must be estimated."""
    data = data_settings(config)
    sources = [(source, _facts(source)) for source in data.sources]
    try:
        return _epoch(data, sources, vocab, config.advanced.split_digits) if sources else _unnamed(data)
    except OSError as error:
        where = error.filename or ", ".join(source.path for source, _ in sources)
        raise UserError(f"data.sources: {printable(where)}: cannot be read: {error.strerror or error}") from None


def _epoch(
    data: DataConfig, sources: list[tuple[Source, DatasetFacts | None]], vocab: int, split_digits: bool
) -> Epoch | None:
    from sojourn.data.tokenize.tokenizer import TRAINED

    tokenizer, is_trained = _tokenizer_here(data.tokenizer), data.tokenizer in TRAINED
    if (tokenizer or is_trained) and all(_is_local(source) for source, _ in sources):
        exact = _exact(data, tokenizer, split_digits)
        if exact is not None:
            return exact
    sizes, notes, assumed = list[tuple[Source, SourceSize]](), list[str](), None
    for source, facts in sources:
        is_ours = source.path.startswith("builtin:text")
        vocabulary = TokenEstimate(vocab, is_trained, by_character=data.tokenizer == "char", builtin=is_ours)
        if _is_local(source):
            size, bad = _measured(source, data, tokenizer, vocabulary)
            notes += bad
        elif facts is not None and facts.documents is not None:
            size = _catalogue_size(facts, data, vocabulary)
        elif (taken := _only_take(source, data)) is not None:
            unknown = f"the size of {printable(source.path)} is not known here"
            size, assumed = taken, _assumption(unknown, taken, "give train.tokens or train.steps")
        else:
            return None
        sizes.append((source, size))
    if tokenizer is None and any(_is_local(source) for source, _ in sources):
        why = "is yet to be trained" if is_trained else f"({printable(data.tokenizer)}) is not on this machine"
        notes.append(f"tokens are estimated: the tokenizer {why}")
    return replace(_combined(data, sizes), assumed=assumed, notes=tuple(notes))


def _unnamed(data: DataConfig) -> Epoch | None:
    nothing = Source(path="-")
    size = _only_take(nothing, data)
    if size is None:
        return None
    return replace(_combined(data, [(nothing, size)]), assumed=_assumption("no data is named", size, NAME_DATA))


def timed_workload(workload: Workload, lengths: Sequence[int], packing: str) -> Workload:
    """The workload with documents as long as measured, for the time of a usual step; memory is planned for the longest
    row."""
    if not lengths:
        return workload
    most = workload.sequence_length
    inside = sorted(min(length, most) for length in lengths)
    if packing == "packed":
        attended = sum(length**2 for length in inside) / sum(inside)  # long documents have more tokens, each sees more
        return replace(workload, document_length=round(attended) if attended < _ONE_DOCUMENT * most else None)
    if packing == "padded":
        return workload
    count, rows = len(inside), workload.micro_batch
    widest = sum(
        length * ((place / count) ** rows - ((place - 1) / count) ** rows) for place, length in enumerate(inside, 1)
    )
    return replace(workload, sequence_length=min(most, -(-math.ceil(widest) // 8) * 8))


def _facts(source: Source) -> DatasetFacts | None:
    """The catalogue's row of a data set; a folder of that name is read instead, as by `prepare`."""
    if _is_local(source):
        return None
    name, _, config = source.path.removeprefix("hub:").partition(":")
    split = source.split
    for row in datasets():
        is_named = normalize(name) in (normalize(row.name), normalize(row.hub))
        if is_named and (config or source.config or row.config) == row.config and split in (None, row.split):
            return row
    if not is_hub_name(source.path):
        raise UserError(
            f"data.sources: {printable(source.path)}: no such file or data set; correct it, or give train.tokens or "
            "train.steps"
        )
    return None


def _is_local(source: Source) -> bool:
    path = source.path
    if path.startswith("builtin:") or user_path(path, "data.sources").exists():
        return True
    return any(sign in path for sign in "*?[")


def _exact(data: DataConfig, tokenizer: TokenizerBundle | None, split_digits: bool) -> Epoch | None:
    """Counts of the prepared artefact, or of all rows where they are few."""
    try:
        from sojourn.data.exact_rows import exact_rows
    except ImportError:
        return None
    found = exact_rows(data, tokenizer, prepared_folder(), split_digits)
    return None if found is None else Epoch(found.rows, found.tokens, found.lengths, exact=True)


def _tokenizer_here(name: str) -> TokenizerBundle | None:
    from sojourn.data.tokenize.tokenizer import open_tokenizer_here

    with suppress(ImportError):
        return open_tokenizer_here(name)
    return None


def _measured(
    source: Source, data: DataConfig, tokenizer: TokenizerBundle | None, vocabulary: TokenEstimate
) -> tuple[SourceSize, list[str]]:
    try:
        from sojourn.data.measure import measure_source
    except ImportError as error:
        note = f"{printable(source.path)} was not opened, for want of {error.name} (pip install 'sojourn[train]')"
        return _by_size(source, data), [f"{note}: its length is taken from its size"]
    found = measure_source(source, data, tokenizer, vocabulary)
    if not found.documents:
        why = f": {found.first_bad}" if found.first_bad else ""
        raise UserError(f"data.sources: {printable(source.path)}: no document to train on{why}")
    notes = [f"{found.bad:,} of {found.records:,} records that were read cannot be used; the first: {found.first_bad}"]
    return SourceSize(found.documents, found.bytes, found.tokens, found.lengths), notes if found.bad else []


def _by_size(source: Source, data: DataConfig) -> SourceSize:
    """Of files that cannot be opened here."""
    size = text_bytes(source)
    tokens, usual = size / _BYTES_PER_TOKEN, min(USUAL_DOCUMENT, data.max_length)
    return SourceSize(tokens / usual, size, tokens, (usual,))


def text_bytes(source: Source) -> int:
    """Of a source on this machine, roughly: from sizes alone."""
    if source.path.startswith("builtin:"):
        is_text = source.path.startswith("builtin:text")
        return int(source.size or 10_000_000) if is_text else 100 * int(source.take or 20_000)
    files = find_files(source.path)
    return sum(file.stat().st_size * (COMPRESSION_RATIO if is_compressed(file) else 1) for file in files)


def _catalogue_size(facts: DatasetFacts, data: DataConfig, vocabulary: TokenEstimate) -> SourceSize:
    documents, size = float(facts.documents or 0), float(facts.text_bytes or 0)
    is_chat = not facts.lines and bool({"prompt", "messages", "chosen"} & set(facts.columns))
    tokens = size * tokens_per_byte(vocabulary, facts.language) + documents * (_CHAT_TOKENS if is_chat else 1)
    lengths = _log_normal(tokens / documents)
    inside = tuple(piece for length in lengths for piece in piece_lengths(length, data, is_chat))
    return SourceSize(
        documents, size, tokens * sum(inside) / sum(lengths), tuple(sorted(inside)[:: -(-len(inside) // QUANTILES)])
    )


def _log_normal(mean: float) -> list[int]:
    usual = statistics.NormalDist(math.log(mean) - _SIGMA**2 / 2, _SIGMA)
    return [max(1, round(math.exp(usual.inv_cdf((place + 0.5) / QUANTILES)))) for place in range(QUANTILES)]


def _only_take(source: Source, data: DataConfig) -> SourceSize | None:
    """Usual documents, as many as are taken of a source of which nothing else is known."""
    taken = [int(take) for take in (source.take, data.take) if take is not None]
    usual = min(USUAL_DOCUMENT, data.max_length)
    return SourceSize(min(taken), min(taken) * usual * 4.0, min(taken) * usual, (usual,)) if taken else None


def _assumption(unknown: str, size: SourceSize, fix: str) -> str:
    return f"{unknown}, so {size.documents:,.0f} examples of {size.lengths[0]} tokens are assumed; {fix}"


def _combined(data: DataConfig, sizes: list[tuple[Source, SourceSize]]) -> Epoch:
    """What `take`, `weight`, `size` and the held-out share leave of all sources, packed into rows."""
    parts = list[tuple[float, float, tuple[int, ...]]]()
    for source, size in sizes:
        share = 1.0
        if not source.path.startswith("builtin:"):
            share = min(share, int(source.take) / size.documents) if source.take is not None else share
            share = min(share, int(source.size) / max(1.0, size.bytes)) if source.size is not None else share
        share *= source.weight
        parts.append((share * size.documents, share * size.tokens, size.lengths))
    total = sum(documents for documents, _, _ in parts)
    share = min(1.0, int(data.take) / total) if data.take is not None else 1.0
    if not data.eval_sources:
        held_out = data.eval_documents / (share * total) if data.eval_documents is not None else data.eval_fraction
        share *= max(0.0, 1.0 - held_out)
    groups = [
        (lengths, share * tokens * len(lengths) / max(1, sum(lengths))) for _, tokens, lengths in parts if lengths
    ]
    tokens, pieces = share * sum(tokens for _, tokens, _ in parts), sum(count for _, count in groups)
    rows = tokens / (data.max_length * _fill(groups, data.max_length)) if data.packing == "packed" else pieces
    return Epoch(max(1.0, rows), max(1.0, tokens), _mixed(groups, pieces))


def _fill(groups: list[tuple[tuple[int, ...], float]], row_length: int) -> float:
    with suppress(ImportError):
        from sojourn.data.measure import simulate_fill

        return simulate_fill(groups, row_length)
    return _USUAL_FILL


def _mixed(groups: list[tuple[tuple[int, ...], float]], pieces: float) -> tuple[int, ...]:
    """Quantiles of all groups together."""
    if len(groups) == 1:
        return groups[0][0]
    mixed = list[int]()
    for lengths, count in groups:
        wanted = max(1, round(QUANTILES * count / max(1.0, pieces)))
        mixed += [lengths[place * len(lengths) // wanted] for place in range(wanted)]
    return tuple(sorted(mixed))
