"""A model's weights on disk, one tensor at a time: what exports and streamed forwards read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sojourn.errors import UserError
from sojourn.model.folder_check import check_model, weight_files
from sojourn.model.safetensors_reader import SafetensorsFile
from sojourn.model.weights import is_finite
from sojourn.storage.files import read_json_object

if TYPE_CHECKING:
    from torch import Tensor, dtype

_PIECE = 2 << 20  # values


class WeightSource(Protocol):
    """`config` and `generation_config`: the contents of these JSON files. Names are those of transformers, in the order
    in which they are best read; a tied LM head has none. Tensors are on the CPU, with adapters merged."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_folder: Path

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> dtype: ...

    def load(self, name: str) -> Tensor:
        """The caller drops it before it loads the next one, where memory matters."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of the first dimension, for tensors that are read piece by piece."""
        ...

    def stamp(self) -> str:
        """Changes when a file changes that the weights are read from."""
        ...


class FolderWeights:
    """A folder of safetensors files, as transformers writes it."""

    def __init__(self, folder: Path, tokenizer_folder: Path | None = None) -> None:
        self.folder, self.tokenizer_folder = folder, tokenizer_folder or folder
        check_model(folder)
        self.config = read_json_object(folder / "config.json")
        self.generation_config = read_json_object(folder / "generation_config.json")

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].entries[name].shape

    def dtype(self, name: str) -> dtype:
        return self._files[name].dtype(name)

    def load(self, name: str) -> Tensor:
        return check_finite(self._files[name].load(name), name, self.folder)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return check_finite(self.unchecked_rows(name, start, stop), name, self.folder)

    def unchecked_rows(self, name: str, start: int, stop: int) -> Tensor:
        """For a caller that looks for NaN and infinities in what it makes of them."""
        return self._files[name].rows(name, start, stop)

    def stamp(self) -> str:
        paths = sorted({file.path for file in self._files.values()} | {self.folder / "config.json"})
        return file_stamp(*paths)

    @cached_property
    def _files(self) -> dict[str, SafetensorsFile]:
        paths, listed = weight_files(self.folder)
        found = {name: file for file in map(SafetensorsFile, paths) for name in file.entries}
        missing = next((name for name in listed if name not in found), None)
        if missing is not None:
            raise UserError(f"{self.folder}: {missing} is not in its file; copy or download the model again")
        head = "lm_head.weight"
        if head in found and is_tied(self.config):
            del found[head]
        return found


def check_finite(tensor: Tensor, name: str, where: Path) -> Tensor:
    """The same tensor; `UserError` where it has a NaN or an infinity."""
    if is_finite(tensor):
        return tensor
    raise UserError(
        f"{where}: {name} has a NaN or an infinity in it; copy or download it again, or take another checkpoint"
    )


def row_pieces(shape: tuple[int, ...], most: int | None = None) -> Iterator[tuple[int, int]]:
    """Start and stop of pieces of some rows, of at most `most` values each, or one row; by default 4 MiB in bf16."""
    rows = shape[0] if shape else 1
    step = max(1, (most or _PIECE) * rows // max(1, math.prod(shape)))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def file_stamp(*paths: Path) -> str:
    """Sizes and modification times."""
    return " ".join(f"{path.name}:{(stat := path.stat()).st_size}:{stat.st_mtime_ns}" for path in paths)


def is_tied(config: dict[str, Any]) -> bool:
    """Whether the LM head is the embedding: by config.json, or by transformers' default for this model type."""
    text = config.get("text_config")
    for found in (config, text if isinstance(text, dict) else {}):
        if "tie_word_embeddings" in found:
            return bool(found["tie_word_embeddings"])
    from transformers import AutoConfig

    try:
        return bool(AutoConfig.for_model(str(config.get("model_type"))).tie_word_embeddings)
    except (ValueError, KeyError, AttributeError):
        return False
