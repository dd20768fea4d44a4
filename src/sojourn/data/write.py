"""Makes an artefact in a folder: reads every source once, in as many processes as there are, and writes as it goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sojourn.config.schema import DataConfig, Source
from sojourn.data.artefact import FORMAT
from sojourn.data.clean.duplicates import Near, Seen
from sojourn.data.crew import work
from sojourn.data.cut import Policy
from sojourn.data.encode import PAIR, Encoded, Encoder, Recipe
from sojourn.data.inputs import Inputs
from sojourn.data.picture import report_svg
from sojourn.data.preview import Preview
from sojourn.data.read.document import Document, Message
from sojourn.data.read.parcels import Lot, read_lot
from sojourn.data.read.sources import Opened
from sojourn.data.shelf import Shelf, gather
from sojourn.data.tally import Tally
from sojourn.data.words.chat import Template
from sojourn.data.words.tokenizer import Words, train_tokenizer
from sojourn.errors import UserError
from sojourn.machine.hardware import cpu
from sojourn.run.files import write_json, write_text

Say = Callable[[str], None]

_SAMPLE_BYTES = 30_000_000  # more text changes a tokenizer little
_LOOKED_AT_BYTES = 500_000  # enough to tell a language mix
_COMPRESSION_BYTES = 300_000
_ONE_PROCESS_BYTES = 8_000_000  # less is done before workers have started
_MOST_WORKERS = 8  # a hundred megabytes each
_EVAL_PARTS = 1_000_003
_SECONDS_BETWEEN_NEWS = 10

_PROBES = (
    (Message("user", "What is 2 + 3?"),),
    (
        Message("system", "You are kind."),
        Message("user", "Hello!"),
        Message("assistant", "Hi."),
        Message("user", "再见，你好吗？"),
    ),
    (Message("user", "  spaces, tabs\tand\n\nlines: 1,234.5 café — naïve 🙂"),),
)


def write_artefact(inputs: Inputs, preview: Preview, stage: Path, say: Say) -> None:
    data, folder = inputs.data, stage / "tokenizer"
    folder.mkdir()
    words, compression = inputs.words, None
    if words is None:
        say(f"training a tokenizer of {int(data.vocab_size):,} tokens")
        words, compression = _train(inputs, preview, folder)
    words.tokenizer.save(str(folder / "tokenizer.json"))
    dtype = np.dtype("<u2" if words.tokenizer.get_vocab_size() <= 2**16 else "<u4")
    unit = 2 if preview.pairs else 1
    shelves = {
        name: Shelf(stage / name, dtype, data.max_length * unit, data.packing, unit) for name in ("train", "eval")
    }
    sorting = _Sorting(data, shelves, unit)
    recipe = _recipe(inputs, words, preview, folder / "tokenizer.json")
    try:
        for opened, held, encoded in _encoded(inputs, recipe, sorting, say):
            sorting.add(opened, held, encoded)
        sorting.tally.judge()
    finally:
        for shelf in shelves.values():
            shelf.close()
    if not shelves["train"].pieces:
        raise UserError("data.sources: no document to train on was found")
    _finish(inputs, words, preview, sorting, compression, stage)


def _recipe(inputs: Inputs, words: Words, preview: Preview, tokenizer: Path) -> Recipe:
    data, template = inputs.data, preview.template
    return Recipe(
        str(tokenizer), template.source if template else None, words.names, words.added, data.train_on,
        Policy(data.max_length, data.long_texts, data.long_chats, words.id_of(words.end_of_text)),
        data.on_bad == "fail", preview.refusal, data.clean, min(1.0, _LOOKED_AT_BYTES / max(1, inputs.size)),
    )  # fmt: skip


def _encoded(inputs: Inputs, recipe: Recipe, sorting: _Sorting, say: Say) -> Iterator[tuple[Opened, bool, Encoded]]:
    """All parcels of all sources, encoded; each with its source and whether that is only for evaluation."""
    origins: deque[tuple[Opened, bool]] = deque()

    def lots() -> Iterator[Lot]:
        for held, group in ((False, inputs.sources), (True, inputs.eval_sources)):
            for opened in group:
                for lot in opened.lots():
                    if sorting.has_enough(opened, held):
                        break
                    origins.append((opened, held))
                    yield lot

    workers = _workers(inputs)
    say("reading and tokenising" + (f" with {workers} processes" if workers > 1 else ""))
    began = news = time.monotonic()
    for encoded in work(Encoder, recipe, lots(), workers):
        yield (*origins.popleft(), encoded)
        if time.monotonic() - news > _SECONDS_BETWEEN_NEWS:
            news = time.monotonic()
            say(sorting.news(news - began))


def _workers(inputs: Inputs) -> int:
    if inputs.data.workers != "auto":
        return inputs.data.workers
    return 1 if inputs.size < _ONE_PROCESS_BYTES else max(1, min(int(cpu().usable), _MOST_WORKERS))


@dataclass
class _Sorting:
    """Decides for each document whether it stays, in which split and how often, and puts it on the shelf."""

    data: DataConfig
    shelves: dict[str, Shelf]
    unit: int
    near: Near | None = None
    seen: Seen = field(default_factory=Seen)
    taken: dict[int, tuple[int, int]] = field(default_factory=dict)
    total: int = 0

    def __post_init__(self) -> None:
        self.tally = Tally(self.data)
        if self.data.clean.duplicates == "near":
            self.near = Near(self.data.clean.similarity)

    def has_enough(self, opened: Opened, held: bool) -> bool:
        documents, size = self.taken.get(id(opened), (0, 0))
        source, take = opened.source, self.data.take
        return (
            (source.take is not None and documents >= source.take)
            or (source.size is not None and size >= source.size and not _is_builtin(source))
            or (take is not None and self.total >= take and not held)
        )

    def add(self, opened: Opened, held: bool, encoded: Encoded) -> None:
        self.tally.read(encoded)
        if ((encoded.kinds == PAIR) != (self.unit == 2)).any():
            raise UserError(
                f"{opened.source.path}: preference pairs and other documents; prepare them apart, each for its own run"
            )
        copies = self._copies(opened, held, encoded)
        aside = np.full(len(copies), held)
        if not self.data.eval_sources:
            aside = encoded.fingerprints % np.uint64(_EVAL_PARTS) < self.data.eval_fraction * _EVAL_PARTS
        for name, which in (("train", ~aside), ("eval", aside)):
            times = np.where(which, copies, 0)
            getattr(self.tally, name).add(encoded, times if name == "train" else np.minimum(times, 1))
            self._shelve(self.shelves[name], encoded, times if name == "train" else np.minimum(times, 1))

    def _copies(self, opened: Opened, held: bool, encoded: Encoded) -> np.ndarray:
        """How often each document is taken: a weight of 2.3 gives it twice, and three tenths of them once more."""
        source, fingerprints = opened.source, encoded.fingerprints
        documents, size = self.taken.get(id(opened), (0, 0))
        stays = np.ones(len(fingerprints), bool)
        if source.take is not None:
            stays &= documents + np.arange(len(stays)) < source.take
        if source.size is not None and not _is_builtin(source):
            stays &= size + np.cumsum(encoded.sizes) <= source.size
        self.taken[id(opened)] = (documents + len(stays), size + int(encoded.sizes.sum()))
        stays &= self._not_seen(encoded, stays)
        whole, part = divmod(source.weight, 1.0)
        copies = np.where(stays, int(whole) + (fingerprints < part * 2.0**64), 0)
        if self.data.take is not None and not held:
            room = max(0, int(self.data.take) - self.total)
            copies = np.diff(np.minimum(np.cumsum(copies), room), prepend=0)
        self.total += 0 if held else int(copies.sum())
        return copies

    def _not_seen(self, encoded: Encoded, stays: np.ndarray) -> np.ndarray:
        """Which documents are no duplicates of earlier ones; all of them, if duplicates are to be kept."""
        new = np.ones(len(stays), bool)
        new[stays] = self.seen.new(encoded.fingerprints[stays])
        self.tally.duplicates += int((~new).sum())
        if self.data.clean.duplicates == "keep":
            return np.ones(len(stays), bool)
        if self.near is not None and encoded.signatures is not None:
            left = np.flatnonzero(new & stays)
            unlike = self.near.new([encoded.signatures[number] for number in left])
            self.tally.near_duplicates += int((~unlike).sum())
            new[left[~unlike]] = False
        return new

    def _shelve(self, shelf: Shelf, encoded: Encoded, times: np.ndarray) -> None:
        lengths = encoded.lengths
        units = np.repeat(np.arange(len(lengths) // self.unit), times[encoded.document[:: self.unit]])
        pieces = (units[:, None] * self.unit + np.arange(self.unit)).reshape(-1)
        if len(pieces):
            where = gather((np.cumsum(lengths) - lengths)[pieces], lengths[pieces])
            shelf.add(encoded.ids[where], encoded.mask[where], lengths[pieces])

    def news(self, seconds: float) -> str:
        tokens = sum(shelf.added for shelf in self.shelves.values())
        return f"{self.tally.records:,} records, {tokens:,} tokens, {tokens / seconds:,.0f} a second"


def _is_builtin(source: Source) -> bool:
    return source.path.startswith("builtin:")


def _train(inputs: Inputs, preview: Preview, folder: Path) -> tuple[Words, list[dict[str, Any]]]:
    """A tokenizer from an even sample of all sources, and how well it and smaller ones inside it compress."""
    from sojourn.data.clean.language import language
    from sojourn.data.words.vocabulary import compression

    samples: dict[str, list[str]] = {}
    measured = 2.0**64 * _COMPRESSION_BYTES / max(1, inputs.size)

    def texts() -> Iterator[str]:
        for document in _sample(inputs):
            text = (
                preview.template.text(document.messages, document.tools)
                if document.is_chat and preview.template
                else document.text
            )
            if document.fingerprint() < measured:
                samples.setdefault(language(text), []).append(text)
            yield text

    words = train_tokenizer(inputs.data, texts(), folder)
    large = sum(len(text) for listed in samples.values() for text in listed) / 20
    return words, compression(words.tokenizer, {c: s for c, s in samples.items() if sum(map(len, s)) >= large})


def _sample(inputs: Inputs) -> Iterator[Document]:
    share = min(1.0, _SAMPLE_BYTES / max(1, inputs.size)) * 2.0**64
    for opened in inputs.sources:
        left = None if opened.source.take is None else int(opened.source.take)
        for lot in opened.lots():
            documents = read_lot(lot)[0]
            if left is not None:
                documents, left = documents[:left], left - len(documents)
            yield from (d for d in documents if share >= 2.0**64 or d.fingerprint() < share)
            if left is not None and left <= 0:
                break


def _finish(inputs: Inputs, words: Words, preview: Preview, sorting: _Sorting, compression: Any, stage: Path) -> None:
    """The tokenizer's settings, probes, report, and last of all the facts that make it an artefact."""
    data, tally, shelves = inputs.data, sorting.tally, sorting.shelves
    template = preview.template if tally.train.chats or words.own_template else None
    words.save(stage / "tokenizer", template, data.max_length)
    write_json(stage / "probes.json", [_probe(messages, words, template) for messages in _PROBES])
    splits = {name: {**getattr(tally, name).facts(), **shelves[name].facts()} for name in shelves}
    report = {
        **splits, **tally.facts(), "compression": compression, "max_length": data.max_length,
        "sources": [{"name": name, "format": kind} for name, kind in preview.formats],
        "examples": [asdict(example) for example in preview.examples],
    }  # fmt: skip
    write_json(stage / "report.json", report)
    write_text(stage / "report.svg", report_svg(_pictured(report)))
    stops = [*([template.end_of_turn()] if template else []), words.end_of_text]
    files = {
        f"{name}/{kind}.bin": {"bytes": (stage / name / f"{kind}.bin").stat().st_size, "sha256": digest.hexdigest()}
        for name, shelf in shelves.items()
        for kind, digest in shelf.digests.items()
    }
    write_json(stage / "artefact.json", {
        "format": FORMAT, "kind": "pairs" if preview.pairs else "rows", "dtype": shelves["train"].dtype.str,
        "max_length": data.max_length, "packing": data.packing, "vocab_size": words.tokenizer.get_vocab_size(),
        "pad_id": words.pad_id, "stop_ids": list(dict.fromkeys(map(words.id_of, stops))),
        "chat": bool(tally.train.chats), "files": files,
    })  # fmt: skip


def _pictured(report: dict[str, Any]) -> dict[str, Any]:
    train = report["train"]
    keys = ("lengths", "fill", "documents", "tokens", "trained_tokens")
    cut = train["truncated_chats"] + train["truncated_texts"] + train["dropped_chats"] + train["dropped_texts"]
    beside = {key: report[key] for key in ("max_length", "languages", "duplicates")}
    title = ", ".join(source["name"] for source in report["sources"])
    return {**{key: train[key] for key in keys}, **beside, "truncated": cut, "title": title}


def _probe(messages: tuple[Message, ...], words: Words, template: Template | None) -> dict[str, Any]:
    """A chat as the model will see it; where it sees only texts, the words of one."""
    text = template.text(messages) if template else "\n".join(m.content for m in messages)
    ids = words.tokenizer.encode(text, add_special_tokens=False).ids
    return {"messages": [{"role": m.role, "content": m.content} for m in messages], "text": text, "ids": ids}
