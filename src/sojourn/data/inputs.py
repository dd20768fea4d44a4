"""What an artefact is made from: the opened sources and the tokenizer, and the hash that names the artefact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sojourn.config.data import DataConfig
from sojourn.data.artefact import FORMAT
from sojourn.data.sources.chunks import Sample
from sojourn.data.sources.source import OpenedSource, open_source
from sojourn.data.tokenize.templates import NAMED, read_template_file
from sojourn.data.tokenize.tokenizer import TRAINED, TokenizerBundle, open_tokenizer
from sojourn.errors import UserError
from sojourn.machine.hardware import cpu
from sojourn.storage.file_digests import FileDigests

# Settings that the artefact hash covers, by the names it has always used for them: other names would give other hashes.
_HASHED = (
    "eval_fraction", "take", "train_on", "max_length", "packing", "long_texts", "long_chats", "on_bad", "max_bad",
)  # fmt: skip
_ONE_PROCESS_BYTES = 8_000_000  # less is done before workers have started
_MAX_WORKERS = 6  # more would take over a gigabyte together
_HASHED_FOR_NEW_TOKENIZER = ("vocab_size", "special_tokens")


@dataclass(frozen=True)
class Inputs:
    """`tokenizer` is None where one is to be trained."""

    data: DataConfig
    sources: list[OpenedSource]
    eval_sources: list[OpenedSource]
    tokenizer: TokenizerBundle | None
    split_digits: bool = True
    held_out: Sample | None = None  # where `data.eval_fraction` is a number of documents

    @property
    def size(self) -> int:
        """Approximate bytes to read."""
        return sum(opened.size for opened in (*self.sources, *self.eval_sources))

    @property
    def is_builtin(self) -> bool:
        return all(opened.is_builtin for opened in (*self.sources, *self.eval_sources))

    @property
    def workers(self) -> int:
        if self.data.workers != "auto":
            return self.data.workers
        return 1 if self.size < _ONE_PROCESS_BYTES else max(1, min(int(cpu().usable), _MAX_WORKERS))

    def samples(self) -> list[dict[str, Any]]:
        """Each source of which not all documents are taken: how many, and the setting that would take all."""
        return [
            {"path": opened.source.path, "documents": opened.sample.kept, "of": opened.sample.total,
             "setting": "take: all of this source" if opened.is_limited else "data.take=all"}
            for opened in (*self.sources, *self.eval_sources)
            if opened.sample and opened.sample.kept < opened.sample.total
        ]  # fmt: skip

    def artefact_hash(self, digests: FileDigests) -> str:
        """Equal for equal bytes and settings on every machine: it covers no path and no number of workers."""
        data = self.data
        new_tokenizer = {"kind": data.tokenizer.replace("auto", "bpe"), "split_digits": self.split_digits}
        new_tokenizer |= {key: getattr(data, key) for key in _HASHED_FOR_NEW_TOKENIZER}
        hashed = {
            "format": FORMAT,
            "sources": [opened.identity(digests) for opened in self.sources],
            "eval_sources": [opened.identity(digests) for opened in self.eval_sources],
            "tokenizer": self.tokenizer.identity() if self.tokenizer else new_tokenizer,
            "template": "chatml"
            if self.tokenizer is None and data.template == "auto"
            else _template_content(data.template),
            "clean": data.clean.model_dump(mode="json"),
            **{key: getattr(data, key) for key in _HASHED},
        }
        sampled = data.take is not None or data.eval_documents is not None
        if sampled or any(opened.is_limited for opened in (*self.sources, *self.eval_sources)):
            hashed["sample"] = data.seed
        return hashlib.sha256(json.dumps(hashed, sort_keys=True, default=int).encode()).hexdigest()[:16]


def open_inputs(data: DataConfig, say: Callable[[str], None], split_digits: bool = True) -> Inputs:
    """`split_digits` is `advanced.split_digits`, for a tokenizer that is to be trained."""
    inputs = open_sources(data, say, None, split_digits)
    return inputs if data.tokenizer in TRAINED else replace(inputs, tokenizer=open_tokenizer(data.tokenizer))


def open_sources(
    data: DataConfig, say: Callable[[str], None], tokenizer: TokenizerBundle | None, split_digits: bool
) -> Inputs:
    """With a tokenizer that is open already, or none."""
    if not data.sources:
        raise UserError(
            "data.sources: nothing to read; set it, for example data.sources=my.jsonl or --train_file my.jsonl"
        )
    if data.clean.languages:
        from sojourn.data.clean.language import check_language_codes

        check_language_codes(data.clean.languages)
    sources, eval_sources = (
        [open_source(source, data.columns, evaluation, say, data.encoding) for source in given]
        for evaluation, given in ((False, data.sources), (True, data.eval_sources))
    )
    return Inputs(data, sources, eval_sources, tokenizer, split_digits)


def _template_content(template: str) -> str:
    return read_template_file(template) if template not in ("auto", *NAMED) else template
