"""The Hugging Face format: config, generation config, tokenizer, and safetensors shards with their index. What plain
transformers opens, and what other formats start from."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from sojourn.export.open_source import Source
from sojourn.export.own_code import OwnCode
from sojourn.export.progress import Progress
from sojourn.export.ranges import Part
from sojourn.export.stage import ExportStage
from sojourn.infer.runtimes.transformers_tokenizer import without_own_code
from sojourn.infer.weight_source import WeightSource, row_pieces
from sojourn.model.folder_check import INDEX_FILE, WEIGHTS_FILE
from sojourn.model.safetensors_reader import torch_dtypes
from sojourn.storage.files import read_json_object

if TYPE_CHECKING:
    from torch import Tensor, dtype

SHARD_BYTES = 2_000_000_000
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def write(source: Source, stage: ExportStage, quantization: str, progress: Progress) -> None:
    """`quantization`: auto (the dtype of each tensor as it is), bf16, fp16 or fp32."""
    write_tokenizer(source, stage)
    write_configs(source, stage, quantization, source.code)
    if source.code is not None:
        stage.group("code", source.code.write)
    write_weights(source.weights, stage, quantization, progress)


def write_tokenizer(source: Source, stage: ExportStage) -> None:
    """Without the tokenizer's own Python code, which is not run either."""
    folder = source.weights.tokenizer_folder
    for name in TOKENIZER_FILES:
        settings = read_json_object(folder / name) if name == "tokenizer_config.json" else {}
        if "auto_map" in settings:
            stage.json(name, without_own_code(settings))
        elif (folder / name).is_file():
            stage.copy(name, folder / name)


def write_configs(source: Source, stage: ExportStage, quantization: str, code: OwnCode | None = None) -> None:
    """`code`: whose files are written too."""
    config = {key: value for key, value in source.weights.config.items() if key not in ("_name_or_path", "torch_dtype")}
    weights = source.weights
    config["dtype"] = _DTYPES.get(quantization) or main_dtype(weights)
    config["use_cache"] = True
    if code is not None:
        config["auto_map"] = code.auto_map
    stage.json("config.json", config)
    generation = dict(weights.generation_config)
    if generation.get("eos_token_id") is None and config.get("eos_token_id") is not None:
        generation["eos_token_id"] = config["eos_token_id"]
    if any(generation.get(name) is not None for name in ("temperature", "top_p", "top_k")):
        generation["do_sample"] = True  # transformers refuses these with do_sample=False
    stage.json("generation_config.json", generation)


def main_dtype(weights: WeightSource) -> str:
    """That of most values."""
    counts: Counter[str] = Counter()
    for name in weights.names():
        counts[str(weights.dtype(name)).removeprefix("torch.")] += math.prod(weights.shape(name))
    return counts.most_common(1)[0][0]


def write_weights(weights: WeightSource, stage: ExportStage, quantization: str, progress: Progress) -> None:
    """Shards of at most `SHARD_BYTES`, one after the other, each piece by piece."""
    shards = _plan_shards(weights, quantization)
    files = dict(zip(_shard_names(len(shards)), shards, strict=True))
    parts = {file: _shard_parts(weights, names, quantization) for file, names in files.items()}
    sizes = {file: of_file[-1].offset + of_file[-1].length for file, of_file in parts.items()}
    stage.check_space(sum(sizes.values()))
    progress.start("weights", sum(sizes.values()))
    for file, of_file in parts.items():
        stage.ranges(file, sizes[file], of_file)
    if len(files) > 1:
        index = {name: file for file, names in files.items() for name in names}
        metadata = {"total_size": sum(_size(weights, name, quantization) for name in index)}
        stage.json(INDEX_FILE, {"metadata": metadata, "weight_map": dict(sorted(index.items()))})


def _shard_parts(weights: WeightSource, names: list[str], quantization: str) -> list[Part]:
    header = _header(weights, names, quantization)
    parts = [Part(0, len(header), partial(bytes, header))]
    for name in names:
        parts += _parts(weights, name, quantization, parts[-1].offset + parts[-1].length)
    return parts


def _dtype(weights: WeightSource, name: str, quantization: str) -> dtype:
    import torch

    stored = weights.dtype(name)
    wanted: Any = getattr(torch, _DTYPES[quantization]) if quantization in _DTYPES else stored
    return wanted if stored.is_floating_point else stored


def _size(weights: WeightSource, name: str, quantization: str) -> int:
    return math.prod(weights.shape(name)) * int(_dtype(weights, name, quantization).itemsize)


def _plan_shards(weights: WeightSource, quantization: str) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name in weights.names():
        size = _size(weights, name, quantization)
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [WEIGHTS_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _header(weights: WeightSource, names: list[str], quantization: str) -> bytes:
    dtypes = {value: key for key, value in torch_dtypes().items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        end = start + _size(weights, name, quantization)
        kind = dtypes[_dtype(weights, name, quantization)]
        entries[name] = {"dtype": kind, "shape": list(weights.shape(name)), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parts(weights: WeightSource, name: str, quantization: str, offset: int) -> list[Part]:
    shape, parts = weights.shape(name), []
    row_bytes = _size(weights, name, quantization) // max(1, shape[0] if shape else 1)
    for start, stop in row_pieces(shape):
        length = (stop - start) * row_bytes
        parts.append(Part(offset, length, partial(_piece, weights, name, quantization, start, stop)))
        offset += length
    return parts


def _piece(weights: WeightSource, name: str, quantization: str, start: int, stop: int) -> Any:
    return _bytes(weights.rows(name, start, stop).to(_dtype(weights, name, quantization)))


def _bytes(tensor: Tensor) -> Any:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
