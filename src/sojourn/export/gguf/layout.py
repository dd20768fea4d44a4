"""A GGUF file as parts that are written one after the other: header, metadata and index first, then each tensor."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.export.gguf.tensors import ALIGNMENT, TensorPlan
from sojourn.export.ranges import Part

if TYPE_CHECKING:
    from gguf import GGUFWriter


def file_parts(writer: GGUFWriter, plans: list[TensorPlan]) -> list[Part]:
    """`writer`: with all metadata added."""
    import numpy

    for plan in plans:
        writer.add_tensor_info(plan.name, plan.shape, numpy.dtype(numpy.float32), plan.size, plan.type)
    header = _header(writer)
    parts = [Part(0, len(header), partial(bytes, header))]
    for plan in plans:
        for start, stop in plan.pieces():
            length = plan.row_bytes * (stop - start)
            padding = -plan.size % ALIGNMENT if stop == plan.shape[0] else 0
            at = parts[-1].offset + parts[-1].length
            parts.append(Part(at, length + padding, partial(_piece, plan, start, stop, padding)))
    return parts


def total_bytes(parts: list[Part]) -> int:
    return parts[-1].offset + parts[-1].length


def _piece(plan: TensorPlan, start: int, stop: int, padding: int) -> object:
    data = memoryview(plan.encode(start, stop)).cast("B")
    return b"".join((data, bytes(padding))) if padding else data


def _header(writer: GGUFWriter) -> bytes:
    """Everything before the first tensor, as the gguf package writes it."""
    with tempfile.TemporaryDirectory(prefix="sojourn-") as folder:
        path = Path(folder) / "header.gguf"
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        data = path.read_bytes()
    return data + bytes(-len(data) % ALIGNMENT)
