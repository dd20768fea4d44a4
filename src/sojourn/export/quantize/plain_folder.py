"""The folder that a quantizing library reads: the source's own where it is a plain model, else a merged copy in the
stage. The copy is no file of the export: it goes when the export is put in place."""

from __future__ import annotations

from pathlib import Path

from sojourn.export import hf
from sojourn.export.open_source import Source
from sojourn.export.progress import Progress
from sojourn.export.stage import ExportStage
from sojourn.infer.weight_source import FolderWeights

_COPY = "source"


def plain_folder(source: Source, stage: ExportStage, progress: Progress) -> Path:
    if isinstance(source.weights, FolderWeights):
        return source.weights.folder
    copy = stage.path / _COPY
    if not copy.exists():
        progress.say("writing a merged copy, which is quantized then")
        with ExportStage(copy, source.fingerprint, progress) as inner:
            hf.write_configs(source, inner, "auto")
            hf.write_weights(source.weights, inner, "auto", progress)
            inner.finish({})
    return copy


def dtype_name(source: Source) -> str:
    """Of what stays unquantized, and of the source that it is measured beside: bf16, or fp16 where the source is."""
    return "fp16" if hf.main_dtype(source.weights) == "float16" else "bf16"
