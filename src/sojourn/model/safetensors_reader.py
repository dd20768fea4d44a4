"""Reads single tensors, or rows of them, from a safetensors file.

Plain reads into memory of their own: what the caller drops is free at once, and a model larger than the memory never
fills it with mapped pages. The header is checked before anything is allocated.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sojourn.errors import RunFailed, UserError
from sojourn.model.folder_check import safetensors_header
from sojourn.storage.files import CannotRead, open_regular
from sojourn.storage.safetensors_header import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

_AHEAD_BYTES, _ADVICE_BYTES = 32 << 20, 1 << 20  # the kernel takes about a MiB of each advice


class SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()
        self.entries = safetensors_header(path)
        unknown = next((one for one in self.entries.values() if one.dtype not in torch_dtypes()), None)
        if unknown is not None:
            raise UserError(f"{path}: weights of the dtype {unknown.dtype} cannot be read here; take another copy")

    def close(self) -> None:
        """The next read opens it again."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

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
        self.read_bytes(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()), entry.start + offset)
        return tensor

    def read_bytes(self, view: memoryview, start: int) -> None:
        """Fills `view` from the file's byte `start` on."""
        try:
            count = self._read_into(view, start)
        except OSError as error:
            raise CannotRead(self.path, error) from error
        if count != len(view):
            raise RunFailed(f"{self.path}: was cut short while it was read; copy or download it again")

    def _read_into(self, view: memoryview, start: int) -> int:
        """How many bytes there were. Several threads may read at once."""
        if not hasattr(os, "preadv"):  # Windows
            with open_regular(self.path) as file:
                file.seek(start)
                return int(file.readinto(view))  # type: ignore[attr-defined]
        with self._lock:
            self._file = self._file or open_regular(self.path)
        handle, done = self._file.fileno(), 0
        if hasattr(os, "posix_fadvise"):  # the disk reads on while this piece is worked on
            for ahead in range(len(view), len(view) + min(len(view), _AHEAD_BYTES), _ADVICE_BYTES):
                os.posix_fadvise(handle, start + ahead, _ADVICE_BYTES, os.POSIX_FADV_WILLNEED)
        while done < len(view) and (count := os.preadv(handle, [view[done:]], start + done)):
            done += count
        return done


@cache
def torch_dtypes() -> dict[str, Any]:
    """The format's names."""
    import torch

    newer = {"F8_E8M0": torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else {}
    return newer | {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
        "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
        "U8": torch.uint8, "BOOL": torch.bool,
    }  # fmt: skip
