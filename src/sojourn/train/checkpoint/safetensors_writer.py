"""Named tensors into a safetensors file: each is copied to the host by itself and hashed on its way to the disk.

The library's own writer makes a second copy of everything in memory and holds Python's lock while it writes, which
would stop the training beside it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sojourn.storage import disk

_BLOCK = 16 << 20


def write_tensors(path: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    """Durably; returns the file's size and SHA-256."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:

        def put(data: Any) -> None:
            nonlocal size
            view = memoryview(data).cast("B")
            for start in range(0, len(view), _BLOCK):
                block = view[start : start + _BLOCK]
                digest.update(block)
                disk.write(file, block)
            size += len(view)

        put(_header(ordered))
        for _, tensor in ordered:
            if tensor.numel():
                put(_bytes(tensor))
        disk.sync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def _header(ordered: list[tuple[str, Any]]) -> bytes:
    described, at = {}, 0
    for name, tensor in ordered:
        end = at + tensor.numel() * tensor.element_size()
        described[name] = {"dtype": _names()[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Any) -> Any:
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def _names() -> dict[Any, str]:
    import torch

    return {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
        torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    }  # fmt: skip
