"""Reads and checks the header of a safetensors file: every tensor lies where the format allows it, and nothing else is
in the file. Without torch, and without reading the data."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.storage.files import NotValid, open_regular
from sojourn.storage.foreign_json import parse_foreign_json

MOST_HEADER_BYTES = 32 << 20  # of 200,000 tensors; the format allows 100 MB, which takes a gigabyte once it is parsed
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "F16": 16,
    "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # a zip archive of torch, or a bare one


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in its file: `start` and `end` are offsets from the file's begin."""

    dtype: str  # as the format names it: F32, BF16, …
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """In the order of the file's bytes. Raises `NotValid`, `FileNotFoundError` or `CannotRead`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        if first.startswith(_PICKLES):
            raise NotValid("it is a pickle, which can run code, under another name")
        length = int.from_bytes(first, "little")
        if not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
            raise NotValid(f"a header of {length:,} bytes in a file of {size:,}")
        header = parse_foreign_json(file.read(length))
    if not isinstance(header, dict):
        raise NotValid("its header is not a mapping")
    begin = 8 + length
    entries = {name: _entry(name, found, begin, size) for name, found in header.items() if name != "__metadata__"}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    _check_tiling(ordered, begin, size)
    return ordered


def _entry(name: str, found: Any, begin: int, size: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = found["dtype"], tuple(found["shape"]), found["data_offsets"]
        sound = all(type(number) is int and number >= 0 for number in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        raise NotValid(f"its header has no dtype, shape and offsets for {name[:80]!r}") from None
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise NotValid(f"{name[:80]!r} has an unknown dtype: {str(dtype)[:20]!r}")
    if not sound or len(shape) > 16 or not start <= end <= size - begin:
        raise NotValid(f"{name[:80]!r} does not lie within the file")
    if math.prod(shape) * _BITS[dtype] != (end - start) * 8:
        raise NotValid(f"{name[:80]!r} has another size than its shape")
    return TensorEntry(dtype, shape, begin + start, begin + end)


def _check_tiling(entries: dict[str, TensorEntry], begin: int, size: int) -> None:
    """Neither overlap nor holes, as the format has it."""
    for name, entry in entries.items():
        if entry.start != begin:
            raise NotValid(
                f"{name[:80]!r} {'overlaps' if entry.start < begin else 'leaves a hole after'} another tensor"
            )
        begin = entry.end
    if begin != size:
        raise NotValid(f"{size - begin:,} bytes after its last tensor")
