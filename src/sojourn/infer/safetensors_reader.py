"""Reads single tensors, or rows of them, from a safetensors file.

Plain reads into memory of their own: what the caller drops is free at once, and a model larger than the memory never
fills it with mapped pages. The header is checked before anything is allocated.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import RunFailed, UserError
from sojourn.storage.files import CannotRead, NotValid, open_regular, parse_json

if TYPE_CHECKING:
    from torch import Tensor

_MOST_HEADER_BYTES = 100 << 20  # the format's own limit


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in its file: `start` and `end` are offsets from the file's begin."""

    dtype: str  # as the format names it: F32, BF16, …
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.entries = _read_header(path)
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; the model is incomplete: copy or download it again") from None
        except NotValid as error:
            raise UserError(f"{path}: not a whole safetensors file ({error}); copy or download it again") from None

    def dtype(self, name: str) -> Any:
        return torch_dtypes()[self.entries[name].dtype]

    def load(self, name: str) -> Tensor:
        return self._read(self.entries[name], self.entries[name].shape, 0)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of the first dimension."""
        entry = self.entries[name]
        if not entry.shape:
            return self.load(name)
        row_bytes = (entry.end - entry.start) // max(1, entry.shape[0])
        return self._read(entry, (stop - start, *entry.shape[1:]), start * row_bytes)

    def _read(self, entry: TensorEntry, shape: tuple[int, ...], offset: int) -> Tensor:
        import torch

        tensor = torch.empty(shape, dtype=torch_dtypes()[entry.dtype])
        if tensor.numel() == 0:
            return tensor
        view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        try:
            with open_regular(self.path) as file:
                file.seek(entry.start + offset)
                count = file.readinto(view)  # type: ignore[attr-defined]
        except OSError as error:
            raise CannotRead(self.path, error) from error
        if count != len(view):
            raise RunFailed(f"{self.path}: was cut short while it was read; copy or download it again")
        return tensor


@cache
def torch_dtypes() -> dict[str, Any]:
    """The format's names."""
    import torch

    return {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
        "I16": torch.int16, "I8": torch.int8, "U32": torch.uint32, "U8": torch.uint8, "BOOL": torch.bool,
    }  # fmt: skip


def _read_header(path: Path) -> dict[str, TensorEntry]:
    """In the order of the file's bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
            raise NotValid(f"a header of {length:,} bytes in a file of {size:,}")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise NotValid("its header is not a mapping")
    first = 8 + length
    entries = {name: _entry(name, found, first, size) for name, found in header.items() if name != "__metadata__"}
    return dict(sorted(entries.items(), key=lambda item: item[1].start))


def _entry(name: str, found: Any, first: int, size: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = found["dtype"], tuple(found["shape"]), found["data_offsets"]
        numbers = (*shape, start, end)
        sound = all(type(number) is int and number >= 0 for number in numbers) and start <= end <= size - first
        item = torch_dtypes()[dtype].itemsize
    except (TypeError, KeyError, ValueError):
        raise NotValid(f"its header has no dtype, shape and offsets for {name[:80]!r}") from None
    if not sound or math.prod(shape) * item != end - start:
        raise NotValid(f"{name[:80]!r} does not lie within the file")
    return TensorEntry(dtype, shape, first + start, first + end)
