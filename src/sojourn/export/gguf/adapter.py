"""Writes a LoRA adapter as a GGUF file, which llama.cpp applies to the base's (`--lora`; in Ollama: ADAPTER). It is
replayed on the base, which is written as a GGUF file for as long as that takes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.export.gguf.chat_template import templates_of
from sojourn.export.gguf.layout import file_parts, total_bytes
from sojourn.export.gguf.model_config import ModelConfig, read_config
from sojourn.export.gguf.tensors import TensorPlan
from sojourn.export.gguf.write import exact_type, file_name, require_package, write_file
from sojourn.export.open_source import Source
from sojourn.export.progress import Progress
from sojourn.export.source_reference import fits_in_memory
from sojourn.export.stage import ExportStage
from sojourn.infer.adapter_weights import AdapterWeights
from sojourn.infer.gguf.families import EMBEDDING, interleave
from sojourn.infer.runtimes.registry import available
from sojourn.infer.runtimes.transformers_tokenizer import as_ids, open_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

_MERGE = "merge it instead: --to gguf"


def write(source: Source, stage: ExportStage, quantization: str, progress: Progress) -> None:
    """`quantization`: f16 or f32, of the adapter's own matrices."""
    from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType

    require_package()
    adapter = _only_adapter(source)
    config = read_config(source.base.config)
    alpha = float(adapter.config.get("lora_alpha", 8))
    plans = _plans(adapter, config, alpha, GGMLQuantizationType[quantization.upper()])
    writer: GGUFWriter = GGUFWriter(None, config.family.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    writer.add_name(source.name)
    base = source.lineage.get("base")
    if base:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, str(base).rsplit("/", 1)[-1])
    writer.add_file_type(LlamaFileType.ALL_F32 if quantization == "f32" else LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    parts = file_parts(writer, plans)
    name = file_name(f"{source.name}-LoRA", quantization)
    progress.start(name, total_bytes(parts))
    stage.ranges(name, total_bytes(parts), parts)
    _say_what_the_base_decides(source, progress)


@contextmanager
def beside_base(source: Source, stage: ExportStage, progress: Progress) -> Iterator[None]:
    """The base's GGUF file is in the stage, with the adapter's tokenizer; not where nothing here can run it."""
    if available("llamacpp") and not fits_in_memory(source.base):
        yield
        return
    base = copy.copy(source.base)
    base.tokenizer_folder, base.generation_config = source.weights.tokenizer_folder, source.weights.generation_config
    whole = replace(source, weights=base)
    quantization = exact_type(whole)
    name = file_name(f"{source.name}-base", quantization)
    write_file(whole, stage, name, quantization, progress)
    yield
    stage.remove(name)


def _say_what_the_base_decides(source: Source, progress: Progress) -> None:
    """llama.cpp has one tokenizer, that of the model."""
    own, base = source.weights, source.base
    templates = [_templates(one.tokenizer_folder) for one in (own, base)]
    stops = [as_ids((one.generation_config or one.config).get("eos_token_id")) for one in (own, base)]
    differs = {"chat template": templates[0] != templates[1], "stop tokens": bool(stops[0] - stops[1])}
    other = [name for name, is_other in differs.items() if is_other]
    if other:
        progress.say(
            f"note: llama.cpp takes the {' and the '.join(other)} from the base's file, and this adapter was trained "
            f"with others; for chats {_MERGE}"
        )


def _templates(folder: Path) -> dict[str, str]:
    """None where a base came without its tokenizer."""
    try:
        return templates_of(open_tokenizer(folder))
    except UserError:
        return {}


def _only_adapter(source: Source) -> AdapterWeights:
    if len(source.adapters) != 1:
        found = "no adapter" if not source.adapters else f"{len(source.adapters)} adapters"
        raise UserError(f"gguf-adapter: {source.name} has {found}; it takes one; for the whole model: --to gguf")
    adapter = source.adapters[0]
    saved = adapter.saved()
    if saved:
        raise UserError(f"gguf-adapter: llama.cpp's adapters cannot hold {saved[0]} (modules_to_save); {_MERGE}")
    for name in adapter.modules():
        if adapter.has_magnitude(name):
            raise UserError(f"gguf-adapter: llama.cpp has no DoRA; {_MERGE}")
        if adapter.bias(name) is not None:
            raise UserError(f"gguf-adapter: llama.cpp's adapters have no bias ({name}); {_MERGE}")
    return adapter


def _plans(adapter: AdapterWeights, config: ModelConfig, alpha: float, type_: Any) -> list[TensorPlan]:
    plans = []
    for name in sorted(adapter.modules()):
        ours = config.family.gguf_name(name)
        if ours is None:
            raise UserError(f"gguf-adapter: llama.cpp has no place for {name} in {config.family.model_type}; {_MERGE}")
        if ours == EMBEDDING or adapter.is_transposed(name):
            raise UserError(f"gguf-adapter: an adapter of the embedding ({name}) is not written; {_MERGE}")
        rows, columns = adapter.changed_shape(name)
        rank = int(adapter.lora(name)[0].shape[0])
        heads = config.family.rope_heads(ours, config.values)
        a = partial(_a, adapter, name)
        b = partial(_b, adapter, name, heads, adapter.weight * adapter.scaling(name) * rank / alpha)
        plans.append(_plan(f"{ours}.lora_a", (rank, columns), type_, a))
        plans.append(_plan(f"{ours}.lora_b", (rows, rank), type_, b))
    return plans


def _plan(name: str, shape: tuple[int, int], type_: Any, load: Any) -> TensorPlan:
    def rows(start: int, stop: int) -> Tensor:
        found: Tensor = load()[start:stop]
        return found

    return TensorPlan(name, shape, type_, rows, step=shape[0])


def _a(adapter: AdapterWeights, name: str) -> Tensor:
    return adapter.lora(name)[0]


def _b(adapter: AdapterWeights, name: str, heads: int, factor: float) -> Tensor:
    """llama.cpp scales by alpha / rank. Where the adapter scales otherwise (rsLoRA, a weight), the rest goes into B."""
    b = adapter.lora(name)[1]
    b = interleave(b, heads) if heads else b
    return b if math.isclose(factor, 1.0, rel_tol=1e-9) else b * factor
