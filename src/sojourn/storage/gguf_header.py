"""Reads and checks the header of a GGUF file within limits: every count, length and offset is compared with the file's
size before anything of that size is read. Without the gguf package."""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sojourn.config.messages import printable
from sojourn.errors import UserError
from sojourn.storage.files import CannotRead, NotValid, open_regular

_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MOST_KEYS = 65_536
_MOST_TENSORS = 1 << 20
_MOST_NAME = 1 << 10
_MOST_TEXT = 16 << 20  # of one value: chat templates have a few kilobytes
_MOST_DIMENSIONS = 4
# Values in a block, and its bytes, by the type's number
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18),
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """`shape`: as numpy and torch have it, the longest stride first. `type`: its number in the format. `start` and
    `end`: offsets from the file's begin."""

    shape: tuple[int, ...]
    type: int
    start: int
    end: int


@dataclass
class GgufHeader:
    """`values`: of an array its length, unless arrays were asked for."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, GgufTensor] = field(default_factory=dict)


def check_gguf(file: Path, weights: bool = True, arrays: bool = False) -> GgufHeader:
    """Raises one line for a file that cannot be sound. Without `weights`, a vocabulary alone or an adapter is sound."""
    try:
        header = read_gguf_header(file, arrays)
        if not isinstance(header.values.get("general.architecture"), str) or (weights and not header.tensors):
            raise NotValid("it names no architecture, or has no tensors")
        for key, most in (("block_count", 10_000), ("embedding_length", 10**6), ("vocab_size", 10**8)):
            value = header.values.get(f"{header.values['general.architecture']}.{key}", 1)
            if type(value) is not int or not 0 < value <= most:
                raise NotValid(f"{key} is {str(value)[:20]}")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    except CannotRead:
        raise
    except NotValid as error:
        raise UserError(f"{file}: not a whole GGUF file ({printable(error, 200)}); copy or download it again") from None
    return header


def read_gguf_header(path: Path, arrays: bool = False) -> GgufHeader:
    """Raises `NotValid`, `FileNotFoundError` or `CannotRead`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 24:
            raise NotValid(f"a GGUF file has more than {size} bytes")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, size, arrays).read()


class _Reader:
    def __init__(self, data: mmap.mmap, size: int, arrays: bool) -> None:
        self._data, self._size, self._arrays, self._at = data, size, arrays, 0

    def read(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise NotValid("it does not begin as a GGUF file does")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise NotValid(f"GGUF version {version}, which nobody writes; convert the model again")
        tensors, keys = self._number("Q"), self._number("Q")
        if tensors > _MOST_TENSORS or keys > _MOST_KEYS:
            raise NotValid(f"it announces {tensors:,} tensors and {keys:,} values")
        header = GgufHeader()
        for _ in range(keys):
            key = self._text(_MOST_NAME)
            if key in header.values:
                raise NotValid(f"it has the key {key[:40]!r} twice")
            header.values[key] = self._value(key, self._number("I"))
        self._tensors(header, tensors)
        return header

    def _tensors(self, header: GgufHeader, count: int) -> None:
        found: dict[str, GgufTensor] = {}
        for _ in range(count):
            name = self._text(_MOST_NAME)
            if name in found:
                raise NotValid(f"it has the tensor {name[:40]!r} twice")
            dimensions = self._number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise NotValid(f"{name[:40]!r} has {dimensions:,} dimensions")
            shape = tuple(int(self._number("Q")) for _ in range(dimensions))
            kind, offset = self._number("I"), int(self._number("Q"))
            if kind not in _BLOCKS:
                raise NotValid(f"{name[:40]!r} has the unknown type {kind}")
            block, length = _BLOCKS[kind]
            if shape and shape[0] % block:
                raise NotValid(f"{name[:40]!r} has rows of {shape[0]:,} values in blocks of {block}")
            found[name] = GgufTensor(shape[::-1], kind, offset, offset + math.prod(shape) // block * length)
        header.tensors = self._placed(found, header.values.get("general.alignment", 32))

    def _placed(self, tensors: dict[str, GgufTensor], alignment: Any) -> dict[str, GgufTensor]:
        """With offsets from the file's begin, in the file's order of entries."""
        if type(alignment) is not int or not (0 < alignment <= 1 << 20) or alignment & (alignment - 1):
            raise NotValid(f"an alignment of {str(alignment)[:20]}")
        begin = -(-self._at // alignment) * alignment
        end_before = 0
        for start, end, name in sorted((one.start, one.end, name) for name, one in tensors.items()):
            if start % alignment or begin + end > self._size:
                raise NotValid(f"{name[:40]!r} does not lie within the file")
            if start < end_before:
                raise NotValid(f"{name[:40]!r} overlaps another tensor")
            end_before = end
        return {name: replace(one, start=begin + one.start, end=begin + one.end) for name, one in tensors.items()}

    def _value(self, key: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._text(_MOST_TEXT)
        if kind != _ARRAY:
            raise NotValid(f"{key[:40]!r} has the unknown type {kind}")
        inner, count = self._number("I"), int(self._number("Q"))
        if inner == _STRING:
            if count * 8 > self._size - self._at:
                raise NotValid(f"{key[:40]!r} has {count:,} texts")
            if self._arrays:
                return [self._text(_MOST_TEXT) for _ in range(count)]
            self._skip_texts(count)
            return count
        if inner not in _NUMBERS:
            raise NotValid(f"{key[:40]!r} is an array of arrays or of an unknown type")
        start, code = self._at, _NUMBERS[inner]
        self._skip(count * struct.calcsize(code), self._size)
        return list(struct.unpack_from(f"<{count}{code}", self._data, start)) if self._arrays else count

    def _skip_texts(self, count: int) -> None:
        """A vocabulary has hundreds of thousands of them."""
        at, read, data = self._at, _LENGTH.unpack_from, self._data
        try:
            for _ in range(count):
                at += 8 + read(data, at)[0]
        except (struct.error, OverflowError):
            at = self._size + 1
        if at > self._size:
            raise NotValid("a text that does not lie within the file")
        self._at = at

    def _number(self, kind: str) -> Any:
        try:
            (found,) = struct.unpack_from(f"<{kind}", self._data, self._at)
        except struct.error:
            raise NotValid("it ends within its header") from None
        self._at += struct.calcsize(kind)
        return found

    def _text(self, most: int) -> str:
        length, start = int(self._number("Q")), self._at
        self._skip(length, most)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise NotValid("a key or a text that is not UTF-8") from None

    def _skip(self, length: int, most: int) -> None:
        if length > most or length > self._size - self._at:
            raise NotValid(f"a text or an array of {length:,} bytes")
        self._at += length
