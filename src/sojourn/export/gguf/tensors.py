"""The tensors of a GGUF file: names, types, and their bytes, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from sojourn.errors import RunFailed, UserError
from sojourn.export.gguf.hyperparameters import rope_tensors
from sojourn.export.gguf.model_config import ModelConfig
from sojourn.infer.gguf.families import EMBEDDING, OUTPUT, interleave
from sojourn.infer.weight_source import WeightSource
from sojourn.model.weights import is_finite

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 32
PIECE_ELEMENTS = 8 << 20  # at most so many at a time: 32 MiB in fp32
_SMALL_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.")
_OTHER_PARTS = ("vision_tower", "multi_modal_projector")


@dataclass(frozen=True)
class TensorPlan:
    """`type`: a `GGMLQuantizationType`. `rows(start, stop)`: these rows in llama.cpp's order. `step`: pieces are
    multiples of so many rows."""

    name: str
    shape: tuple[int, ...]
    type: Any
    rows: Callable[[int, int], Tensor]
    step: int = 1

    @property
    def row_bytes(self) -> int:
        from gguf import GGML_QUANT_SIZES

        block, block_bytes = GGML_QUANT_SIZES[self.type]
        row = self.shape[-1] if len(self.shape) > 1 else 1
        return int(row // block * block_bytes) if len(self.shape) > 1 else int(block_bytes)

    @property
    def size(self) -> int:
        """In bytes."""
        return self.row_bytes * self.shape[0]

    def pieces(self) -> list[tuple[int, int]]:
        """Ranges of rows."""
        elements = prod(self.shape[1:])
        count = max(PIECE_ELEMENTS // elements // self.step, 1) * self.step
        return [(start, min(start + count, self.shape[0])) for start in range(0, self.shape[0], count)]

    def encode(self, start: int, stop: int) -> Any:
        return encode(self.rows(start, stop), self.type, self.name)


def plan_tensors(weights: WeightSource, config: ModelConfig, quantization: str) -> tuple[list[TensorPlan], list[str]]:
    """In the order in which llama.cpp reads them, and lines about what is not as asked."""
    from gguf import GGMLQuantizationType

    plans = [
        TensorPlan(name, tuple(values.shape), GGMLQuantizationType.F32, partial(_slice, values))
        for name, values in rope_tensors(config).items()
    ]
    found: dict[str, TensorPlan] = {}
    wanted, other, unfit = GGMLQuantizationType[quantization.upper()], 0, 0
    names = {name: _text_name(name) for name in weights.names()}
    has_head = "lm_head.weight" in names.values()
    for name, text_name in names.items():
        if text_name is None:
            other += 1
            continue
        ours = config.family.gguf_name(text_name)
        if ours is None:
            raise UserError(
                f"GGUF: llama.cpp has no place for {name} in {config.family.model_type}; export it with --to hf"
            )
        shape = weights.shape(name)
        type_ = tensor_type(ours, shape, wanted, is_head=ours == (OUTPUT if has_head else EMBEDDING))
        unfit += type_ == GGMLQuantizationType.F16 != wanted
        found[ours] = _plan(weights, config, name, ours, type_)
    _check(found, config)
    lines = [f"note: {other} tensors of the vision part are left out"] if other else []
    if unfit:
        lines.append(f"note: {unfit} tensors stay F16: their rows do not fit {wanted.name}'s blocks of 32")
    return plans + sorted(found.values(), key=lambda plan: _order(plan.name)), lines


def _slice(values: Tensor, start: int, stop: int) -> Tensor:
    return values[start:stop]


def tensor_type(name: str, shape: tuple[int, ...], wanted: Any, is_head: bool = False) -> Any:
    """Vectors and norms stay fp32. In the small types the LM head, or the embedding that is also the head, is Q8_0."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(shape) <= 1 or name.endswith("_norm.weight"):
        return GGMLQuantizationType.F32
    if wanted.name in _SMALL_TYPES and is_head:
        wanted = GGMLQuantizationType.Q8_0
    fits = shape[-1] % GGML_QUANT_SIZES[wanted][0] == 0
    return wanted if fits else GGMLQuantizationType.F16


def encode(rows: Tensor, type_: Any, name: str) -> Any:
    """Rows of a tensor, all of them finite, in the bytes of this type."""
    import torch
    from gguf.quants import quantize

    if type_.name == "F32":
        return rows.float().contiguous().numpy()
    if type_.name == "BF16":
        return rows.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    if type_.name == "F16":
        half = rows.to(torch.float16)
        if not is_finite(half):
            raise RunFailed(f"GGUF: {name} has values beyond F16's range (65,504); export it with --quantize bf16")
        return half.contiguous().numpy()
    return quantize(rows.float().contiguous().numpy(), type_)


def _text_name(name: str) -> str | None:
    """The name in a model of text only; None for a tensor of another part."""
    if any(part in name.split(".") for part in _OTHER_PARTS):
        return None
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix("language_model.")


def _plan(weights: WeightSource, config: ModelConfig, name: str, ours: str, type_: Any) -> TensorPlan:
    family, shape = config.family, weights.shape(name)
    heads = family.rope_heads(ours, config.values)
    if heads and shape[0] % (2 * heads):
        raise UserError(f"GGUF: {name} has {shape[0]} rows, which {heads} heads cannot share")

    def rows(start: int, stop: int) -> Tensor:
        found = weights.rows(name, start, stop) if (start, stop) != (0, shape[0]) else weights.load(name)
        if heads:
            found = interleave(found, heads * (stop - start) // shape[0])
        if family.norm_offset and name.endswith("norm.weight"):
            found = found.float() + family.norm_offset
        return found

    return TensorPlan(ours, shape, type_, rows, shape[0] // heads if heads else 1)


def _check(found: dict[str, TensorPlan], config: ModelConfig) -> None:
    missing = [name for name in (EMBEDDING, "output_norm.weight") if name not in found]
    missing += [
        f"blk.{layer}.{name}.weight"
        for layer in range(config.layers)
        for name in config.family.layer.values()
        if f"blk.{layer}.{name}.weight" not in found
    ]
    beyond = [name for name in found if name.startswith("blk.") and int(name.split(".")[1]) >= config.layers]
    if missing or beyond:
        what = f"{missing[0]} is missing" if missing else f"{beyond[0]} is beyond its {config.layers} layers"
        raise UserError(f"GGUF: not a whole {config.family.model_type} model: {what}")
    if OUTPUT in found and found[OUTPUT].shape[0] != found[EMBEDDING].shape[0]:
        sizes = f"{found[EMBEDDING].shape[0]:,} and {found[OUTPUT].shape[0]:,}"
        raise UserError(f"GGUF: embedding and LM head have {sizes} rows; llama.cpp needs the same number")


def _order(name: str) -> tuple[int, int, str]:
    if name.startswith("blk."):
        return 1, int(name.split(".")[1]), name
    return (0 if name == EMBEDDING else 2), 0, name
