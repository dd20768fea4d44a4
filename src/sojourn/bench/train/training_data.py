"""The documents of a workload: synthetic, or the user's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from sojourn.bench.train.workloads import Workload
from sojourn.data.sources.document import Document
from sojourn.errors import UserError


def write_data(workload: Workload, path: Path, size: int, own: str | None) -> None:
    """Writes about `size` bytes of JSON Lines; fewer where the user's own data has less, which is then repeated."""
    if workload.documents == "chats" and own is None:
        from sojourn.bench.synthetic_chats import write_synthetic_chats

        write_synthetic_chats(path, size)
        return
    read = _chats if workload.documents == "chats" else _texts
    records = list(_take(read(_documents(own, size)), size))
    if not records:
        kind = "chats" if workload.documents == "chats" else "texts"
        raise UserError(f"--data: {own}: no {kind} in it, but {workload.name} trains on {kind}")
    if workload.documents == "long":
        records = [{"text": "\n\n".join(str(record["text"]) for record in records)}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def data_fingerprint(own: str | None) -> str | None:
    """Paths, sizes and modification times of the user's own files."""
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
        yield from parse_chunk(chunk).documents


def _texts(documents: Iterator[Document]) -> Iterator[dict[str, object]]:
    return ({"text": "\n\n".join(document.contents())} for document in documents)


def _chats(documents: Iterator[Document]) -> Iterator[dict[str, object]]:
    """Chats without tool calls, which every model's template writes differently."""
    for document in documents:
        if document.is_chat and not any(message.tool_calls or message.role == "tool" for message in document.messages):
            yield {"messages": [{"role": message.role, "content": message.content} for message in document.messages]}


def _take(records: Iterator[dict[str, object]], size: int) -> Iterator[dict[str, object]]:
    taken = 0
    for record in records:
        yield record
        taken += len(json.dumps(record))
        if taken >= size:
            return
