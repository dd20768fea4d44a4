"""Reads a GGUF file: its metadata, and where its tensors are. Every length is checked before it is believed."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError

if TYPE_CHECKING:
    from numpy import ndarray

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST_DIMENSIONS = 4
_DEEPEST_ARRAY = 2
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class TensorInfo:
    """`shape`: as numpy and torch have it, the longest stride first. `type`: a `GGMLQuantizationType`."""

    name: str
    shape: tuple[int, ...]
    type: Any
    offset: int
    size: int


class GgufFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise UserError(f"{path}: not a GGUF file (it is empty)") from None
        try:
            self._read()
        except (struct.error, ValueError, KeyError, UnicodeDecodeError, OverflowError) as error:
            raise UserError(f"{path}: not a valid GGUF file: {error}") from None

    def _read(self) -> None:
        if self._map[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} of the format")
        tensors, pairs = self._count(24), self._count(12)
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text()
            self.metadata[key] = self._value(self._scalar("I"))
        entries = [self._entry() for _ in range(tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment <= 0:
            raise ValueError("its alignment is not positive")
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: self._tensor(name, shape, kind, start + at) for name, shape, kind, at in entries}

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._text(), self._scalar("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        type_ = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[type_]
        if not shape or shape[-1] % block:
            raise ValueError(f"{name} has rows of {shape[-1:]}, which {type_.name} cannot hold")
        size = prod(shape) // block * block_bytes
        if offset + size > len(self._map):
            raise ValueError(f"it ends before {name} does")
        return TensorInfo(name, shape, type_, offset, size)

    @cached_property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def __getitem__(self, key: str) -> Any:
        """Metadata; `{arch}` in the key is the architecture's name. None where it is absent."""
        return self.metadata.get(key.replace("{arch}", self.architecture))

    def raw(self, name: str) -> ndarray[Any, Any]:
        """A tensor's bytes, not copied."""
        import numpy

        info = self.tensors[name]
        return numpy.frombuffer(self._map, numpy.uint8, info.size, info.offset)

    def rows(self, name: str) -> ndarray[Any, Any]:
        """A tensor in fp32, dequantized."""
        from gguf.quants import dequantize

        info = self.tensors[name]
        raw = self.raw(name).reshape(*info.shape[:-1], -1)
        found: ndarray[Any, Any] = dequantize(raw, info.type).reshape(info.shape)
        return found

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        (value,) = struct.unpack_from(f"<{code}", self._map, self._at)
        self._at += size
        return value

    def _count(self, least_bytes: int) -> int:
        """A number of things that take at least so many bytes each."""
        count = int(self._scalar("Q"))
        if count * least_bytes > len(self._map) - self._at:
            raise ValueError(f"it is too short for the {count:,} entries that it announces")
        return count

    def _text(self) -> str:
        length = self._count(1)
        data = self._map[self._at : self._at + length]
        self._at += length
        return data.decode("utf-8")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        if depth > _DEEPEST_ARRAY:
            raise ValueError("arrays in arrays in arrays")
        item = self._scalar("I")
        if item in (_STRING, _ARRAY):
            return [self._value(item, depth + 1) for _ in range(self._count(8))]
        code = _SCALARS[item]
        count = self._count(struct.calcsize(f"<{code}"))
        values = list(struct.unpack_from(f"<{count}{code}", self._map, self._at))
        self._at += struct.calcsize(f"<{count}{code}")
        return values
