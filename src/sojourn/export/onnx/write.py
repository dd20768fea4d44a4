"""Writes the ONNX format: the graph, its weights in one file of external data, the tokenizer, genai_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sojourn import __version__
from sojourn.errors import UserError
from sojourn.export.hf import write_configs, write_tokenizer
from sojourn.export.onnx.architecture import read_architecture
from sojourn.export.onnx.decoder import DecoderGraph
from sojourn.export.onnx.genai import GRAPH_FILE, genai_config
from sojourn.export.onnx.graph import Graph
from sojourn.export.onnx.stored_weights import DATA_FILE, PRECISIONS, StoredWeights
from sojourn.export.open_source import Source
from sojourn.export.progress import Progress
from sojourn.export.stage import ExportStage


def write(source: Source, stage: ExportStage, quantization: str, progress: Progress) -> None:
    """`quantization`: fp32, fp16, or weight-only int8 and int4."""
    _require_onnx()
    precision, graph = PRECISIONS[quantization], Graph()
    architecture = read_architecture(source.weights)
    if architecture.skipped:
        progress.say(f"note: {len(architecture.skipped)} weights are not of the decoder and left out: no images")
    weights = StoredWeights(graph, source.weights, architecture.names, precision)
    DecoderGraph(architecture, graph, weights, precision.dtype).build()
    write_tokenizer(source, stage)
    write_configs(source, stage, "fp16" if precision.dtype == "float16" else "fp32")
    stage.json("genai_config.json", genai_config(architecture, source.weights.generation_config))
    progress.start("weights", weights.bytes)
    stage.ranges(DATA_FILE, weights.bytes, weights.parts)
    model = graph.model(source.name, __version__)
    stage.file(GRAPH_FILE, lambda path: _save(model, path))


def _save(model: Any, path: Path) -> None:
    path.write_bytes(model.SerializeToString())


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise UserError("--to onnx needs the onnx package: pip install 'sojourn[export]'") from None
