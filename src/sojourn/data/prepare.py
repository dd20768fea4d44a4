"""From sources to a prepared artefact: tokenise, mask, split, pack, report. Done once for the same inputs."""

from __future__ import annotations

import array
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from sojourn.config.schema import DataConfig
from sojourn.data.artefact import FORMAT, Artefact
from sojourn.data.chat import CHATML, END_OF_TEXT, render
from sojourn.data.document import Message
from sojourn.data.encode import Encoded, encode
from sojourn.data.pack import pack
from sojourn.data.sources import fingerprint, read_sources
from sojourn.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from sojourn.errors import RunFailed, UserError
from sojourn.run.files import sync_file, sync_folder, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Say = Callable[[str], None]

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


def data_key(data: DataConfig) -> str:
    """The hash of everything that decides the artefact's content."""
    tokenizer = data.tokenizer
    if tokenizer != "auto":
        path = Path(tokenizer).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        tokenizer = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else tokenizer
    decides = {
        "format": FORMAT,
        "template": CHATML,
        "sources": [fingerprint(source) for source in data.sources],
        "eval_sources": [fingerprint(source) for source in data.eval_sources],
        "tokenizer": tokenizer,
        "vocab_size": int(data.vocab_size) if tokenizer == "auto" else None,
        **{key: getattr(data, key) for key in ("eval_fraction", "take", "train_on", "max_length")},
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def prepare(data: DataConfig, folder: Path, say: Say = lambda line: None) -> Artefact:
    """The artefact for `data` under `folder`; made now, or found there from before."""
    if not data.sources:
        raise UserError(
            "data.sources: nothing to read; say what, such as data.sources=my.jsonl or --train_file my.jsonl"
        )
    target = folder / data_key(data)
    if (target / "artefact.json").is_file():
        say(f"prepared before: {target}")
        return Artefact(target)
    stage = folder / f".stage-{os.getpid()}-{target.name}"
    try:
        stage.mkdir(parents=True)
        _remove_stages_of_the_dead(folder)
        _write(data, stage, say)
        _make_durable(stage)
        try:
            stage.rename(target)
        except OSError:
            if not (target / "artefact.json").is_file():  # another process was faster: its result is the same
                raise
        sync_folder(folder)
    except OSError as error:
        raise RunFailed(f"preparing failed in {folder}: {error.strerror or error}; nothing was kept") from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return Artefact(target)


def _remove_stages_of_the_dead(folder: Path) -> None:
    """What a killed preparation left behind."""
    import psutil

    for stage in folder.glob(".stage-*-*"):
        pid = stage.name.split("-")[1]
        if not (pid.isdigit() and psutil.pid_exists(int(pid))):
            shutil.rmtree(stage, ignore_errors=True)


def _make_durable(stage: Path) -> None:
    for path in sorted(stage.rglob("*")):
        sync_folder(path) if path.is_dir() else sync_file(path)


def _write(data: DataConfig, stage: Path, say: Say) -> None:
    if data.tokenizer == "auto":
        say(f"training a tokenizer of {int(data.vocab_size):,} tokens")
        tokenizer = train_tokenizer(read_sources(data.sources, data.take), int(data.vocab_size))
    else:
        tokenizer = load_tokenizer(Path(data.tokenizer).expanduser())
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32)
    say("reading and tokenising")
    with _Shelf(stage, "train", dtype) as train, _Shelf(stage, "eval", dtype) as held:
        for encoded in encode(read_sources(data.sources, data.take), tokenizer, data.train_on):
            is_eval = (
                not data.eval_sources and encoded.document.fingerprint() % 1_000_003 < data.eval_fraction * 1_000_003
            )
            (held if is_eval else train).add(encoded, data.max_length)
        for encoded in encode(read_sources(data.eval_sources), tokenizer, data.train_on):
            held.add(encoded, data.max_length)
    if not train.lengths:
        raise UserError("data.sources: no document to train on was found")
    say("packing rows")
    report = {shelf.name: shelf.pack_rows(data.max_length) for shelf in (train, held)}
    chat = train.counts["chats"] > 0
    save_tokenizer(tokenizer, stage / "tokenizer", data.max_length, chat)
    write_json(stage / "probes.json", [_probe(messages, tokenizer) for messages in _PROBES])
    write_json(stage / "report.json", {**report, "examples": train.examples, "sources": [s.path for s in data.sources]})
    write_json(stage / "artefact.json", {
        "format": FORMAT, "dtype": dtype.name, "max_length": data.max_length, "vocab_size": tokenizer.get_vocab_size(),
        "pad_id": tokenizer.token_to_id(END_OF_TEXT), "chat": chat,
    })  # fmt: skip


def _probe(messages: tuple[Message, ...], tokenizer: Tokenizer) -> dict[str, Any]:
    text = render(messages)[0]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return {"messages": [{"role": m.role, "content": m.content} for m in messages], "text": text, "ids": ids}


@dataclass
class _Shelf:
    """One split on its way: documents in reading order on disk, then rewritten row by row."""

    stage: Path
    name: str
    dtype: np.dtype
    lengths: array.array[int] = field(default_factory=lambda: array.array("I"))
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            (
                "documents",
                "chats",
                "tokens",
                "trained_tokens",
                "bytes",
                "split_documents",
                "truncated_chats",
                "dropped_chats",
            ),
            0,
        )
    )
    examples: list[dict[str, Any]] = field(default_factory=list)

    def __enter__(self) -> _Shelf:
        self.folder = self.stage / self.name
        self.folder.mkdir()
        self._tokens: IO[bytes] = (self.folder / "tokens.read").open("wb")
        self._mask: IO[bytes] = (self.folder / "mask.read").open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._tokens.close()
        self._mask.close()

    def add(self, encoded: Encoded, longest: int) -> None:
        """A text longer than a row becomes several documents; a chat is cut, and left out if no answer remains."""
        ids, mask, document = encoded.ids, encoded.mask, encoded.document
        if document.is_chat and len(ids) > longest:
            ids, mask = ids[:longest], mask[:longest]
            if not mask.any():
                self.counts["dropped_chats"] += 1
                return
            self.counts["truncated_chats"] += 1
        self.counts["documents"] += 1
        self.counts["chats"] += document.is_chat
        self.counts["split_documents"] += len(ids) > longest
        self.counts["tokens"] += len(ids)
        self.counts["trained_tokens"] += int(mask.sum())
        self.counts["bytes"] += document.size
        if len(self.examples) < 3:
            self.examples.append(
                {"where": document.where, "ids": ids[:longest].tolist(), "mask": mask[:longest].tolist()}
            )
        for start in range(0, len(ids), longest):
            part = ids[start : start + longest]
            self._tokens.write(part.astype(self.dtype).tobytes())
            self._mask.write(mask[start : start + longest].tobytes())
            self.lengths.append(len(part))

    def pack_rows(self, longest: int) -> dict[str, Any]:
        """Rewrites the documents in the order of their rows and says what came out."""
        lengths = np.array(self.lengths, dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        rows = pack(lengths, longest)
        order = np.array([document for row in rows for document in row], dtype=np.int64)
        for kind, dtype in (("tokens", self.dtype), ("mask", np.dtype(np.uint8))):
            source = self.folder / f"{kind}.read"
            with (self.folder / f"{kind}.bin").open("wb") as file:
                if len(order):
                    read = np.memmap(source, dtype, "r")
                    for document in order:
                        file.write(read[starts[document] : starts[document + 1]].tobytes())
                    del read
            source.unlink()
        placed = np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64)
        np.save(self.folder / "documents.npy", placed[:-1])
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        np.save(self.folder / "rows.npy", np.concatenate([[0], placed[ends]]).astype(np.int64))
        tokens = int(lengths.sum())
        return {**self.counts, "rows": len(rows), "fill": round(tokens / (len(rows) * longest), 4) if rows else 0.0}
