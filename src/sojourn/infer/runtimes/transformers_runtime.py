"""transformers as a runtime: a model's folder, an adapter on its base, or a GGUF file. In fp32 on the CPU; quantized
weights stay so, on a GPU where there is one."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import RunFailed, UserError
from sojourn.infer.load import context_length
from sojourn.infer.runtimes.quantized_weights import dequantized, why_not_here
from sojourn.infer.runtimes.transformers_tokenizer import TokenizerRuntime, as_ids, open_tokenizer
from sojourn.model.adapter import load_adapter
from sojourn.model.adapter_check import ADAPTER_FILE, check_adapter
from sojourn.model.base import BaseModelSource, load_base_model
from sojourn.model.quiet import quiet_transformers, suppress_stderr
from sojourn.model.safetensors_reader import SafetensorsFile
from sojourn.run.moved_paths import path_here
from sojourn.storage.files import read_json_object
from sojourn.storage.gguf_header import check_gguf

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

MEMORY_SHARE = 1 / 3  # of the free memory that a model in fp32 may take


class TransformersRuntime(TokenizerRuntime):
    """`model`: a causal model of transformers or peft. `stop_ids`: its own if None."""

    def __init__(self, model: Any, tokenizer: Any, stop_ids: set[int] | None = None) -> None:
        own = as_ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None))
        super().__init__("transformers", tokenizer, own if stop_ids is None else stop_ids)
        self._model = model.eval()

    def logits(self, ids: list[int]) -> np.ndarray | None:
        import torch

        with torch.inference_mode():
            rows = self._model(input_ids=self._tensor(ids), use_cache=False).logits[0]
        found: np.ndarray = rows.float().cpu().numpy()
        return found

    def greedy(self, ids: list[int], count: int) -> list[int] | None:
        import torch

        tokens: list[int] = []
        step, cache = self._tensor(ids), None
        with torch.inference_mode():
            while len(tokens) < min(count, context_length(self._model) - len(ids)):
                output = self._model(input_ids=step, past_key_values=cache, use_cache=True)
                tokens.append(int(output.logits[0, -1].argmax()))
                if self.stops_at(tokens[-1]):
                    break
                step, cache = self._tensor(tokens[-1:]), output.past_key_values
        return tokens

    def weights(self) -> Iterable[tuple[str, Any]] | None:
        """None for adapters."""
        if hasattr(self._model, "peft_config"):
            return None
        is_quantized = getattr(self._model.config, "quantization_config", None) is not None
        return dequantized(self._model) if is_quantized else _stored_weights(self._model).items()

    def _tensor(self, ids: list[int]) -> Any:
        import torch

        return torch.tensor([ids], device=self._model.device)

    def close(self) -> None:
        self._model = None


def _stored_weights(model: Any) -> dict[str, Any]:
    """By the names in its files: transformers stacks experts that are stored one by one."""
    from transformers.core_model_loading import revert_weight_conversion

    from sojourn.model.experts import expert_modules

    weights: dict[str, Any] = model.state_dict()
    return revert_weight_conversion(model, weights) if expert_modules(model) else weights


def unavailable() -> str:
    return ""


def refuses(path: Path) -> str:
    """Empty, or why the model does not fit in memory in fp32, or is quantized in a way that does not run here."""
    reason = why_not_here(read_json_object(path / "config.json")) if path.is_dir() else ""
    if reason:
        return reason
    needed, free = 4 * count_parameters(path), free_memory()
    if needed <= free * MEMORY_SHARE:
        return ""
    return f"the model takes {needed / 2**30:.1f} GiB in fp32, more than a third of the {free / 2**30:.1f} GiB free"


def free_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def count_parameters(path: Path) -> int:
    """From the headers of the safetensors or GGUF files."""
    file = gguf_file(path)
    if file is not None:
        return sum(prod(tensor.shape) for tensor in check_gguf(file).tensors.values())
    folders = [path]
    if (path / ADAPTER_FILE).is_file() and not (path / "config.json").is_file():
        folders.append(_base_of(path))
    files = [file for folder in folders if folder.is_dir() for file in folder.glob("*.safetensors")]
    return sum(prod(entry.shape) for file in files for entry in SafetensorsFile(file).entries.values())


def open_model(path: Path, trust_remote_code: bool = False) -> TransformersRuntime:
    import torch

    file = gguf_file(path)
    try:
        if file is not None:
            return _open_gguf(file)
        if not (path / ADAPTER_FILE).is_file() or (path / "config.json").is_file():
            return TransformersRuntime(_load(BaseModelSource(str(path), None, trust_remote_code)), open_tokenizer(path))
        revision = check_adapter(path).get("revision")
        base = load_base_model(BaseModelSource(str(_base_of(path)), revision), torch.float32, "cpu")
        return TransformersRuntime(load_adapter(base, path, trainable=False), open_tokenizer(path))
    except UserError as error:
        raise RunFailed(f"{path}: transformers cannot open it: {_reason(error)}") from None


def _base_of(adapter: Path) -> Path:
    """A folder, or a name on the hub."""
    return Path(path_here(str(read_json_object(adapter / ADAPTER_FILE).get("base_model_name_or_path")), adapter))


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` is, or the only one in the folder that it is."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").is_file() else []
    return found[0] if len(found) == 1 else None


def _load(source: BaseModelSource) -> Any:
    """Quantized weights stay quantized; others are fp32."""
    import torch

    quantized = "quantization_config" in read_json_object(Path(source.name_or_path) / "config.json")
    device = "cuda" if quantized and torch.cuda.is_available() else "cpu"
    return load_base_model(source, "auto" if quantized else torch.float32, device)


def _open_gguf(file: Path) -> TransformersRuntime:
    """Not through the cache of unpacked files, which is for models that are used again."""
    import torch
    import transformers

    quiet_transformers()
    check_gguf(file)
    extra = {}
    if hasattr(transformers, "GgufConfig"):  # newer versions might keep it quantized
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with suppress_stderr(True):
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, **extra
            )
        except Exception as error:  # gguf and transformers raise anything for a damaged file
            raise UserError(_reason(error)) from None
    return TransformersRuntime(model, open_tokenizer(file.parent, gguf_file=file.name))


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()).removeprefix("model.base: ")
    return text[:300] or type(error).__name__
