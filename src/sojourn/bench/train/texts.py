"""What a workload reads: texts that we make, or the user's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from sojourn.bench.train.workloads import Workload
from sojourn.data.sources.document import Document
from sojourn.errors import UserError


def write_data(workload: Workload, path: Path, size: int, own: str | None) -> None:
    """About `size` bytes as JSON Lines; of the user's own there may be less, which is then read several times."""
    if workload.documents == "chats" and own is None:
        from sojourn.bench.corpus import write_corpus

        write_corpus(path, size)
        return
    read = _chats if workload.documents == "chats" else _texts
    records = list(_first(read(_documents(own, size)), size))
    if not records:
        wanted = "chats" if workload.documents == "chats" else "texts"
        raise UserError(f"--data: {own}: no {wanted} in it, which {workload.name} reads")
    if workload.documents == "long":
        records = [{"text": "\n\n".join(str(record["text"]) for record in records)}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def identity(own: str | None) -> str | None:
    """Other data, another identity."""
    if own is None:
        return None
    from sojourn.data.sources.files import find_files

    try:
        files = find_files(own)
    except UserError as error:
        raise UserError(str(error).replace("data.sources", "--data", 1)) from None
    return json.dumps([(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files])


def _documents(own: str | None, size: int) -> Iterator[Document]:
    if own is None:
        from sojourn.data.builtin import text

        yield from text(size)
        return
    from sojourn.config.data import Columns, Source
    from sojourn.data.sources.chunks import parse_chunk
    from sojourn.data.sources.source import open_source

    for chunk in open_source(Source(path=own), Columns(), evaluation=False, say=lambda _: None).chunks():
        yield from parse_chunk(chunk)[0]


def _texts(documents: Iterator[Document]) -> Iterator[dict[str, object]]:
    return ({"text": "\n\n".join(document.contents())} for document in documents)


def _chats(documents: Iterator[Document]) -> Iterator[dict[str, object]]:
    """Those of plain turns: what tools are called with is written as each model's template likes it."""
    for document in documents:
        if document.is_chat and not any(message.tool_calls or message.role == "tool" for message in document.messages):
            yield {"messages": [{"role": message.role, "content": message.content} for message in document.messages]}


def _first(records: Iterator[dict[str, object]], size: int) -> Iterator[dict[str, object]]:
    taken = 0
    for record in records:
        yield record
        taken += len(json.dumps(record))
        if taken >= size:
            return
