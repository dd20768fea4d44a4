"""A parcel of records to token ids and loss mask, in whichever process it is handed to.

The mask is 1 on every token that the model is to learn to say. The text of a special token inside a document is only
text: a user who writes <|im_end|> does not end a turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sojourn.config.data import CleanConfig
from sojourn.data.clean.language import LOOKED_AT, UNKNOWN, language
from sojourn.data.sources.chunks import Chunk, parse_chunk
from sojourn.data.sources.document import Document, Message
from sojourn.data.sources.formats import BadRecord
from sojourn.data.tokenize.chat_template import Template
from sojourn.data.tokenize.tokenize import SpannedText, SpanTokenizer
from sojourn.data.truncate import LengthPolicy, cut
from sojourn.errors import UserError

TEXT, CHAT, PAIR = range(3)


@dataclass(frozen=True)
class EncoderConfig:
    """All that decides how a document becomes tokens, in a form that travels to another process."""

    tokenizer: str
    template: str | None
    names: dict[str, str]
    added: dict[str, bool]
    train_on: str
    policy: LengthPolicy
    fail: bool
    refusal: str = ""  # why there is no template, should a chat come
    clean: CleanConfig = field(default_factory=CleanConfig)
    look_at: float = 1.0


@dataclass
class EncodedChunk:
    """What became of a parcel. Pieces are what rows are packed of; a pair has two, a long text may have many."""

    ids: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    document: np.ndarray  # of each piece
    outcomes: np.ndarray  # of each document
    document_lengths: np.ndarray  # in tokens, before anything is cut
    fingerprints: np.ndarray
    sizes: np.ndarray
    kinds: np.ndarray
    records: int
    bad: list[tuple[str, str]]
    left_out: dict[str, int]
    escaped: int
    samples: list[str]
    signatures: list[Any] | None


class Encoder:
    def __init__(self, recipe: EncoderConfig) -> None:
        from tokenizers import Tokenizer

        self._recipe = recipe
        self._template = Template(recipe.template, recipe.names, recipe.added) if recipe.template else None
        self._tokenise = SpanTokenizer(Tokenizer.from_file(recipe.tokenizer), recipe.added, self._template)

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        documents, records, bad = parse_chunk(chunk)
        left_out: dict[str, int] = {}
        escaped = 0
        kept: list[Document] = []
        strands: list[list[SpannedText]] = []
        for document in documents:
            reason = self._unwanted(document)
            if reason:
                left_out[reason] = left_out.get(reason, 0) + 1
                continue
            safe = self._escape(document)
            try:
                strands.append(self._strands(safe))
            except BadRecord as error:
                bad.append((document.where, str(error)))
                continue
            escaped += safe is not document
            kept.append(document)
        fingerprints = np.array([d.fingerprint() for d in kept], np.uint64)
        sizes = np.array([d.size for d in kept], np.uint32)
        kinds = np.array([PAIR if d.rejected else CHAT if d.messages else TEXT for d in kept], np.uint8)
        ids, mask, counts = self._tokenise([one for both in strands for one in both])
        owners = np.repeat(np.arange(len(kept)), [len(both) for both in strands])
        cut_up = cut(ids, mask, counts, owners, kinds == TEXT, self._tokenise.before, self._recipe.policy)
        lengths = np.where(kinds == TEXT, len(self._tokenise.before) + 1, 0)
        np.maximum.at(lengths, owners, lengths[owners] + counts)
        near = self._recipe.clean.duplicates == "near"
        return EncodedChunk(
            *cut_up, lengths, fingerprints, sizes, kinds, records, bad, left_out, escaped,
            self._samples(kept, fingerprints), [_signature(d) for d in kept] if near else None,
        )  # fmt: skip

    def _samples(self, documents: list[Document], fingerprints: np.ndarray) -> list[str]:
        """The beginnings of some documents, whose language is to be told: which, does not depend on the parcels."""
        chosen = np.flatnonzero(fingerprints < self._recipe.look_at * (2.0**64 - 2**12))
        return [_words(documents[number])[:LOOKED_AT] for number in chosen]

    def _unwanted(self, document: Document) -> str | None:
        clean = self._recipe.clean
        if clean.min_characters is not None or clean.max_characters is not None:
            length = sum(map(len, document.contents()))
            if clean.min_characters is not None and length < clean.min_characters:
                return "too_short"
            if clean.max_characters is not None and length > clean.max_characters:
                return "too_long"
        if clean.languages and language(_words(document)) not in (*clean.languages, UNKNOWN):
            return "other_languages"
        return None

    def _escape(self, document: Document) -> Document:
        """The document with the text of special tokens made harmless; itself, as nearly always, if it has none."""
        has_special, escaped = self._tokenise.has_special, self._tokenise.escaped
        turns = (*document.messages, *document.rejected)
        beside = [document.tools, *((m.tool_calls, m.reasoning) for m in turns if m.tool_calls or m.reasoning)]
        told = json.dumps(beside, ensure_ascii=False) if beside != [()] else ""
        if not any(map(has_special, (*document.contents(), told))):
            return document

        def harmless(m: Message) -> Message:
            return Message(m.role, escaped(m.content), _deep(m.tool_calls, escaped), escaped(m.reasoning), m.trained)

        messages, rejected = (tuple(map(harmless, side)) for side in (document.messages, document.rejected))
        tools = _deep(document.tools, escaped)
        return replace(document, text=escaped(document.text), messages=messages, rejected=rejected, tools=tools)

    def _strands(self, document: Document) -> list[SpannedText]:
        if not document.messages:
            return [SpannedText(document.text, [(0, len(document.text))])]
        if self._template is None:
            raise UserError(self._recipe.refusal)
        return [self._chat(document, side) for side in (document.messages, document.rejected) if side]

    def _chat(self, document: Document, messages: tuple[Message, ...]) -> SpannedText:
        assert self._template is not None  # noqa: S101
        recipe = self._recipe
        if recipe.train_on == "all" and not document.rejected:
            text = self._template.text(messages, document.tools)
            return SpannedText(text, [(0, len(text))])
        only_last = recipe.train_on == "last" or bool(document.rejected)
        text, spans = self._template.spans(messages, document.tools, only_last)
        trained = [m.trained for m in messages if m.role == "assistant"][-len(spans) if only_last else 0 :]
        if not all(trained):
            if len(trained) != len(spans):
                raise BadRecord("the template joins the assistant's turns, so single ones cannot be left untrained")
            spans = [span for span, wanted in zip(spans, trained, strict=True) if wanted]
        if not any(start < end for start, end in spans):
            if recipe.fail:
                raise UserError(
                    f"{document.where}: nothing in this example is trained on; mend or remove it, or leave such "
                    "examples out with data.on_bad=skip"
                )
            raise BadRecord("nothing in this example is trained on")
        return SpannedText(text, spans)


def _deep(value: Any, change: Callable[[str], str]) -> Any:
    """The same with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_deep(key, change): _deep(one, change) for key, one in value.items()}
    return type(value)(_deep(one, change) for one in value) if isinstance(value, (list, tuple)) else value


def _words(document: Document) -> str:
    return "\n".join(document.contents())


def _signature(document: Document) -> Any:
    from sojourn.data.clean.duplicates import minhash_signature

    return minhash_signature(_words(document))
