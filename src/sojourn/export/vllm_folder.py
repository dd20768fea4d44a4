"""The folder that vLLM serves: a merged model, or an adapter beside its base."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.data.tokenize.templates import has_chat_template
from sojourn.errors import UserError
from sojourn.export import hf
from sojourn.export.open_source import Source
from sojourn.export.progress import Progress
from sojourn.export.stage import ExportStage
from sojourn.export.vllm_preflight import (
    adapter_problems,
    config_for_vllm,
    model_notes,
    model_problems,
    refuse,
    tokenizer_for_vllm,
)
from sojourn.infer.adapter_weights import AdapterWeights
from sojourn.infer.runtimes.vllm import serve_arguments
from sojourn.model.adapter_check import ADAPTER_FILE, ADAPTER_WEIGHTS
from sojourn.storage.files import read_json_object

if TYPE_CHECKING:
    from torch import Tensor

_TOKENIZER_CONFIG = "tokenizer_config.json"


def check(source: Source, progress: Progress) -> None:
    """Before a merged model is written."""
    refuse(model_problems(source.weights))
    for note in model_notes(source.weights, has_chat_template(source.weights.tokenizer_folder)):
        progress.say(f"note: {note}")


def check_adapter(source: Source, progress: Progress) -> None:
    if len(source.adapters) != 1 or source.adapters[0].weight != 1.0:
        count = len(source.adapters)
        what = (
            "no adapter" if not count else f"{count} adapters" if count > 1 else "an adapter with a weight of its own"
        )
        raise UserError(f"--to vllm-adapter: {source.name} has {what}; for a merged model: --to vllm")
    vocab_size = int((source.base.config.get("text_config") or source.base.config)["vocab_size"])
    refuse(adapter_problems(source.adapters[0], vocab_size, source.weights.tokenizer_folder))
    refuse(model_problems(source.base))


def write(source: Source, stage: ExportStage, quantization: str, progress: Progress) -> None:
    """A merged model. `quantization`: as in `hf.write`."""
    write_tokenizer(source, stage)
    hf.write_configs(source, _WithOlderSpellings(stage), quantization)  # type: ignore[arg-type]
    hf.write_weights(source.weights, stage, quantization, progress)
    progress.say(f"serve it with: {_serve_command(stage, source.name)}")


def write_adapter(source: Source, stage: ExportStage, quantization: str, progress: Progress) -> None:
    """An adapter that vLLM loads on top of its base."""
    adapter = source.adapters[0]
    write_tokenizer(source, stage)
    stage.json("generation_config.json", source.weights.generation_config)
    stage.json(ADAPTER_FILE, adapter_config(adapter))
    progress.start("adapter", 1)
    stage.file(ADAPTER_WEIGHTS, lambda path: _write_lora(adapter, path))
    progress.advance(1)
    progress.say(f"serve it with: {_serve_command(stage, source.name)}")


def _serve_command(stage: ExportStage, name: str) -> str:
    """With the name of the folder once it is in place."""
    given = serve_arguments(stage.path, name)
    return f"vllm serve {shlex.join(one.replace(str(stage.path), str(stage.target)) for one in given)}"


class _WithOlderSpellings:
    """A stage that writes config.json as every vLLM reads it."""

    def __init__(self, stage: ExportStage) -> None:
        self._stage = stage

    def json(self, name: str, value: Any) -> None:
        self._stage.json(name, config_for_vllm(value) if name == "config.json" else value)


def write_tokenizer(source: Source, stage: ExportStage) -> None:
    """`tokenizer_config.json` first: what is complete is not written again."""
    folder = source.weights.tokenizer_folder
    if (folder / _TOKENIZER_CONFIG).is_file():
        stage.json(_TOKENIZER_CONFIG, tokenizer_for_vllm(read_json_object(folder / _TOKENIZER_CONFIG)))
    hf.write_tokenizer(source, stage)


def adapter_config(adapter: AdapterWeights) -> dict[str, Any]:
    """peft's adapter_config.json; of a checkpoint, with the layers that its tensors name."""
    targets = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in adapter.modules()})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "target_modules": targets}
    return {**config, **{key: value for key, value in adapter.config.items() if value not in (None, [], {})}}


def _write_lora(adapter: AdapterWeights, path: Path) -> None:
    """Under peft's names, in fp32."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name in adapter.modules():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b, _ = adapter.lora(name)
        tensors |= {f"{module}.lora_A.weight": a.contiguous(), f"{module}.lora_B.weight": b.contiguous()}
    save_file(tensors, path, {"format": "pt"})
