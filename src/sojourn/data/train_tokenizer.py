"""Trains a tokenizer on a uniform sample of the sources, and measures how well it compresses each language."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sojourn.data.clean.language import detect_language_or_unknown
from sojourn.data.inputs import Inputs
from sojourn.data.preview import Preview
from sojourn.data.sources.chunks import parse_chunk
from sojourn.data.sources.document import Document
from sojourn.data.sources.source import OpenedSource
from sojourn.data.sources.values import BadRecord
from sojourn.data.tokenize.bpe import compression
from sojourn.data.tokenize.tokenizer import TokenizerBundle, train_tokenizer

_SAMPLE_BYTES = 30_000_000  # more text hardly changes a tokenizer
_COMPRESSION_SAMPLE_BYTES = 300_000


def train_on_sample(inputs: Inputs, preview: Preview, folder: Path) -> tuple[TokenizerBundle, list[dict[str, Any]]]:
    """A tokenizer trained on a sample of all sources, and bytes per token of it and of smaller vocabularies."""
    samples: dict[str, list[str]] = {}
    measured_below = 2.0**64 * _COMPRESSION_SAMPLE_BYTES / max(1, inputs.size)

    def texts() -> Iterator[str]:
        for document in _sample(inputs):
            text = document.text
            if document.is_chat and preview.template:
                try:
                    text = preview.template.text(document.messages, document.tools)
                except BadRecord:  # counted and reported when everything is read
                    continue
            if document.fingerprint() < measured_below:
                samples.setdefault(detect_language_or_unknown(text), []).append(text)
            yield text

    tokenizer = train_tokenizer(inputs.data, texts(), folder, inputs.split_digits)
    min_characters = sum(len(text) for listed in samples.values() for text in listed) / 20
    return tokenizer, compression(
        tokenizer.tokenizer, {c: s for c, s in samples.items() if sum(map(len, s)) >= min_characters}
    )


def _sample(inputs: Inputs) -> Iterator[Document]:
    every_character = inputs.data.tokenizer == "char"
    share = min(1.0, _SAMPLE_BYTES / max(1.0, sum(map(_training_cost, inputs.sources)))) * 2.0**64
    share = 2.0**64 if every_character else share
    for opened in (*inputs.sources, *(inputs.eval_sources if every_character else ())):
        for chunk in opened.chunks():
            yield from (d for d in parse_chunk(chunk).documents if share >= 2.0**64 or d.fingerprint() < share)


def _training_cost(opened: OpenedSource) -> float:
    """Bytes, with non-ASCII text counted five times: a run of Chinese is one word to the trainer, and hardly any occurs
    twice, which takes about five times the memory and time."""
    chunk = next(opened.chunks(), None)
    text = (
        "".join(part for document in parse_chunk(chunk).documents[:500] for part in document.contents())
        if chunk
        else ""
    )
    return opened.size * (1 + 4 * sum(not c.isascii() for c in text) / max(1, len(text)))
