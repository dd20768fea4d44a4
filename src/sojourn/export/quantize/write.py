"""Quantizes with torchao or bitsandbytes through transformers, so that plain transformers opens the folder. Tensors are
read one by one and quantized as they arrive: memory holds the quantized model and one tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed, UserError
from sojourn.export import hf
from sojourn.export.open_source import Source
from sojourn.export.progress import Progress
from sojourn.export.quantize.kinds import KINDS, has_capability, refuse_kind
from sojourn.export.quantize.plain_folder import dtype_name, plain_folder
from sojourn.export.stage import ExportStage
from sojourn.infer.weight_source import WeightSource
from sojourn.model.base import BaseModelSource, load_base_model
from sojourn.model.weights import torch_dtype

_NF4_BLOCK = 64
_GROUPS = (128, 64, 32)


def write(source: Source, stage: ExportStage, quantization: str, progress: Progress) -> None:
    """`quantization`: a kind of torchao or bitsandbytes."""
    refuse_kind(KINDS[quantization])
    dtype = dtype_name(source)
    config = quantization_config(source.weights, quantization, dtype)
    hf.write_tokenizer(source, stage)
    hf.write_configs(source, _WithQuantization(stage, config), dtype)  # type: ignore[arg-type]
    folder = plain_folder(source, stage, progress)
    progress.say(f"quantizing to {quantization}")
    if quantization == "nf4" and (kept := uneven_modules(source.weights)):
        progress.say(f"note: {len(kept)} layers stay in {dtype}: their rows are no multiples of {_NF4_BLOCK} values")
    stage.group("weights", lambda out: _quantize(folder, config, dtype, out))


class _WithQuantization:
    """A stage whose config.json says how the weights are quantized."""

    def __init__(self, stage: ExportStage, config: Any) -> None:
        self._stage, self._quantization = stage, config.to_dict()

    def json(self, name: str, value: dict[str, Any]) -> None:
        added = {"quantization_config": self._quantization} if name == "config.json" else {}
        self._stage.json(name, {**value, **added})


def quantization_config(weights: WeightSource, quantization: str, dtype: str) -> Any:
    """transformers' record of it."""
    import torch
    import transformers

    if quantization == "nf4":
        kept = uneven_modules(weights)
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch_dtype(dtype),
            llm_int8_skip_modules=["lm_head", *kept] if kept else None,
        )  # fmt: skip
    from torchao import quantization as ao

    kinds: dict[str, Any] = {
        "int8": lambda: ao.Int8WeightOnlyConfig(version=2),
        "int8-dynamic": lambda: ao.Int8DynamicActivationInt8WeightConfig(version=2),
        "fp8": lambda: ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()),
        "int4": lambda: ao.Int4WeightOnlyConfig(
            group_size=group_size(weights, "int4"), int4_packing_format="tile_packed_to_4d"
        ),
    }
    if quantization == "int4" and dtype != "bf16" and torch.cuda.is_available():
        raise UserError("--to int4: torchao's kernels take bf16 models; export it first: --to hf --quantize bf16")
    return transformers.TorchAoConfig(kinds[quantization]())


def uneven_modules(weights: WeightSource) -> list[str]:
    """Those whose rows are no multiples of a block, which bitsandbytes reads wrongly on a CPU: they stay as is."""
    matrices = (name for name in weights.names() if len(weights.shape(name)) == 2)
    return [name.removesuffix(".weight") for name in matrices if weights.shape(name)[1] % _NF4_BLOCK]


def group_size(weights: WeightSource, kind: str) -> int:
    """Of the values that share a scale: the largest that divides the rows of all layers."""
    rows = {weights.shape(name)[1] for name in weights.names() if len(weights.shape(name)) == 2}
    for size in _GROUPS:
        if all(row % size == 0 for row in rows):
            return size
    raise UserError(f"--to {kind}: the rows of this model's weights are no multiples of {_GROUPS[-1]}; try --to int8")


def _quantize(folder: Path, config: Any, dtype: str, out: Path) -> None:
    import io
    from contextlib import redirect_stderr, redirect_stdout

    base = BaseModelSource(str(folder), quantization_config=config)
    try:
        model = load_base_model(base, torch_dtype(dtype), quantizing_device())
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # what it imports writes there
            model.save_pretrained(out)
    except UserError as error:
        raise RunFailed(f"{folder}: cannot be quantized: {str(error).removeprefix('model.base: ')}") from None
    for name in ("config.json", "generation_config.json"):  # ours are of the source
        (out / name).unlink(missing_ok=True)


def quantizing_device() -> str:
    return "cuda" if has_capability((7, 5)) else "cpu"
