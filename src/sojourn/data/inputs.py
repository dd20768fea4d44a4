"""What a preparation starts from, found but not read yet, and the hash of all that decides what will come out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from sojourn.config.data import DataConfig
from sojourn.config.schema import RunConfig
from sojourn.data.artefact import FORMAT
from sojourn.data.sources.file_digests import FileDigests
from sojourn.data.sources.source import OpenedSource, open_source
from sojourn.data.tokenize.templates import NAMED
from sojourn.data.tokenize.tokenizer import TRAINED, TokenizerBundle, open_tokenizer, template_file
from sojourn.errors import UserError

_DECIDING = (
    "eval_fraction", "take", "train_on", "max_length", "packing", "long_texts", "long_chats", "on_bad", "max_bad",
)  # fmt: skip
_TRAINING = ("vocab_size", "special_tokens")


def data_settings(config: RunConfig) -> DataConfig:
    """The data of a run, with the tokenizer of the model that it starts from where none is named."""
    base, revision = config.model.base, config.model.revision
    if not base or config.data.tokenizer != "auto":
        return config.data
    return config.data.model_copy(update={"tokenizer": f"{base}@{revision}" if revision else base})


@dataclass(frozen=True)
class Inputs:
    """`words` is None where a tokenizer is to be trained."""

    data: DataConfig
    sources: list[OpenedSource]
    eval_sources: list[OpenedSource]
    words: TokenizerBundle | None
    split_digits: bool = True

    @property
    def size(self) -> int:
        """Bytes to read, roughly."""
        return sum(opened.size for opened in (*self.sources, *self.eval_sources))

    def artefact_hash(self, digests: FileDigests) -> str:
        """The same for the same bytes and settings on every machine: no path counts, and no number of processes."""
        data = self.data
        new = {"kind": data.tokenizer.replace("auto", "bpe"), "split_digits": self.split_digits}
        new |= {key: getattr(data, key) for key in _TRAINING}
        decides = {
            "format": FORMAT,
            "sources": [opened.identity(digests) for opened in self.sources],
            "eval_sources": [opened.identity(digests) for opened in self.eval_sources],
            "tokenizer": self.words.identity() if self.words else new,
            "template": "chatml" if self.words is None and data.template == "auto" else _content(data.template),
            "clean": data.clean.model_dump(mode="json"),
            **{key: getattr(data, key) for key in _DECIDING},
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True, default=int).encode()).hexdigest()[:16]


def open_inputs(data: DataConfig, say: Callable[[str], None], split_digits: bool = True) -> Inputs:
    """`split_digits`: for a tokenizer that is trained, `advanced.split_digits`."""
    if not data.sources:
        raise UserError(
            "data.sources: nothing to read; say what, such as data.sources=my.jsonl or --train_file my.jsonl"
        )
    if data.clean.languages:
        from sojourn.data.clean.language import check_language_codes

        check_language_codes(data.clean.languages)
    sources = [open_source(source, data.columns, False, say) for source in data.sources]
    eval_sources = [open_source(source, data.columns, True, say) for source in data.eval_sources]
    tokenizer = None if data.tokenizer in TRAINED else open_tokenizer(data.tokenizer)
    return Inputs(data, sources, eval_sources, tokenizer, split_digits)


def _content(template: str) -> str:
    return template_file(template) if template not in ("auto", *NAMED) else template
