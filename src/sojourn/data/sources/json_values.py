"""Splits a JSON file into its records with their line numbers: one list, one value per line, or concatenated values.

Hand-written for bounded memory and line numbers: json.load needs the whole file in memory; ijson streams, but has no
line numbers for messages. json's own scanner finds where a value ends; a worker parses it.
"""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Literal

from sojourn.data.sources.files import not_utf8
from sojourn.data.sources.texts import MAX_VALUE_BYTES, LocatedRecord, whole_lines
from sojourn.errors import UserError

Layout = Literal["lines", "list", "values"]

_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_JSON_COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
_MARGIN = 16  # longer than any JSON literal, escape or number prefix that the end of a buffer may truncate


def json_layout(blocks: Iterator[bytes], lines: bool) -> tuple[Layout, Iterator[bytes]]:
    """The layout of a file, and all its blocks. The content decides, not the file name."""
    head = _head(blocks, bytes.lstrip)
    if head.lstrip().startswith(b"["):
        return "list", chain([head], blocks)
    if not lines:
        head = _head(chain([head], blocks), lambda head: b"\n" in head.lstrip())
        lines = _is_json(head.lstrip().partition(b"\n")[0])
    return "lines" if lines else "values", chain([head], blocks)


def json_lines(file: str, blocks: Iterable[bytes]) -> Iterator[tuple[Sequence[int], list[bytes]]]:
    """Block by block: the numbers and bytes of the lines that are not blank."""
    for first, block in whole_lines(file, blocks):
        records = block.removesuffix(b"\n").split(b"\n")
        if b"\r" in block:
            records = [record.rstrip(b"\r") for record in records]
        lines: Sequence[int] = range(first, first + len(records))
        if not all(map(bytes.strip, records)):
            lines = [line for line, record in zip(lines, records, strict=True) if record.strip()]
            records = [record for record in records if record.strip()]
        if records:
            yield lines, records


def json_values(file: str, blocks: Iterator[bytes], is_list: bool) -> Iterator[LocatedRecord]:
    """The elements of a list, or concatenated values."""
    buffer = _Buffer(file, blocks)
    if is_list:
        buffer.next_character()
        buffer.move(buffer.at + 1)
        if buffer.next_character() == "]":
            _expect_end(buffer)
            return
    while buffer.next_character() or is_list:
        if is_list:
            yield from buffer.buffered_elements()
            buffer.next_character()
        end = buffer.value_end()
        yield buffer.line, end - buffer.at, buffer.text[buffer.at : end].encode()
        buffer.move(end)
        if not is_list:
            continue
        character = buffer.next_character()
        if character == ",":
            buffer.move(buffer.at + 1)
        elif character == "]":
            _expect_end(buffer)
            return
        else:
            raise buffer.error("expected “,” or “]” after a value of the list", buffer.at)


def _expect_end(buffer: _Buffer) -> None:
    buffer.move(buffer.at + 1)
    if buffer.next_character():
        raise buffer.error("text after the end of the list; write one list per file, or one record per line", buffer.at)


def _head(blocks: Iterator[bytes], enough: Callable[[bytes], object]) -> bytes:
    """The beginning of a file, read in growing steps until it is enough."""
    head, count = b"", 1
    while block := b"".join(islice(blocks, count)):
        head += block
        if enough(head) or len(head) > MAX_VALUE_BYTES:
            break
        count *= 2
    return head


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _Buffer:
    """A buffer that moves through a JSON file."""

    def __init__(self, file: str, blocks: Iterator[bytes]) -> None:
        self.file = file
        self.text = ""
        self.at = 0
        self.line = 1  # line number at `at`
        self.ended = False
        self._blocks = blocks
        self._decoder = getincrementaldecoder("utf-8")()
        self._scan = json.JSONDecoder().raw_decode

    def refill(self, count: int = 1) -> None:
        block = b"".join(islice(self._blocks, count))
        self.ended = not block
        try:
            more = self._decoder.decode(block, final=self.ended)
        except UnicodeDecodeError as error:
            line = self.line + self.text.count("\n", self.at) + error.object[: error.start].count(b"\n")
            raise UserError(f"{self.file}:{line}: {not_utf8(error, self._blocks)}") from None
        self.text = self.text[self.at :] + more
        self.at = 0

    def move(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def next_character(self) -> str:
        """The next character that is not whitespace; "" at the end of the file."""
        while True:
            self.move(_JSON_SPACE.match(self.text, self.at).end())  # type: ignore[union-attr]
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.refill()

    def value_end(self) -> int:
        """Where the value that starts here ends; reads on, in growing steps, until it is complete."""
        count = 1
        while True:
            try:
                end = self._scan(self.text, self.at)[1]
            except json.JSONDecodeError as error:
                incomplete = error.msg.startswith("Unterminated") or error.pos > len(self.text) - _MARGIN
                if self.ended or not incomplete:
                    raise self.error(error.msg, error.pos) from None
            except ValueError as error:
                raise self.error(str(error), self.at) from None
            except RecursionError:
                raise self.error("nested too deeply", self.at) from None
            else:
                if self.ended or end <= len(self.text) - _MARGIN:
                    return end
            if len(self.text) - self.at > MAX_VALUE_BYTES:
                raise self.error(
                    f"a value of more than {MAX_VALUE_BYTES >> 20} MiB; write one record per line", self.at
                )
            self.refill(count)
            count *= 2

    def buffered_elements(self) -> Iterator[LocatedRecord]:
        """The list elements that are complete in the buffer with their commas: the fast path for most of them."""
        text, at, line, scan = self.text, self.at, self.line, self._scan
        safe = len(text) - _MARGIN
        while at < safe:
            try:
                end = scan(text, at)[1]
            except (ValueError, RecursionError):
                break
            comma = _JSON_COMMA.match(text, end)
            if end > safe or comma is None:
                break
            yield line, end - at, text[at:end].encode()
            following = comma.end()
            line += text.count("\n", at, following)
            at = following
        self.at, self.line = at, line

    def error(self, reason: str, at: int) -> UserError:
        rest = self.text[at:]
        if self.ended and (reason.startswith("Unterminated") or not rest.strip()):
            line = self.line + self.text.rstrip().count("\n", self.at)
            reason = "the file ends in the middle of a value; copy or download it again"
        else:
            line = self.line + self.text.count("\n", self.at, at)
        return UserError(f"{self.file}:{line}: not valid JSON: {reason}")
