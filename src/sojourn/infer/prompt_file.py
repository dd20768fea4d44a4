"""A file of prompts: a line each (.txt), or records with `prompt` or `messages` and any other columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sojourn.data.sources.chunks import parse_record
from sojourn.data.sources.document import Message
from sojourn.data.sources.files import find_files, read_bytes, suffix_of
from sojourn.data.sources.formats import read_tools
from sojourn.data.sources.readers import read_file
from sojourn.data.sources.texts import normalize_newlines, whole_lines
from sojourn.data.sources.values import BadRecord, check_text, column_names
from sojourn.errors import UserError
from sojourn.infer.prompts import PromptEncoder, read_messages

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class PromptRow:
    """`columns`: everything in the record. Either `text` or `messages`."""

    index: int
    where: str
    columns: dict[str, Any]
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = field(default=())

    def encode(self, encoder: PromptEncoder, raw: bool) -> list[int]:
        """Raises BadRecord."""
        if not self.messages:
            return encoder.prompt(self.text, raw)
        if raw or not encoder.is_chat:
            why = "--raw takes text alone" if raw else "the model has no chat template"
            raise BadRecord(f"messages, but {why}")
        return encoder.chat(self.messages, self.tools)


def check_prompt_file(path: str, option: str = "--prompts") -> Path:
    """Before a model is loaded for it."""
    try:
        (file,) = find_files(path)
    except UserError as error:
        raise UserError(str(error).replace("data.sources: ", f"{option}: ", 1)) from None
    except ValueError:
        raise UserError(f"{option}: {path}: name one file, such as prompts.jsonl") from None
    return file


def read_prompts(path: Path) -> Iterator[PromptRow]:
    """In the file's order, whose numbers are `index`. Raises UserError at a record without a prompt."""
    suffix = suffix_of(path)
    records = _lines(path) if suffix is not None and suffix.inner in (".txt", ".md") else _records(path)
    for index, (where, raw) in enumerate(records):
        try:
            yield _row(index, where, raw)
        except BadRecord as error:
            raise UserError(f"{where}: {error}") from None


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Lines that are not blank."""
    blocks = normalize_newlines(read_bytes(path, _BLOCK_BYTES))
    for first, block in whole_lines(str(path), blocks):
        for number, line in enumerate(block.removesuffix(b"\n").split(b"\n"), first):
            where = f"{path}:{number}"
            try:
                text = line.decode()
            except UnicodeDecodeError:
                raise UserError(f"{where}: not UTF-8 text; save the file as UTF-8") from None
            if text.strip():
                yield where, {"prompt": text}


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    for chunk in read_file(path, _BLOCK_BYTES):
        for line, raw in zip(chunk.lines, chunk.records, strict=True):
            yield f"{chunk.file}:{line}", raw


def _row(index: int, where: str, raw: Any) -> PromptRow:
    record = parse_record(raw)
    system = record.get("system")
    before = (Message("system", check_text(system, "system")),) if system else ()
    tools = read_tools(record) if "tools" in record or "functions" in record else ()
    prompt = record.get("prompt")
    if isinstance(prompt, str):
        text = check_text(prompt, "prompt")
        if not text.strip():
            raise BadRecord("prompt: it is empty; give some text, or leave the line out")
        if not before and not tools:
            return PromptRow(index, where, record, text)
        return PromptRow(index, where, record, messages=(*before, Message("user", text)), tools=tools)
    key = "prompt" if prompt is not None else "messages"
    if record.get(key) is None:
        raise BadRecord(f"no prompt: expected a column prompt or messages, found {column_names(record)}")
    return PromptRow(index, where, record, messages=(*before, *read_messages(record[key], key)), tools=tools)
