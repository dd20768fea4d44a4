"""A chunk of records to token ids and loss mask, in whichever process it is handed to.

The loss mask is 1 on every token the model is trained to predict. The text of a special token inside a document stays
text: a user who writes <|im_end|> does not end a turn.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sojourn.config.data import CleanConfig
from sojourn.data.clean.language import MAX_CHARACTERS, UNKNOWN, detect_language
from sojourn.data.sources.chunks import Chunk, parse_chunk
from sojourn.data.sources.document import Document, Message
from sojourn.data.sources.values import BadRecord
from sojourn.data.tokenize.chat_template import Span, Template
from sojourn.data.tokenize.span_tokenizer import SpannedText, SpanTokenizer
from sojourn.data.truncate import LengthPolicy, truncate
from sojourn.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXT, CHAT, PAIR = range(3)


@dataclass(frozen=True)
class EncoderConfig:
    """Everything that decides how a document becomes tokens, in a form that can be pickled."""

    tokenizer: str
    template: str | None
    special_names: dict[str, str]
    added_tokens: dict[str, bool]
    train_on: str
    policy: LengthPolicy
    fail: bool
    template_error: str = ""  # why there is no template, should a chat come
    clean: CleanConfig = field(default_factory=CleanConfig)
    language_sample: float = 1.0  # share of documents whose language is detected for the report


@dataclass
class EncodedChunk:
    """The result for one chunk. Rows are packed from pieces: a pair has two, a long text may have many."""

    ids: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    document: np.ndarray  # of each piece
    outcomes: np.ndarray  # of each document: whole, truncated, split or dropped
    document_lengths: np.ndarray  # in tokens, before truncation
    fingerprints: np.ndarray
    sizes: np.ndarray
    kinds: np.ndarray
    where: list[str]  # file and line of each document
    records: int
    bad: list[tuple[str, str]]
    left_out: Counter[str]  # records that a mark or `data.clean` leaves out
    unused: Counter[str]  # records by column that is not read
    escaped: int
    placeholders: int  # chats with the text of media that is not there
    unknown: int  # tokens for characters that the tokenizer does not have
    samples: list[str]
    signatures: list[Any] | None


class Encoder:
    def __init__(self, config: EncoderConfig) -> None:
        from tokenizers import Tokenizer

        self._config = config
        self._template = (
            Template(config.template, config.special_names, config.added_tokens) if config.template else None
        )
        tokenizer = Tokenizer.from_file(config.tokenizer)
        self._tokenizer = SpanTokenizer(tokenizer, config.added_tokens, self._template)
        self._unknown = _unknown_id(tokenizer, config.policy.end_of_text)

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        parsed = parse_chunk(chunk)
        bad, left_out = parsed.bad, parsed.left_out
        escaped = 0
        accepted: list[Document] = []
        texts: list[list[SpannedText]] = []  # of each document: two for a pair
        for document in parsed.documents:
            reason = filter_reason(document, self._config.clean)
            if reason:
                left_out[reason] += 1
                continue
            safe = self._escape_special_tokens(document)
            try:
                texts.append(self._render(safe))
            except BadRecord as error:
                bad.append((document.where, str(error)))
                continue
            escaped += safe is not document
            accepted.append(document)
        fingerprints = np.array([d.fingerprint() for d in accepted], np.uint64)
        sizes = np.array([d.size for d in accepted], np.uint32)
        kinds = np.array([PAIR if d.rejected else CHAT if d.messages else TEXT for d in accepted], np.uint8)
        ids, mask, counts = self._tokenizer([text for both in texts for text in both])
        owners = np.repeat(np.arange(len(accepted)), [len(both) for both in texts])
        pieces = truncate(ids, mask, counts, owners, kinds == TEXT, self._tokenizer.bos, self._config.policy)
        lengths = np.where(kinds == TEXT, len(self._tokenizer.bos) + 1, 0)
        np.maximum.at(lengths, owners, lengths[owners] + counts)
        near = self._config.clean.duplicates == "near"
        return EncodedChunk(
            *pieces, lengths, fingerprints, sizes, kinds, [d.where for d in accepted], parsed.records, bad, left_out,
            parsed.unused, escaped, parsed.placeholders, int((ids == self._unknown).sum()),
            self._language_samples(accepted, fingerprints),
            [_signature(d) for d in accepted] if near else None,
        )  # fmt: skip

    def _language_samples(self, documents: list[Document], fingerprints: np.ndarray) -> list[str]:
        """The beginnings of some documents, chosen by fingerprint, so that chunk boundaries do not matter."""
        chosen = np.flatnonzero(fingerprints < self._config.language_sample * (2.0**64 - 2**12))
        return [_joined_text(documents[index])[:MAX_CHARACTERS] for index in chosen]

    def _escape_special_tokens(self, document: Document) -> Document:
        """The document with the text of special tokens escaped; the same object if, as nearly always, it has none."""
        has_special, escape = self._tokenizer.has_special, self._tokenizer.escape
        turns = (*document.messages, *document.rejected)
        extras = [document.tools, *((m.tool_calls, m.reasoning) for m in turns if m.tool_calls or m.reasoning)]
        extra_text = json.dumps(extras, ensure_ascii=False) if extras != [()] else ""
        if not any(map(has_special, (*document.contents(), extra_text))):
            return document

        def escape_message(m: Message) -> Message:
            return Message(
                m.role, escape(m.content), _map_strings(m.tool_calls, escape), escape(m.reasoning), m.trained
            )

        messages, rejected = (tuple(map(escape_message, side)) for side in (document.messages, document.rejected))
        tools = _map_strings(document.tools, escape)
        return replace(document, text=escape(document.text), messages=messages, rejected=rejected, tools=tools)

    def _render(self, document: Document) -> list[SpannedText]:
        if not document.messages:
            return [SpannedText(document.text, [(0, len(document.text))])]
        if self._template is None:
            raise UserError(self._config.template_error)
        return [self._render_chat(document, side) for side in (document.messages, document.rejected) if side]

    def _render_chat(self, document: Document, messages: tuple[Message, ...]) -> SpannedText:
        assert self._template is not None  # noqa: S101
        config = self._config
        everything = config.train_on == "all" and not document.rejected
        if everything and all(m.trained for m in messages):
            text = self._template.text(messages, document.tools)
            return SpannedText(text, [(0, len(text))])
        if everything and any(not m.trained and m.role != "assistant" for m in messages):
            raise BadRecord("with data.train_on=all only assistant turns can be left untrained")
        only_last = config.train_on == "last" or bool(document.rejected)
        text, spans = self._template.spans(messages, document.tools, only_last)
        trained = [m.trained for m in messages if m.role == "assistant"][-len(spans) if only_last else 0 :]
        if not all(trained):
            if len(trained) != len(spans):
                raise BadRecord("the template merges assistant turns, so single turns cannot be left untrained")
            left = [span for span, is_trained in zip(spans, trained, strict=True) if is_trained != everything]
            spans = _between(left, len(text)) if everything else left
        if not any(start < end for start, end in spans):
            if config.fail:
                raise UserError(
                    f"{document.where}: nothing in this example is trained on; correct or remove it, or leave such "
                    "examples out with data.on_bad=skip"
                )
            raise BadRecord("nothing in this example is trained on")
        return SpannedText(text, spans)


def filter_reason(document: Document, clean: CleanConfig) -> str | None:
    """Why `data.clean` leaves the document out, if it does."""
    if clean.min_characters is not None or clean.max_characters is not None:
        length = sum(map(len, document.contents()))
        if clean.min_characters is not None and length < clean.min_characters:
            return "too_short"
        if clean.max_characters is not None and length > clean.max_characters:
            return "too_long"
    if clean.languages and detect_language(_joined_text(document)) not in (*clean.languages, UNKNOWN):
        return "other_languages"
    return None


def _between(spans: list[Span], length: int) -> list[Span]:
    """What lies between the spans, of a text of this length."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _unknown_id(tokenizer: Tokenizer, end_of_text: int) -> int:
    """-1 for a tokenizer that has every character; GPT-2 names its end-of-text token as the unknown one."""
    name = getattr(tokenizer.model, "unk_token", None)
    id = tokenizer.token_to_id(name) if name else None
    return -1 if id in (None, end_of_text) else id


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(one, change) for key, one in value.items()}
    return type(value)(_map_strings(one, change) for one in value) if isinstance(value, (list, tuple)) else value


def _joined_text(document: Document) -> str:
    return "\n".join(document.contents())


def _signature(document: Document) -> Any:
    from sojourn.data.clean.duplicates import minhash_signature

    return minhash_signature(_joined_text(document))
