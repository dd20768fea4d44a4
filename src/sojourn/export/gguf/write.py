"""Writes a model as a GGUF file with a Modelfile for Ollama beside it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sojourn.errors import UserError
from sojourn.export.gguf.general import add_general
from sojourn.export.gguf.hyperparameters import add_hyperparameters
from sojourn.export.gguf.k_quants import K_QUANTS, quantize_file, require_llama_cpp
from sojourn.export.gguf.layout import file_parts, total_bytes
from sojourn.export.gguf.model_config import read_config, unsupported_window
from sojourn.export.gguf.modelfile import modelfile
from sojourn.export.gguf.tensors import plan_tensors
from sojourn.export.gguf.tokenizer import add_tokenizer
from sojourn.export.open_source import Source
from sojourn.export.progress import Progress
from sojourn.export.ranges import Part
from sojourn.export.stage import ExportStage
from sojourn.infer.gguf.families import EMBEDDING
from sojourn.infer.gguf.file import GgufFile
from sojourn.storage.files import is_plain_name

if TYPE_CHECKING:
    from gguf import GGUFWriter


def write(source: Source, stage: ExportStage, quantization: str, progress: Progress) -> None:
    """`quantization`: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, or a K-quant of llama.cpp."""
    require_package()
    file = file_name(source.name, quantization)
    if quantization not in K_QUANTS:
        write_file(source, stage, file, quantization, progress)
    elif file not in stage.files:
        require_llama_cpp(quantization)
        exact = exact_type(source)
        between = file_name(source.name, f"unquantized-{exact}")
        write_file(source, stage, between, exact, progress)
        quantize_file(source, stage, between, file, quantization, progress)
        stage.remove(between)
    written = GgufFile(stage.path / file)
    stage.text("Modelfile", modelfile(written))


def file_name(name: str, quantization: str) -> str:
    """SmolLM2-135M-Q4_0.gguf"""
    stem = name.rsplit("/", 1)[-1]
    return f"{stem if is_plain_name(stem) else 'model'}-{quantization.upper()}.gguf"


def write_file(source: Source, stage: ExportStage, name: str, quantization: str, progress: Progress) -> None:
    if name in stage.files:
        return
    parts = _parts(source, quantization, progress)
    progress.start(name, total_bytes(parts))
    stage.ranges(name, total_bytes(parts), parts)


def _parts(source: Source, quantization: str, progress: Progress) -> list[Part]:
    from gguf import GGML_QUANT_VERSION, GGUFWriter, LlamaFileType

    config = read_config(source.weights.config)
    plans, lines = plan_tensors(source.weights, config, quantization)
    window = unsupported_window(config)
    for line in [*lines, *([window] if window else [])]:
        progress.say(line)
    rows = next(plan.shape[0] for plan in plans if plan.name == EMBEDDING)
    writer: GGUFWriter = GGUFWriter(None, config.family.architecture)
    writer.add_type("model")
    add_hyperparameters(writer, config, rows)
    added = add_tokenizer(writer, source.weights, rows, progress.say)
    add_general(writer, source.name, sum(math.prod(plan.shape) for plan in plans), source.lineage, added)
    kind = "ALL_F32" if quantization == "f32" else f"MOSTLY_{quantization.upper()}"
    writer.add_file_type(LlamaFileType[kind])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    return file_parts(writer, plans)


def exact_type(source: Source) -> str:
    """The type that holds the weights as they are, for llama.cpp to quantize from."""
    import torch

    kinds = {source.weights.dtype(name) for name in source.weights.names()}
    if kinds == {torch.float16}:
        return "f16"
    return "bf16" if kinds == {torch.bfloat16} else "f32"


def require_package() -> None:
    from importlib.util import find_spec

    if find_spec("gguf") is None:
        raise UserError("GGUF files need the package gguf; run: pip install gguf")
