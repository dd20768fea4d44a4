"""The weights of a GGUF file under transformers' names, dequantized one at a time, rows of q and k in transformers'
order: whoever wrote them in another order gets other logits here, as in llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.infer.gguf.config import config_of, family_of
from sojourn.infer.gguf.families import deinterleave
from sojourn.infer.gguf.file import GgufFile
from sojourn.infer.weight_source import file_stamp

if TYPE_CHECKING:
    from torch import Tensor, dtype

_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class GgufWeights:
    """A `WeightSource` in fp32. It has no tokenizer's folder: see `infer/gguf/tokenizer.py`. `adapter`: a LoRA's file,
    applied as llama.cpp's `--lora` does."""

    def __init__(self, path: Path, adapter: Path | None = None) -> None:
        self.file = GgufFile(path)
        self._adapter = GgufFile(adapter) if adapter is not None else None
        self.tokenizer_folder = path.parent
        self._family = family_of(self.file)
        self.config: dict[str, Any] = config_of(self.file)
        eos = self.file["tokenizer.ggml.eos_token_id"]
        self.generation_config: dict[str, Any] = {} if eos is None else {"eos_token_id": eos}
        self._names: dict[str, str] = {}
        for name in self.file.tensors:
            theirs = self._family.transformers_name(name)
            if theirs is not None:
                self._names[theirs] = name
            elif name not in _ROPE_TENSORS:
                raise UserError(f"{path}: {name}: not a tensor of {self.file.architecture}")

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[self._names[name]].shape

    def dtype(self, name: str) -> dtype:
        import torch

        return torch.float32

    def load(self, name: str) -> Tensor:
        import torch

        stored = self._names[name]
        rows = torch.from_numpy(self.file.rows(stored).copy())
        if self._adapter is not None and f"{stored}.lora_a" in self._adapter.tensors:
            a, b = (torch.from_numpy(self._adapter.rows(f"{stored}.lora_{part}").copy()) for part in "ab")
            rows += float(self._adapter["adapter.lora.alpha"]) / a.shape[0] * b @ a
        heads = self._family.rope_heads(stored, self.config)
        if heads:
            rows = deinterleave(rows, heads)
        if self._family.norm_offset and name.endswith("norm.weight"):
            rows -= self._family.norm_offset
        return rows

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.load(name)[start:stop]

    def stamp(self) -> str:
        return file_stamp(self.file.path)
