"""A GGUF file: its metadata, and its tensors, dequantized. Its header is checked before any of it is believed."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.storage.files import open_regular
from sojourn.storage.gguf_header import GgufTensor, check_gguf

if TYPE_CHECKING:
    from numpy import ndarray


@dataclass(frozen=True)
class TensorInfo:
    """`shape`: as numpy and torch have it, the longest stride first. `type`: a `GGMLQuantizationType`."""

    name: str
    shape: tuple[int, ...]
    type: Any
    offset: int
    size: int


class GgufFile:
    """A model, a vocabulary alone, or an adapter."""

    def __init__(self, path: Path) -> None:
        header = check_gguf(path, weights=False, arrays=True)
        self.path, self.metadata = path, header.values
        self.tensors = {name: _info(path, name, tensor) for name, tensor in header.tensors.items()}
        with open_regular(path) as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

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


def _info(path: Path, name: str, tensor: GgufTensor) -> TensorInfo:
    from gguf import GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(tensor.type)
    except ValueError:
        raise UserError(
            f"{path}: {name} has type {tensor.type}, which this gguf package does not know; run: pip install -U gguf"
        ) from None
    return TensorInfo(name, tensor.shape, kind, tensor.start, tensor.end - tensor.start)
