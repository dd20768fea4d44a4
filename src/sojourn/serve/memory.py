"""What the models of a server take, known before any of them is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from sojourn.catalog.models import ModelSpec
from sojourn.errors import UserError
from sojourn.estimate.serving import kv_memory, weight_bytes
from sojourn.infer.find import FoundModel
from sojourn.machine.gpus import driver_gpus
from sojourn.machine.precision import choose_device, cpu_bf16_feature
from sojourn.model.adapter_check import ADAPTER_FILE
from sojourn.resolve.config_json import spec_of_file
from sojourn.resolve.model_spec import model_spec_of
from sojourn.run.moved_paths import path_here
from sojourn.storage.files import read_json_object
from sojourn.storage.gguf_header import check_gguf

_GIB = 2**30
_CUDA_CONTEXT = 1 << 30  # of each engine's process, with its kernels


def share_memory(models: Mapping[str, FoundModel], device: str, quantization: str | None) -> tuple[str, int | None]:
    """A line about the memory of models that the builtin engine serves on one device, and the bytes of each one's KV
    cache (None: the engine decides by itself). Raises UserError where the weights alone do not fit."""
    device = choose_device(device)
    free = free_memory(device)
    sizes = {name: model_bytes(found, device, quantization) for name, found in models.items()}
    if free is None or not sizes or None in sizes.values():
        return "", None
    known = {name: size for name, size in sizes.items() if size is not None}
    # Quantized on a GPU: loaded whole first, one after another
    loading = max((model_bytes(models[name], device, None) or 0) - known[name] for name in known)
    listed = ", ".join(f"{name} {size / _GIB:.1f} GiB" for name, size in known.items())
    left = free - sum(known.values()) - (_CUDA_CONTEXT * len(known) if device == "cuda" else 0)
    share = kv_memory(left, device, len(known))
    where = {"cuda": "of the GPU", "cpu": "of memory"}.get(device, device)
    if left < loading or share <= 0:
        smaller = "--quantize int8" if quantization is None and device == "cuda" and left > 0 else "a smaller model"
        fewer = "fewer models, or " if len(known) > 1 else ""
        raise UserError(f"weights take {listed}, but {free / _GIB:.1f} GiB {where} are free; try {fewer}{smaller}")
    if len(known) == 1:
        return f"memory: weights {listed}; {free / _GIB:.1f} GiB {where} are free", None
    cache = f"up to {share / _GIB:.1f} GiB of KV cache each"
    return f"memory: weights {listed}; {cache}; {free / _GIB:.1f} GiB {where} are free", share


def free_memory(device: str) -> int | None:
    """Bytes; of a GPU without a CUDA context in this process. None where nobody says."""
    if device == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    if device != "cuda":
        return None
    try:
        gpus = driver_gpus()
    except RuntimeError:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    index = int(first) if first.isdecimal() else 0
    for one in gpus:
        if one.index == index and one.used_bytes is not None:
            return one.memory_bytes - one.used_bytes
    return None


def model_bytes(found: FoundModel, device: str, quantization: str | None) -> int | None:
    """Of the weights; on a CPU while they are loaded, which is when they take most. None where it is not known."""
    element = 4 if device == "cpu" and cpu_bf16_feature() is None else _element(found.path)
    if found.path.suffix == ".gguf":
        tensors = check_gguf(found.path).tensors.values()
        return sum(math.prod(one.shape) for one in tensors) * (4 if device == "cpu" else element)
    try:
        shape = _shape(found)
    except (UserError, OSError):
        return None  # loading says what is wrong
    if shape is None:
        return None
    return weight_bytes(shape, element, quantization if device == "cuda" else None)


def _shape(found: FoundModel) -> ModelSpec | None:
    folder = found.path
    if found.is_checkpoint:
        from sojourn.infer.load import config_here

        return None if found.run is None else model_spec_of(config_here(found.run))
    if (folder / ADAPTER_FILE).is_file():
        named = read_json_object(folder / ADAPTER_FILE).get("base_model_name_or_path")
        folder = Path(path_here(str(named), folder))
    return spec_of_file(folder / "config.json") if (folder / "config.json").is_file() else None


def _element(folder: Path) -> int:
    """Bytes of a weight as the folder has it."""
    config = read_json_object(folder / "config.json") if folder.is_dir() else {}
    return 4 if (config.get("dtype") or config.get("torch_dtype")) == "float32" else 2
