"""Makes an artefact in a folder: reads every source once, encodes chunks in worker processes, and writes as it goes.

The way of a record: `sources/` splits files into chunks; a worker parses, detects the format, renders the chat
template, tokenizes and truncates (`encode.py`); the main process routes documents to splits (`route.py`), packs and
writes rows (`row_writer.py`). The result depends neither on the chunk boundaries nor on the number of workers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sojourn.data.artefact import FORMAT
from sojourn.data.encode import EncodedChunk, Encoder, EncoderConfig
from sojourn.data.examples import make_examples
from sojourn.data.inputs import Inputs
from sojourn.data.preview import Preview
from sojourn.data.route import Router
from sojourn.data.row_writer import RowWriter
from sojourn.data.sources.chunks import Chunk
from sojourn.data.sources.document import Message
from sojourn.data.sources.source import OpenedSource
from sojourn.data.sources.values import BadRecord
from sojourn.data.tally import Tally
from sojourn.data.tokenize.chat_template import Template
from sojourn.data.tokenize.tokenizer import TokenizerBundle
from sojourn.data.train_tokenizer import train_on_sample
from sojourn.data.truncate import LengthPolicy
from sojourn.data.worker_pool import map_in_workers
from sojourn.errors import UserError
from sojourn.plot.data_report import report_svg
from sojourn.storage.files import write_json, write_text

Say = Callable[[str], None]
Show = Callable[[list[tuple[str, str]], list[dict[str, Any]]], None]

_LANGUAGE_SAMPLE_BYTES = 500_000  # enough to know the mix of languages
_PROGRESS_SECONDS = 10
_EXAMPLES = 3

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


def write_artefact(inputs: Inputs, preview: Preview, stage: Path, say: Say, show: Show) -> None:
    data, folder = inputs.data, stage / "tokenizer"
    folder.mkdir()
    tokenizer, compression = inputs.tokenizer, None
    if tokenizer is None:
        say(f"training a tokenizer: {data.tokenizer.replace('auto', 'bpe')}")
        tokenizer, compression = train_on_sample(inputs, preview, folder)
        special = len(tokenizer.added_tokens)
        say(f"tokenizer: {tokenizer.tokenizer.get_vocab_size():,} tokens, {special} of them special")
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    dtype = np.dtype("<u2" if tokenizer.tokenizer.get_vocab_size() <= 2**16 else "<u4")
    unit = 2 if preview.pairs else 1
    writers = {
        name: RowWriter(stage / name, dtype, data.max_length * unit, data.packing, unit) for name in ("train", "eval")
    }
    router = Router(data, inputs.held_out, writers, unit)
    config = encoder_config(inputs, tokenizer, preview, folder / "tokenizer.json")
    shown = islice(make_examples(Encoder(config), tokenizer.tokenizer, preview.documents), _EXAMPLES)
    examples = [asdict(example) for example in shown]
    show([], examples)
    try:
        for opened, for_eval, encoded in encode_all(inputs, config, router, say):
            router.add(opened, for_eval, encoded)
        router.tally.check_bad()
    finally:
        for writer in writers.values():
            writer.close()
    if not writers["train"].pieces:
        raise UserError("data.sources: no document to train on")
    _write_facts(inputs, tokenizer, preview, router, {"compression": compression, "examples": examples}, stage)


def encoder_config(inputs: Inputs, tokenizer: TokenizerBundle, preview: Preview, file: Path) -> EncoderConfig:
    data, template = inputs.data, preview.template
    policy = LengthPolicy(data.max_length, data.long_texts, data.long_chats, tokenizer.id_of(tokenizer.end_of_text))
    return EncoderConfig(
        str(file), template.source if template else None, tokenizer.special_names, tokenizer.added_tokens,
        data.train_on, policy, data.on_bad == "fail", preview.template_error, data.clean,
        min(1.0, _LANGUAGE_SAMPLE_BYTES / max(1, inputs.size)),
    )  # fmt: skip


def encode_all(
    inputs: Inputs, config: EncoderConfig, router: Router, say: Say
) -> Iterator[tuple[OpenedSource, bool, EncodedChunk]]:
    """All chunks of all sources, encoded; each with its source and whether that is for evaluation only."""
    origins: deque[tuple[OpenedSource, bool]] = deque()

    def chunks() -> Iterator[Chunk]:
        for for_eval, group in ((False, inputs.sources), (True, inputs.eval_sources)):
            for opened in group:
                for chunk in opened.chunks():
                    if router.has_enough(opened, for_eval):
                        break
                    origins.append((opened, for_eval))
                    yield chunk

    workers = inputs.workers
    say("reading and tokenizing" + (f" with {workers} processes" if workers > 1 else ""))
    began = last_message = time.monotonic()
    for encoded in map_in_workers(Encoder, config, chunks(), workers):
        yield (*origins.popleft(), encoded)
        if time.monotonic() - last_message > _PROGRESS_SECONDS:
            last_message = time.monotonic()
            say(router.format_progress(last_message - began))


def _write_facts(
    inputs: Inputs, tokenizer: TokenizerBundle, preview: Preview, router: Router, more: dict[str, Any], stage: Path
) -> None:
    """The tokenizer's settings, probes and report; last artefact.json, which makes the folder an artefact."""
    data, tally, writers = inputs.data, router.tally, router.writers
    template = preview.template if tally.train.chats or tokenizer.own_template else None
    tokenizer.save(stage / "tokenizer", template, data.max_length)
    write_json(stage / "probes.json", list(_probes(tokenizer, template)))
    splits = {name: {**getattr(tally, name).facts(), **writers[name].facts()} for name in writers}
    report = {
        **splits, **tally.facts(), **more, "max_length": data.max_length,
        "duplicate_examples": _duplicates(tally, tokenizer),
        "samples": inputs.samples(),
        "held_out": inputs.held_out and {"documents": tally.eval.documents, "of": inputs.held_out.total},
        "converted": {"encoding": data.encoding, "files": preview.converted} if preview.converted else None,
        "sources": [{"name": name, "format": kind} for name, kind in preview.formats],
    }  # fmt: skip
    write_json(stage / "report.json", report)
    write_text(stage / "report.svg", report_svg(_plotted(report)))
    stops = [*([template.end_of_turn()] if template else []), tokenizer.end_of_text]
    files = {
        f"{name}/{kind}.bin": {"bytes": (stage / name / f"{kind}.bin").stat().st_size, "sha256": digest.hexdigest()}
        for name, writer in writers.items()
        for kind, digest in writer.digests.items()
    }
    write_json(stage / "artefact.json", {
        "format": FORMAT, "kind": "pairs" if preview.pairs else "rows", "dtype": writers["train"].dtype.str,
        "max_length": data.max_length, "packing": data.packing, "vocab_size": tokenizer.tokenizer.get_vocab_size(),
        "pad_id": tokenizer.pad_id, "stop_ids": list(dict.fromkeys(map(tokenizer.id_of, stops))),
        "chat": bool(tally.train.chats), "files": files,
    })  # fmt: skip


def _duplicates(tally: Tally, tokenizer: TokenizerBundle) -> list[dict[str, Any]]:
    """The first documents that had come before, with the beginnings of their texts."""
    return [
        {"kind": one.kind, "count": one.count, "where": one.where,
         "text": tokenizer.tokenizer.decode(one.ids, skip_special_tokens=False)[:300]}
        for one in tally.duplicate_examples.values()
    ]  # fmt: skip


def _plotted(report: dict[str, Any]) -> dict[str, Any]:
    train = report["train"]
    keys = ("lengths", "fill", "documents", "tokens", "trained_tokens")
    too_long = sum(train[f"{outcome}_{kind}"] for outcome in ("truncated", "dropped") for kind in ("chats", "texts"))
    shared = {key: report[key] for key in ("max_length", "languages", "duplicates")}
    title = ", ".join(source["name"] for source in report["sources"])
    return {**{key: train[key] for key in keys}, **shared, "truncated": too_long, "title": title}


def _probes(tokenizer: TokenizerBundle, template: Template | None) -> Iterator[dict[str, Any]]:
    """Chats as the model sees them, where the template accepts them; without a template, their plain text."""
    for messages in _PROBES:
        try:
            text = template.text(messages) if template else "\n".join(m.content for m in messages)
        except BadRecord:
            continue
        ids = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
        yield {"messages": [{"role": m.role, "content": m.content} for m in messages], "text": text, "ids": ids}
