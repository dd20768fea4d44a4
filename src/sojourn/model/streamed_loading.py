"""Has transformers read a model's weights tensor by tensor, onto their device.

`from_pretrained` maps all files of a model and keeps them mapped until it is done, so the memory of the process grows
by the whole model. Within `streamed_loading` it gets files that read a tensor when it is needed, through two pinned
buffers if its device is a GPU. Names, conversions, quantization and errors stay transformers' own.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.model.safetensors_reader import SafetensorsFile
from sojourn.model.weights import is_finite

if TYPE_CHECKING:
    from torch import Tensor

_PIECE = 32 << 20  # bytes
_SYNC_LOADING = "HF_DEACTIVATE_ASYNC_LOAD"  # older transformers would read all weights before it quantizes the first
_LOCK = threading.Lock()


@contextlib.contextmanager
def streamed_loading(device: str, check_finite: bool) -> Iterator[None]:
    """`check_finite`: `UserError` for a tensor with a NaN or an infinity, which a quantized one would hide."""
    import transformers.modeling_utils as loading

    reader = _Reader(device, check_finite)
    with _LOCK:
        original, setting = loading.safe_open, os.environ.get(_SYNC_LOADING)
        loading.safe_open = lambda path, **_: _File(SafetensorsFile(Path(path)), reader)
        os.environ[_SYNC_LOADING] = "1"
        try:
            yield
        finally:
            loading.safe_open = original
            os.environ.pop(_SYNC_LOADING)
            if setting is not None:
                os.environ[_SYNC_LOADING] = setting


class _Reader:
    def __init__(self, device: str, check_finite: bool) -> None:
        self._check_finite = check_finite
        self._staging = StagedReads(device) if device.startswith("cuda") else None

    def load(self, file: SafetensorsFile, name: str) -> Tensor:
        tensor = file.load(name) if self._staging is None else self._staging.load(file, name)
        if self._check_finite and not is_finite(tensor):
            raise UserError(f"{name} has a NaN or an infinity in it; copy or download it again")
        return tensor


class StagedReads:
    """Two buffers in host memory, pinned for a GPU: one is filled from the file while the other is copied."""

    def __init__(self, device: str) -> None:
        import torch

        self._device, on_gpu = device, device.startswith("cuda")
        self._buffers = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if on_gpu else []

    def load(self, file: SafetensorsFile, name: str) -> Tensor:
        import torch

        entry = file.entries[name]
        tensor = torch.empty(entry.shape, dtype=file.dtype(name), device=self._device)
        pieces = tensor.reshape(-1).view(torch.uint8).split(_PIECE) if tensor.numel() else ()
        for number, piece in enumerate(pieces):
            buffer = self._buffers[number % 2][: len(piece)]
            if self._copied:
                self._copied[number % 2].synchronize()
            file.read_bytes(memoryview(buffer.numpy()), entry.start + number * _PIECE)
            piece.copy_(buffer, non_blocking=True)
            if self._copied:
                self._copied[number % 2].record()
        return tensor


@dataclass(frozen=True)
class _File:
    """What transformers uses of a file that safetensors' `safe_open` opens."""

    file: SafetensorsFile
    reader: _Reader

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def keys(self) -> list[str]:
        return list(self.file.entries)

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self.file, name, self.reader)

    def get_tensor(self, name: str) -> Tensor:
        return self.reader.load(self.file, name)


@dataclass(frozen=True)
class _Slice:
    """A tensor that is read when it is indexed."""

    file: SafetensorsFile
    name: str
    reader: _Reader

    def get_shape(self) -> list[int]:
        return list(self.file.entries[self.name].shape)

    def get_dtype(self) -> str:
        return self.file.entries[self.name].dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self.reader.load(self.file, self.name)[index]
