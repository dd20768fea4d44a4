"""Splits bytes that arrive in blocks into lines and documents; the result does not depend on the blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from sojourn.errors import UserError

LocatedRecord = tuple[int, int, Any]  # line number, approximate size in bytes, record

MAX_VALUE_BYTES = 1 << 28  # of one line or one JSON value
_END_OF_TEXT = b"<|endoftext|>"
_MIN_DOCUMENT_BYTES = 4000  # before a blank line may end a document
_MAX_DOCUMENT_BYTES = 1 << 20
SPLIT_TEXT = "<|endoftext|>, at a heading (= Title =), or at a blank line after 4,000 bytes"
_SPACE = re.compile(rb"\s*")
_BLANK_LINE = re.compile(rb"\n[ \t\v\f]*(?=\n)")
_HEADING = re.compile(rb"\n(?= ?= [^=\n][^\n]*[^=\n] = ?\n)")


def whole_lines(file: str, blocks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Blocks of whole lines, each with the number of its first line."""
    line, parts, size = 1, [b""], 0
    for block in blocks:
        end = block.rfind(b"\n") + 1
        if end:
            parts.append(block[:end])
            whole = b"".join(parts)
            yield line, whole
            line, parts, size = line + whole.count(b"\n"), [block[end:]], len(block) - end
        else:
            parts.append(block)
            size += len(block)
        if size > MAX_VALUE_BYTES:
            raise UserError(f"{file}:{line}: a line of more than {MAX_VALUE_BYTES >> 20} MiB; break it into lines")
    if size:
        yield line, b"".join(parts)


def normalize_newlines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """\\r\\n and \\r become \\n."""
    pending = b""
    for block in blocks:
        if pending or b"\r" in block:
            joined = pending + block
            pending = b"\r" if joined.endswith(b"\r") else b""
            joined = joined.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            if joined:
                yield joined
        else:
            yield block
    if pending:
        yield b"\n"


def split_documents(blocks: Iterable[bytes]) -> Iterator[LocatedRecord]:
    """Documents end at <|endoftext|>, before a heading, at a blank line once long enough, or at the maximum length."""
    source = normalize_newlines(blocks)
    text, at, line, ended = b"", 0, 1, False
    while True:
        start = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        line += text.count(b"\n", at, start)
        at = start
        if not ended and len(text) - at < _MAX_DOCUMENT_BYTES + len(_END_OF_TEXT):
            more = _at_least(source, _MAX_DOCUMENT_BYTES)
            ended = not more
            text, at = text[at:] + (more or b"\n"), 0
        elif at == len(text):
            return
        else:
            end, after = _document_end(text, at)
            document = text[at:end].rstrip()
            if document:
                yield line, len(document), document
            line += text.count(b"\n", at, after)
            at = after


def _at_least(blocks: Iterator[bytes], size: int) -> bytes:
    parts, total = [], 0
    for block in blocks:
        parts.append(block)
        total += len(block)
        if total >= size:
            break
    return b"".join(parts)


def _document_end(text: bytes, at: int) -> tuple[int, int]:
    """Where the document that starts at `at` ends, and where the next may start; searches no further than needed."""
    span = 2 * _MIN_DOCUMENT_BYTES
    while True:
        span = min(span, _MAX_DOCUMENT_BYTES)
        end = after = min(at + span, len(text))
        boundary = text.find(_END_OF_TEXT, at, end + len(_END_OF_TEXT) - 1)
        if boundary >= 0:
            end, after = boundary, boundary + len(_END_OF_TEXT)
        for pattern, first in ((_BLANK_LINE, at + _MIN_DOCUMENT_BYTES), (_HEADING, at)):
            match = pattern.search(text, first, end)
            if match:
                end = after = boundary = match.end()
        if boundary >= 0 or end == len(text):
            return end, after
        if span == _MAX_DOCUMENT_BYTES:
            end = text.rfind(b"\n", at, end) + 1 or _character_start(text, end)
            return end, end
        span *= 2


def _character_start(text: bytes, at: int) -> int:
    """The nearest UTF-8 character boundary at or before `at`."""
    for back in range(4):
        if text[at - back] & 0xC0 != 0x80:
            return at - back
    return at
