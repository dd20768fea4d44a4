"""`sojourn prepare --output_dir FOLDER`: documents and tokenizer as plain files, for `--train_file`, `--val_file` and
`--tokenizer_path`, here and elsewhere.

FOLDER/train.jsonl, validation.jsonl    what the artefact was made from, a document a line, split as there
FOLDER/tokenizer.model, tokenizer.json  the tokenizer; instead of new byte-level BPE a new SentencePiece model
FOLDER/.prepared.json                   that these files are ours, and may be replaced
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.data.encode import EncodedChunk, Encoder
from sojourn.data.inputs import Inputs, open_inputs
from sojourn.data.preview import Preview, make_preview
from sojourn.data.route import Router
from sojourn.data.sample import hold_out, take_sample
from sojourn.data.settings import data_settings
from sojourn.data.sources.chunks import parse_chunk
from sojourn.data.sources.document import Document, Message
from sojourn.data.tokenize.tokenizer import open_tokenizer
from sojourn.data.train_tokenizer import train_on_sample
from sojourn.data.write import encoder_config
from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.storage.files import write_json

_TRAIN, _VALIDATION, _MARK = "train.jsonl", "validation.jsonl", ".prepared.json"
_STAGE = ".stage"


def check_output_folder(config: RunConfig, folder: Path) -> None:
    """Neither the sources nor other files of the user are overwritten, and no output is read as a source next time."""
    target = expand_user(folder).resolve()
    for source in (*config.data.sources, *config.data.eval_sources):
        path = expand_user(source.path).resolve()
        if path.exists() and (target in (path, *path.parents) or path in target.parents):
            raise UserError(f"--output_dir: {folder} holds the source {source.path} or lies in it; name another folder")
    for name in (_TRAIN, _VALIDATION):
        if (target / name).exists() and not (target / _MARK).is_file():
            raise UserError(
                f"--output_dir: {folder / name} is there already, and not from sojourn prepare; name another folder"
            )


def write_output_folder(config: RunConfig, artefact: Artefact, folder: Path, say: Callable[[str], None]) -> None:
    folder = expand_user(folder)
    stage = folder / _STAGE
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    try:
        inputs = open_inputs(data_settings(config), lambda line: None, config.advanced.split_digits)
        inputs = hold_out(take_sample(inputs, lambda line: None), lambda line: None)
        preview = make_preview(inputs)
        counts = _write_documents(inputs, preview, artefact, stage)
        _write_tokenizer(inputs, preview, artefact, stage)
        (folder / _VALIDATION).unlink(missing_ok=True)
        for path in sorted(stage.iterdir()):
            path.replace(folder / path.name)
        write_json(folder / _MARK, {"artefact": artefact.path.name})
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    for name, count in counts.items():
        say(f"{folder / name}: {count:,} documents" if count else f"{folder / name}: not written: no document is left")
    names = [name for name in ("tokenizer.model", "tokenizer.json") if (folder / name).is_file()]
    say(f"{folder}: {', '.join(names)}")


@dataclass
class _DocumentRouter(Router):
    """Writes documents to the files of their splits, where a Router writes their tokens."""

    documents: list[Document] = field(default_factory=list)

    def _write(self, writer: Any, encoded: EncodedChunk, times: Any) -> None:
        for document, copies in zip(self.documents, times.tolist(), strict=True):
            writer.write(copies * (json.dumps(_to_record(document), ensure_ascii=False) + "\n"))


def _write_documents(inputs: Inputs, preview: Preview, artefact: Artefact, stage: Path) -> dict[str, int]:
    """How many documents are in each file."""
    tokenizer = open_tokenizer(artefact.tokenizer)
    encode = Encoder(encoder_config(inputs, tokenizer, preview, artefact.tokenizer / "tokenizer.json"))
    with ExitStack() as files:
        writers: dict[str, Any] = {
            split: files.enter_context((stage / name).open("w", encoding="utf-8", newline="\n"))
            for split, name in (("train", _TRAIN), ("eval", _VALIDATION))
        }
        router = _DocumentRouter(inputs.data, inputs.held_out, writers, 2 if preview.pairs else 1)
        for for_eval, group in ((False, inputs.sources), (True, inputs.eval_sources)):
            for opened in group:
                for chunk in opened.chunks():
                    if router.has_enough(opened, for_eval):
                        break
                    encoded = encode(chunk)
                    router.documents = list(_accepted(parse_chunk(chunk).documents, encoded))
                    router.add(opened, for_eval, encoded)
    if not (stage / _VALIDATION).stat().st_size:
        _hold_out_first(stage)
    return {name: _count_lines(stage / name) for name in (_TRAIN, _VALIDATION)}


def _hold_out_first(stage: Path) -> None:
    """A file of no documents cannot be read as one."""
    first, *others = (stage / _TRAIN).read_text(encoding="utf-8").splitlines(keepends=True)
    if others:
        (stage / _VALIDATION).write_text(first, encoding="utf-8", newline="\n")
        (stage / _TRAIN).write_text("".join(others), encoding="utf-8", newline="\n")
    else:
        (stage / _VALIDATION).unlink()


def _count_lines(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _write_tokenizer(inputs: Inputs, preview: Preview, artefact: Artefact, stage: Path) -> None:
    if inputs.tokenizer is None and inputs.data.tokenizer in ("auto", "bpe"):
        data = inputs.data.model_copy(update={"tokenizer": "sentencepiece"})
        tokenizer, _ = train_on_sample(replace(inputs, data=data), preview, stage)
        tokenizer.save(stage, preview.template if artefact.facts["chat"] else None, data.max_length)
        return
    for path in artefact.tokenizer.iterdir():
        shutil.copyfile(path, stage / path.name)


def _to_record(document: Document) -> dict[str, Any]:
    """As `sources/formats.py` reads it again."""
    if not document.messages:
        return {"text": document.text}
    tools = {"tools": document.tools} if document.tools else {}
    if document.rejected:
        sides = (("chosen", document.messages), ("rejected", document.rejected))
        return {name: [_to_turn(message) for message in messages] for name, messages in sides} | tools
    return {"messages": [_to_turn(message) for message in document.messages], **tools}


def _to_turn(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [{"type": "function", "function": call} for call in message.tool_calls]
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    return turn if message.trained else {**turn, "weight": 0}


def _accepted(documents: list[Document], encoded: EncodedChunk) -> Iterator[Document]:
    """Those that the encoder has kept, in their order."""
    fingerprints = iter(encoded.fingerprints.tolist())
    wanted = next(fingerprints, None)
    for document in documents:
        if document.fingerprint() == wanted:
            yield document
            wanted = next(fingerprints, None)
