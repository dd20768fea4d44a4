"""Finds the values of a JSON file and their lines, whether it is a list, a value a line, or values in a row."""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Literal

from sojourn.data.sources.texts import MAX_VALUE_BYTES, LocatedRecord, whole_lines
from sojourn.errors import UserError

Layout = Literal["lines", "list", "values"]

_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_JSON_COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
_MARGIN = 16  # longer than any JSON word, escape or half of a number that the end of a buffer may cut


def json_layout(blocks: Iterator[bytes], lines: bool) -> tuple[Layout, Iterator[bytes]]:
    """How a file is to be read, and all its blocks. What it holds decides, since names are not to be trusted."""
    head = _head(blocks, bytes.lstrip)
    if head.lstrip().startswith(b"["):
        return "list", chain([head], blocks)
    if not lines:
        head = _head(chain([head], blocks), lambda head: b"\n" in head.lstrip())
        lines = _is_json(head.lstrip().partition(b"\n")[0])
    return "lines" if lines else "values", chain([head], blocks)


def json_lines(file: str, blocks: Iterable[bytes]) -> Iterator[tuple[Sequence[int], list[bytes]]]:
    """Block by block, the lines that are not blank: their numbers and themselves."""
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
    """The elements of a list, or values one after another."""
    window = _Window(file, blocks)
    if is_list:
        window.sign()
        window.move(window.at + 1)
        if window.sign() == "]":
            _expect_end(window)
            return
    while window.sign() or is_list:
        if is_list:
            yield from window.run()
            window.sign()
        end = window.value_end()
        yield window.line, end - window.at, window.text[window.at : end].encode()
        window.move(end)
        if not is_list:
            continue
        sign = window.sign()
        if sign == ",":
            window.move(window.at + 1)
        elif sign == "]":
            _expect_end(window)
            return
        else:
            raise window.fault("expected “,” or “]” after a value of the list", window.at)


def _expect_end(window: _Window) -> None:
    window.move(window.at + 1)
    if window.sign():
        raise window.fault("the list has ended, yet more follows; one list a file, or one record a line", window.at)


def _head(blocks: Iterator[bytes], enough: Callable[[bytes], object]) -> bytes:
    """The beginning of a file; each time it is not enough to judge by, twice as much is read."""
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


class _Window:
    """The stretch of a JSON file that is being read, moving on through it."""

    def __init__(self, file: str, blocks: Iterator[bytes]) -> None:
        self.file = file
        self.text = ""
        self.at = 0
        self.line = 1  # of `at`
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
            raise UserError(f"{self.file}:{line}: not UTF-8 text ({error.reason}); save it as UTF-8") from None
        self.text = self.text[self.at :] + more
        self.at = 0

    def move(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def sign(self) -> str:
        """The next character that is not a space; none at the end of the file."""
        while True:
            self.move(_JSON_SPACE.match(self.text, self.at).end())  # type: ignore[union-attr]
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.refill()

    def value_end(self) -> int:
        """Where the value that starts here ends. Each time it is not whole yet, twice as much is read."""
        count = 1
        while True:
            try:
                end = self._scan(self.text, self.at)[1]
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - _MARGIN
                if self.ended or not cut:
                    raise self.fault(error.msg, error.pos) from None
            except ValueError as error:
                raise self.fault(str(error), self.at) from None
            except RecursionError:
                raise self.fault("nested too deep", self.at) from None
            else:
                if self.ended or end <= len(self.text) - _MARGIN:
                    return end
            if len(self.text) - self.at > MAX_VALUE_BYTES:
                raise self.fault(f"a value of more than {MAX_VALUE_BYTES >> 20} MiB; write one record a line", self.at)
            self.refill(count)
            count *= 2

    def run(self) -> Iterator[LocatedRecord]:
        """The elements of a list that lie whole, with their commas, in what has been read: most of them, and fast."""
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

    def fault(self, told: str, at: int) -> UserError:
        rest = self.text[at:]
        if self.ended and (told.startswith("Unterminated") or not rest.strip()):
            line = self.line + self.text.rstrip().count("\n", self.at)
            told = "the file ends in the middle; copy or download it again"
        else:
            line = self.line + self.text.count("\n", self.at, at)
        return UserError(f"{self.file}:{line}: not valid JSON: {told}")
