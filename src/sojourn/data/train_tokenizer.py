"""Learns a tokenizer from an even sample of the sources, and measures how well it compresses each language."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sojourn.data.clean.language import language_or_unknown
from sojourn.data.inputs import Inputs
from sojourn.data.preview import Preview
from sojourn.data.sources.chunks import parse_chunk
from sojourn.data.sources.document import Document
from sojourn.data.sources.formats import BadRecord
from sojourn.data.sources.source import OpenedSource
from sojourn.data.tokenize.bpe import compression
from sojourn.data.tokenize.tokenizer import TokenizerBundle, train_tokenizer

_SAMPLE_BYTES = 30_000_000  # more text changes a tokenizer little
_COMPRESSION_BYTES = 300_000


def train_on_sample(inputs: Inputs, preview: Preview, folder: Path) -> tuple[TokenizerBundle, list[dict[str, Any]]]:
    """A tokenizer from an even sample of all sources, and how well it and smaller ones inside it compress."""
    samples: dict[str, list[str]] = {}
    measured = 2.0**64 * _COMPRESSION_BYTES / max(1, inputs.size)

    def texts() -> Iterator[str]:
        for document in _sample(inputs):
            text = document.text
            if document.is_chat and preview.template:
                try:
                    text = preview.template.text(document.messages, document.tools)
                except BadRecord:  # counted and told when all is read
                    continue
            if document.fingerprint() < measured:
                samples.setdefault(language_or_unknown(text), []).append(text)
            yield text

    words = train_tokenizer(inputs.data, texts(), folder, inputs.split_digits)
    large = sum(len(text) for listed in samples.values() for text in listed) / 20
    return words, compression(words.tokenizer, {c: s for c, s in samples.items() if sum(map(len, s)) >= large})


def _sample(inputs: Inputs) -> Iterator[Document]:
    share = min(1.0, _SAMPLE_BYTES / max(1.0, sum(map(_training_cost, inputs.sources)))) * 2.0**64
    for opened in inputs.sources:
        left = None if opened.source.take is None else int(opened.source.take)
        for chunk in opened.chunks():
            documents = parse_chunk(chunk)[0]
            if left is not None:
                documents, left = documents[:left], left - len(documents)
            yield from (d for d in documents if share >= 2.0**64 or d.fingerprint() < share)
            if left is not None and left <= 0:
                break


def _training_cost(opened: OpenedSource) -> float:
    """Its bytes, but what is not ASCII counts five times: whole runs of Chinese are learned from as one word each,
    hardly any of them twice, which takes that much more memory and time."""
    chunk = next(opened.chunks(), None)
    words = "".join(part for document in parse_chunk(chunk)[0][:500] for part in document.contents()) if chunk else ""
    return opened.size * (1 + 4 * sum(not letter.isascii() for letter in words) / max(1, len(words)))
