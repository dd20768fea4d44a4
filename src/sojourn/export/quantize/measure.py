"""Size, speed and perplexity of a quantized model beside its source, on the same device, in one call."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from sojourn.data import builtin
from sojourn.data.artefact import artefact_of
from sojourn.errors import UserError
from sojourn.evals.held_out import file_losses, held_out_losses
from sojourn.evals.losses import perplexity
from sojourn.export.open_source import Source
from sojourn.export.progress import Progress
from sojourn.export.quantize.kinds import KINDS
from sojourn.export.quantize.plain_folder import dtype_name, plain_folder
from sojourn.export.quantize.write import quantizing_device
from sojourn.export.stage import ExportStage
from sojourn.infer.load import LoadedModel, context_length
from sojourn.model.base import BaseModelSource, load_base_model
from sojourn.model.weights import torch_dtype
from sojourn.storage.files import write_text

ROWS = {"cuda": 64, "cpu": 16}  # of a file or of the built-in text: 16,000 tokens take a CPU minutes
_PROMPT, _NEW = 256, 32  # tokens of prefill and decode
_REPEATS = 3
BUILTIN = "builtin:text"
_TEXT_BYTES = 200_000


def measure(source: Source, stage: ExportStage, quantization: str, progress: Progress) -> dict[str, Any]:
    """The source in bf16 or fp16, then the quantized model: each is loaded, measured and dropped."""
    what, path = _data(source)
    if path == BUILTIN:
        progress.say(f"note: perplexity on built-in text: {what}; for your own: --data FILE")
        what, path = "built-in text", str(_builtin_text(stage.path))
    device, dtype = quantizing_device(), dtype_name(source)
    found: dict[str, Any] = {"device": _device_name(device), "data": what}
    folders = {"source": plain_folder(source, stage, progress), "quantized": stage.path}
    sizes = {"source": _bytes_16_bit(source), "quantized": _weight_bytes(stage.path)}
    for name, folder in folders.items():
        progress.say(f"measuring the {'source in ' + dtype if name == 'source' else 'quantized model'} on {device}")
        loaded = _load(source, folder, dtype if name == "source" else "auto", device)
        found[name] = {"bytes": sizes[name], **_perplexity(loaded, path), **_speed(loaded)}
        del loaded
    found["source"]["dtype"] = dtype
    if KINDS[quantization].library == "llmcompressor":
        found["speed"] = "speed in transformers, which decompresses the weights first; vLLM computes with them as is"
    found["rows"] = found["quantized"].pop("rows")
    del found["source"]["rows"]
    return found


def _data(source: Source) -> tuple[str, str | None]:
    """What the perplexity is of: in words, and the file (None: the run's held-out rows)."""
    if source.data is not None:
        return Path(source.data).name, source.data
    if source.run is None:
        return "the model is of no run here, so it has no held-out rows", BUILTIN
    try:
        return (
            ("held-out rows of the run", None) if len(artefact_of(source.run).eval) else ("no rows held out", BUILTIN)
        )
    except UserError:
        return "the run's prepared data is not here", BUILTIN


def _builtin_text(folder: Path) -> Path:
    """A file in the stage that the export does not have in the end."""
    path = folder / "builtin.txt"
    write_text(path, "\n\n".join(one.text for one in builtin.text(_TEXT_BYTES, languages=("en",))))
    return path


def _load(source: Source, folder: Path, dtype: str, device: str) -> LoadedModel:
    from transformers import AutoTokenizer

    model = load_base_model(BaseModelSource(str(folder)), dtype if dtype == "auto" else torch_dtype(dtype), device)
    tokenizer = source.weights.tokenizer_folder
    return LoadedModel(folder, model.eval(), AutoTokenizer.from_pretrained(tokenizer), device, source.run, tokenizer)


def _perplexity(loaded: LoadedModel, path: str | None) -> dict[str, Any]:
    found = (
        held_out_losses(loaded, None, True)
        if path is None
        else file_losses(loaded, path, ROWS[loaded.device], loaded.run)
    )
    assert found is not None  # noqa: S101 - required
    loss = float(found.loss.sum() / found.tokens.sum())
    return {"loss": loss, "perplexity": perplexity(loss), "rows": found.rows}


def _speed(loaded: LoadedModel) -> dict[str, float]:
    """Tokens per second of one text: a prompt at once, then new tokens one by one. Medians; the first pass is left out,
    which compiles and allocates."""
    import torch

    model, context = loaded.model, context_length(loaded.model)
    length = min(_PROMPT, context // 2)
    count = min(_NEW, context - length)
    prompt = torch.arange(length, device=loaded.device)[None] % model.config.get_text_config().vocab_size
    prefill, decode = [], []
    for _ in range(_REPEATS + 1):
        with torch.inference_mode():
            began = _now(loaded.device)
            output = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
            read = _now(loaded.device)
            for _ in range(count):
                token = output.logits[:, -1:].argmax(-1)
                output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
            prefill.append(length / (read - began))
            decode.append(count / (_now(loaded.device) - read))
    return {"prefill": round(statistics.median(prefill[1:]), 1), "decode": round(statistics.median(decode[1:]), 1)}


def _now(device: str) -> float:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _bytes_16_bit(source: Source) -> int:
    from math import prod

    return 2 * sum(prod(source.weights.shape(name)) for name in source.weights.names())


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
