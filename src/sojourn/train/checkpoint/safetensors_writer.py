"""Writes a safetensors file tensor by tensor, hashing on the way.

The library's own writer copies all tensors in memory once more and holds the GIL while it writes, which would stall
training in the other thread.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.storage import disk

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_BYTES = 16 << 20


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Writes and fsyncs; returns the file's size and SHA-256."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:

        def put(data: Any) -> None:
            nonlocal size
            view = memoryview(data).cast("B")
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                disk.write(file, chunk)
            size += len(view)

        put(_header(ordered))
        for _, tensor in ordered:
            if tensor.numel():
                put(_bytes(tensor))
        disk.sync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def _header(ordered: list[tuple[str, Tensor]]) -> bytes:
    entries, start = {}, 0
    for name, tensor in ordered:
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _dtype_names()[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> Any:
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def _dtype_names() -> dict[Any, str]:
    import torch

    return {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
        torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    }  # fmt: skip
