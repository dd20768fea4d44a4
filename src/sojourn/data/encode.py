"""A parcel of records to token ids and loss mask, in whichever process it is handed to.

The mask is 1 on every token that the model is to learn to say. The assistant's words are tokenised apart from what
stands before them, as they will be when the model speaks after a prompt; where a tokenizer cannot do that, whole texts
are tokenised and a token that reaches into the assistant's words belongs to them, as in transformers.
"""

from __future__ import annotations

import array
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sojourn.config.schema import CleanConfig
from sojourn.data.chat import Span, Template
from sojourn.data.document import Document, Message
from sojourn.data.formats import Damaged
from sojourn.data.parcels import Lot, read_lot
from sojourn.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXT, CHAT, PAIR = range(3)
WHOLE, CUT, SPLIT, DROPPED = range(4)

# Stands for the text of a special token in a document: an escape of the token's number.
_ESCAPE = re.compile("\ufdd2([0-9]+)\ufdd3")
_PROBES = ("Hello there", "你好", "123", "(a)", "“so”")


@dataclass(frozen=True)
class Recipe:
    """All that decides how a document becomes tokens, in a form that travels to another process."""

    tokenizer: str
    template: str | None
    names: dict[str, str]
    added: dict[str, bool]
    end_of_text: int
    train_on: str
    max_length: int
    long_texts: str
    long_chats: str
    fail: bool
    refusal: str = ""  # why there is no template, should a chat come
    clean: CleanConfig = field(default_factory=CleanConfig)
    look_at: float = 1.0


@dataclass
class Encoded:
    """What became of a parcel. Pieces are what rows are packed of; a pair has two, a long text may have many."""

    ids: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    document: np.ndarray
    fingerprints: np.ndarray
    sizes: np.ndarray
    kinds: np.ndarray
    fates: np.ndarray
    records: int
    bad: list[tuple[str, str]]
    left_out: dict[str, int]
    escaped: int
    languages: dict[str, int]
    signatures: list[Any] | None


@dataclass(frozen=True, slots=True)
class _Strand:
    """A text to be tokenised, and the spans of it that are trained on."""

    text: str
    spans: list[Span]


class Encoder:
    def __init__(self, recipe: Recipe, tokenizer: Tokenizer | None = None) -> None:
        if tokenizer is None:
            from tokenizers import Tokenizer as Class

            tokenizer = Class.from_file(recipe.tokenizer)
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._template = Template(recipe.template, recipe.names, recipe.added) if recipe.template else None
        special = sorted((token for token, is_special in recipe.added.items() if is_special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._literal = {token: _ids_of_words(tokenizer, token) for token in special}
        self._tokens = special
        self._before = _added_before(tokenizer)
        self._apart = self._template is None or self._can_tell_apart(self._template)

    def __call__(self, lot: Lot) -> Encoded:
        documents, records, bad = read_lot(lot)
        left_out = dict.fromkeys(("too_short", "too_long", "other_languages"), 0)
        escaped, languages = 0, dict[str, int]()
        kept: list[Document] = []
        strands: list[list[_Strand]] = []
        for document in documents:
            reason = self._unwanted(document)
            if reason:
                left_out[reason] += 1
                continue
            safe = self._escape(document)
            try:
                strands.append(self._strands(safe))
            except Damaged as error:
                bad.append((document.where, str(error)))
                continue
            escaped += safe is not document
            kept.append(document)
        fingerprints = np.array([d.fingerprint() for d in kept], np.uint64)
        sizes = np.array([d.size for d in kept], np.uint32)
        for number in np.flatnonzero(fingerprints < self._recipe.look_at * (2.0**64 - 2**12)):
            try:
                code = _language(kept[number])
            except UserError:  # without the library that knows them all; a report can do without
                code = "?"
            languages[code] = languages.get(code, 0) + int(sizes[number])
        kinds = np.array([PAIR if d.rejected else CHAT if d.messages else TEXT for d in kept], np.uint8)
        ids, mask, counts = self._tokens_of([one for both in strands for one in both])
        pieces = self._pieces(ids, mask, counts, [len(both) for both in strands], kinds, kept)
        signatures = [_signature(d) for d in kept] if self._recipe.clean.duplicates == "near" else None
        return Encoded(
            *pieces[:4], fingerprints, sizes, kinds, pieces[4], records, bad, left_out, escaped, languages, signatures
        )

    def _unwanted(self, document: Document) -> str | None:
        clean = self._recipe.clean
        if clean.min_characters is not None or clean.max_characters is not None:
            length = sum(map(len, document.contents()))
            if clean.min_characters is not None and length < clean.min_characters:
                return "too_short"
            if clean.max_characters is not None and length > clean.max_characters:
                return "too_long"
        if clean.languages and _language(document) not in (*clean.languages, "?"):
            return "other_languages"
        return None

    def _escape(self, document: Document) -> Document:
        """The document with the text of special tokens made harmless; itself, as nearly always, if it has none."""
        if not any(self._special.search(part) for part in document.contents()):
            return document
        turns = [
            tuple(replace(m, content=self._escaped(m.content)) for m in side)
            for side in (document.messages, document.rejected)
        ]
        return replace(document, text=self._escaped(document.text), messages=turns[0], rejected=turns[1])

    def _escaped(self, text: str) -> str:
        return self._special.sub(lambda found: f"\ufdd2{self._tokens.index(found.group())}\ufdd3", text)

    def _strands(self, document: Document) -> list[_Strand]:
        if not document.messages:
            return [_Strand(document.text, [(0, len(document.text))])]
        if self._template is None:
            raise UserError(self._recipe.refusal)
        return [self._chat(document, side) for side in (document.messages, document.rejected) if side]

    def _chat(self, document: Document, messages: tuple[Message, ...]) -> _Strand:
        assert self._template is not None  # noqa: S101
        recipe = self._recipe
        if recipe.train_on == "all" and not document.rejected:
            text = self._template.text(messages, document.tools)
            return _Strand(text, [(0, len(text))])
        only_last = recipe.train_on == "last" or bool(document.rejected)
        text, spans = self._template.spans(messages, document.tools, only_last)
        trained = [m.trained for m in messages if m.role == "assistant"][-len(spans) if only_last else 0 :]
        if not all(trained):
            if len(trained) != len(spans):
                raise Damaged("the template joins the assistant's turns, so single ones cannot be left untrained")
            spans = [span for span, wanted in zip(spans, trained, strict=True) if wanted]
        if not any(start < end for start, end in spans):
            if recipe.fail:
                raise UserError(
                    f"{document.where}: nothing in this example is trained on; mend or remove it, or leave such "
                    "examples out with data.on_bad=skip"
                )
            raise Damaged("nothing in this example is trained on")
        return _Strand(text, spans)

    def _tokens_of(self, strands: list[_Strand]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids and mask of all strands in one row each, and how many tokens each strand has."""
        parts: list[tuple[str, bool, list[Span]]] = []
        owner: list[int] = []
        for number, strand in enumerate(strands):
            found = _cut_apart(strand) if self._apart else [(strand.text, False, strand.spans)]
            for part in found:
                for piece in _at_escapes(part) if "\ufdd2" in part[0] else (part,):
                    parts.append(piece)
                    owner.append(number)
        texts = [text for text, _, _ in parts]
        encode = self._tokenizer.encode_batch_fast if self._apart else self._tokenizer.encode_batch
        encodings = encode(texts, add_special_tokens=False)
        ids, counts, masks = array.array("I"), [], []
        for (text, trained, spans), encoding in zip(parts, encodings, strict=True):
            words = self._literal[self._tokens[int(text[1:-1])]] if text[:1] == "\ufdd2" else encoding.ids
            ids.extend(words)
            counts.append(len(words))
            if not self._apart:
                masks.append(
                    _overlap(encoding.offsets, spans)
                    if spans and text[:1] != "\ufdd2"
                    else np.full(len(words), trained, np.uint8)
                )
        trained_parts = np.fromiter((trained for _, trained, _ in parts), np.uint8, len(parts))
        mask = np.repeat(trained_parts, counts) if self._apart else np.concatenate([np.zeros(0, np.uint8), *masks])
        per_strand = np.bincount(np.array(owner, np.int64), np.array(counts, np.float64), len(strands)).astype(np.int64)
        return np.frombuffer(ids, np.uint32) if ids else np.zeros(0, np.uint32), mask, per_strand

    def _pieces(
        self,
        ids: np.ndarray,
        mask: np.ndarray,
        counts: np.ndarray,
        strands: list[int],
        kinds: np.ndarray,
        documents: list[Document],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Texts get their beginning and end, long documents are cut by policy; a piece's first token is not trained."""
        recipe = self._recipe
        owner = np.repeat(np.arange(len(strands)), strands)
        fates = np.zeros(len(documents), np.uint8)
        longest = recipe.max_length
        texts = kinds[owner] == TEXT
        if not texts.any() and (counts <= longest).all():
            mask = mask.copy()
            mask[np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)[counts > 0]] = 0
            return ids, mask, counts, owner, fates
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        found: list[tuple[np.ndarray, np.ndarray, int]] = []
        for number in range(len(counts)):
            part, trained = ids[starts[number] : starts[number + 1]], mask[starts[number] : starts[number + 1]]
            document = int(owner[number])
            if texts[number]:
                part = np.concatenate([self._before, part, [recipe.end_of_text]]).astype(np.uint32)
                trained = np.concatenate([np.zeros(len(self._before)), trained, [1]]).astype(np.uint8)
            over = len(part) > longest
            policy = (recipe.long_texts if texts[number] else recipe.long_chats) if over else "keep"
            if policy == "truncate":
                part, trained = part[:longest], trained[:longest]
                fates[document] = max(fates[document], CUT if trained[1:].any() else DROPPED)
            elif policy == "drop":
                fates[document] = DROPPED
            elif policy == "split":
                fates[document] = SPLIT
            found += [
                (part[at : at + longest], trained[at : at + longest], document) for at in range(0, len(part), longest)
            ]
        found = [one for one in found if fates[one[2]] != DROPPED]
        lengths = np.array([len(part) for part, _, _ in found], np.int64)
        ids = np.concatenate([np.zeros(0, np.uint32), *(part for part, _, _ in found)])
        mask = np.concatenate([np.zeros(0, np.uint8), *(trained for _, trained, _ in found)])
        mask[(np.cumsum(lengths) - lengths)[lengths > 0]] = 0
        return ids, mask, lengths, np.array([document for _, _, document in found], np.int64), fates

    def _can_tell_apart(self, template: Template) -> bool:
        """Do prompt and answer, tokenised one by one, give the tokens of the whole?"""
        for words in _PROBES:
            turns = (Message("user", words), Message("assistant", words)) * 2
            strand = _Strand(*template.spans(turns))
            whole = self._tokenizer.encode(strand.text, add_special_tokens=False).ids
            parts = self._tokenizer.encode_batch([text for text, _, _ in _cut_apart(strand)], add_special_tokens=False)
            if whole != [token for part in parts for token in part.ids]:
                return False
        return True


def _cut_apart(strand: _Strand) -> list[tuple[str, bool, list[Span]]]:
    """The text in pieces, each trained on or not."""
    pieces: list[tuple[str, bool, list[Span]]] = []
    place = 0
    for start, end in strand.spans:
        if place < start:
            pieces.append((strand.text[place:start], False, []))
        pieces.append((strand.text[start:end], True, []))
        place = end
    if place < len(strand.text):
        pieces.append((strand.text[place:], False, []))
    return pieces


def _at_escapes(part: tuple[str, bool, list[Span]]) -> list[tuple[str, bool, list[Span]]]:
    """A piece cut at its escapes, each of which becomes a piece of its own."""
    text, trained, spans = part
    found, place = [], 0
    cuts = [cut for match in _ESCAPE.finditer(text) for cut in match.span()]
    for cut in [*cuts, len(text)]:
        if place < cut:
            inside = [
                (max(start, place) - place, min(end, cut) - place)
                for start, end in spans
                if start < cut and end > place
            ]
            is_escape = text[place] == "\ufdd2"
            found.append((text[place:cut], bool(inside) if spans and is_escape else trained, inside))
        place = cut
    return found


def _overlap(offsets: list[Span], spans: list[Span]) -> np.ndarray:
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), np.uint8)
    for start, end in spans:
        mask[(ends > start) & (starts < end)] = 1
    return mask


def _ids_of_words(tokenizer: Tokenizer, token: str) -> list[int]:
    """The ids of a special token's text as mere words."""
    tokenizer.encode_special_tokens = True
    try:
        return list(tokenizer.encode(token, add_special_tokens=False).ids)
    finally:
        tokenizer.encode_special_tokens = False


def _added_before(tokenizer: Tokenizer) -> np.ndarray:
    """What the tokenizer puts before every text, such as Llama's <|begin_of_text|>."""
    bare, full = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    place = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
    return np.array(full[:place], np.uint32)


def _language(document: Document) -> str:
    from sojourn.data.language import language

    return language(" ".join(document.contents()) if len(document.contents()) > 1 else document.contents()[0])


def _signature(document: Document) -> Any:
    from sojourn.data.duplicates import signature

    return signature("\n".join(document.contents()))
