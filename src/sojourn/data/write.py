"""Makes an artefact in a folder: reads every source once, in as many processes as there are, and writes as it goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sojourn.data.artefact import FORMAT
from sojourn.data.encode import EncodedChunk, Encoder, EncoderConfig
from sojourn.data.inputs import Inputs
from sojourn.data.plots import report_svg
from sojourn.data.preview import Preview
from sojourn.data.route import Router
from sojourn.data.row_writer import RowWriter
from sojourn.data.sources.chunks import Chunk
from sojourn.data.sources.document import Message
from sojourn.data.sources.formats import BadRecord
from sojourn.data.sources.source import OpenedSource
from sojourn.data.tokenize.chat_template import Template
from sojourn.data.tokenize.tokenizer import TokenizerBundle
from sojourn.data.train_tokenizer import train_on_sample
from sojourn.data.truncate import LengthPolicy
from sojourn.data.worker_pool import work
from sojourn.errors import UserError
from sojourn.machine.hardware import cpu
from sojourn.storage.files import write_json, write_text

Say = Callable[[str], None]

_LOOKED_AT_BYTES = 500_000  # enough to tell a language mix
_ONE_PROCESS_BYTES = 8_000_000  # less is done before workers have started
_MOST_WORKERS = 6  # more would take more than a gigabyte together
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
        words, compression = train_on_sample(inputs, preview, folder)
    words.tokenizer.save(str(folder / "tokenizer.json"))
    dtype = np.dtype("<u2" if words.tokenizer.get_vocab_size() <= 2**16 else "<u4")
    unit = 2 if preview.pairs else 1
    writers = {
        name: RowWriter(stage / name, dtype, data.max_length * unit, data.packing, unit) for name in ("train", "eval")
    }
    router = Router(data, writers, unit)
    recipe = _recipe(inputs, words, preview, folder / "tokenizer.json")
    try:
        for opened, held, encoded in _encoded(inputs, recipe, router, say):
            router.add(opened, held, encoded)
        router.tally.judge()
    finally:
        for writer in writers.values():
            writer.close()
    if not writers["train"].pieces:
        raise UserError("data.sources: no document to train on was found")
    _finish(inputs, words, preview, router, compression, stage)


def _recipe(inputs: Inputs, words: TokenizerBundle, preview: Preview, tokenizer: Path) -> EncoderConfig:
    data, template = inputs.data, preview.template
    return EncoderConfig(
        str(tokenizer), template.source if template else None, words.names, words.added, data.train_on,
        LengthPolicy(data.max_length, data.long_texts, data.long_chats, words.id_of(words.end_of_text)),
        data.on_bad == "fail", preview.refusal, data.clean, min(1.0, _LOOKED_AT_BYTES / max(1, inputs.size)),
    )  # fmt: skip


def _encoded(
    inputs: Inputs, recipe: EncoderConfig, router: Router, say: Say
) -> Iterator[tuple[OpenedSource, bool, EncodedChunk]]:
    """All parcels of all sources, encoded; each with its source and whether that is only for evaluation."""
    origins: deque[tuple[OpenedSource, bool]] = deque()

    def chunks() -> Iterator[Chunk]:
        for held, group in ((False, inputs.sources), (True, inputs.eval_sources)):
            for opened in group:
                for chunk in opened.chunks():
                    if router.has_enough(opened, held):
                        break
                    origins.append((opened, held))
                    yield chunk

    workers = _workers(inputs)
    say("reading and tokenising" + (f" with {workers} processes" if workers > 1 else ""))
    began = news = time.monotonic()
    for encoded in work(Encoder, recipe, chunks(), workers):
        yield (*origins.popleft(), encoded)
        if time.monotonic() - news > _SECONDS_BETWEEN_NEWS:
            news = time.monotonic()
            say(router.news(news - began))


def _workers(inputs: Inputs) -> int:
    if inputs.data.workers != "auto":
        return inputs.data.workers
    return 1 if inputs.size < _ONE_PROCESS_BYTES else max(1, min(int(cpu().usable), _MOST_WORKERS))


def _finish(
    inputs: Inputs, words: TokenizerBundle, preview: Preview, router: Router, compression: Any, stage: Path
) -> None:
    """The tokenizer's settings, probes, report, and last of all the facts that make it an artefact."""
    data, tally, writers = inputs.data, router.tally, router.writers
    template = preview.template if tally.train.chats or words.own_template else None
    words.save(stage / "tokenizer", template, data.max_length)
    write_json(stage / "probes.json", list(_probes(words, template)))
    splits = {name: {**getattr(tally, name).facts(), **writers[name].facts()} for name in writers}
    report = {
        **splits, **tally.facts(), "compression": compression, "max_length": data.max_length,
        "sources": [{"name": name, "format": kind} for name, kind in preview.formats],
        "examples": [asdict(example.beginning()) for example in preview.examples],
    }  # fmt: skip
    write_json(stage / "report.json", report)
    write_text(stage / "report.svg", report_svg(_pictured(report)))
    stops = [*([template.end_of_turn()] if template else []), words.end_of_text]
    files = {
        f"{name}/{kind}.bin": {"bytes": (stage / name / f"{kind}.bin").stat().st_size, "sha256": digest.hexdigest()}
        for name, writer in writers.items()
        for kind, digest in writer.digests.items()
    }
    write_json(stage / "artefact.json", {
        "format": FORMAT, "kind": "pairs" if preview.pairs else "rows", "dtype": writers["train"].dtype.str,
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


def _probes(words: TokenizerBundle, template: Template | None) -> Iterator[dict[str, Any]]:
    """Chats as the model will see them, where the template takes them; for a model of mere texts, their words."""
    for messages in _PROBES:
        try:
            text = template.text(messages) if template else "\n".join(m.content for m in messages)
        except BadRecord:
            continue
        ids = words.tokenizer.encode(text, add_special_tokens=False).ids
        yield {"messages": [{"role": m.role, "content": m.content} for m in messages], "text": text, "ids": ids}
