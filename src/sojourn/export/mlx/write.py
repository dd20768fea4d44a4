"""Writes the MLX format: config.json as mlx-lm reads it, safetensors, tokenizer."""

from __future__ import annotations

from dataclasses import replace

from sojourn.export.hf import write_configs, write_tokenizer, write_weights
from sojourn.export.mlx.config import mlx_config
from sojourn.export.mlx.weights import MlxWeights
from sojourn.export.onnx.architecture import read_architecture
from sojourn.export.open_source import Source
from sojourn.export.progress import Progress
from sojourn.export.stage import ExportStage

_BITS = {"q8": 8, "q4": 4}


def write(source: Source, stage: ExportStage, quantization: str, progress: Progress) -> None:
    """`quantization`: auto (each tensor's dtype as it is), fp16, bf16, or 8 and 4 bits."""
    bits = _BITS.get(quantization, 0)
    config, notes = mlx_config(source.weights.config, read_architecture(source.weights, "mlx"), bits)
    for note in notes:
        progress.say(note)
    weights = MlxWeights(source.weights, config, bits)
    dtype = "auto" if bits else quantization
    write_tokenizer(source, stage)
    write_configs(replace(source, weights=weights), stage, dtype)
    write_weights(weights, stage, dtype, progress)
