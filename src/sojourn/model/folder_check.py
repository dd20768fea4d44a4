"""Checks a model's folder that came from elsewhere before any library opens it. Nothing in it is run.

Whatever opens a model calls `check_model`, `check_adapter` (adapter_check.py) or `check_gguf` (storage/gguf_header.py);
whatever opens a tokenizer, `check_tokenizer`.
Weights are read from safetensors files alone, since a pickle can run code. Every figure is compared with the sizes of
the files before memory is reserved for it. Without torch and transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sojourn.config.messages import printable
from sojourn.data.tokenize.tokenizer_check import check_tokenizer
from sojourn.errors import UserError
from sojourn.storage.files import NotValid, is_plain_name
from sojourn.storage.foreign_json import check_link, load_foreign_json
from sojourn.storage.safetensors_header import TensorEntry, read_header

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_AGAIN = "copy or download it again"
_MOST = {
    "num_hidden_layers": 10_000, "n_layer": 10_000, "n_layers": 10_000, "vocab_size": 10**8, "hidden_size": 10**6,
    "n_embd": 10**6, "d_model": 10**6, "num_attention_heads": 10**5, "num_key_value_heads": 10**5, "n_head": 10**5,
    "head_dim": 10**5, "intermediate_size": 10**7, "num_local_experts": 10**5, "num_experts": 10**5,
    "max_position_embeddings": 10**10,
}  # fmt: skip
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LEAST_BITS = 2  # of one weight, however it is quantized


def check_model(folder: Path, weights: bool = True) -> None:
    """A folder as transformers writes it; without `weights`, its settings alone."""
    config = read_object(folder / "config.json")
    _check_config(folder / "config.json", config)
    if os.path.lexists(folder / "generation_config.json"):
        path = folder / "generation_config.json"
        _check_generation(path, read_object(path))
    if weights:
        _check_counts(folder, config, _weights(folder))
        check_tokenizer(folder)


def weight_files(folder: Path) -> tuple[list[Path], list[str]]:
    """The files, and the tensors that the index lists."""
    index = folder / INDEX_FILE
    if os.path.lexists(index):
        names = read_object(index, 64 << 20).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise UserError(f"{index}: not an index of weights; {_AGAIN}")
        for name in names.values():
            if not isinstance(name, str) or not is_plain_name(name) or not name.endswith(".safetensors"):
                raise UserError(
                    f"{index}: it names {printable(name, 60)!r} as a file of weights, which is no safetensors file in "
                    f"the same folder; {_AGAIN}"
                )
        return [folder / name for name in sorted(set(names.values()))], list(names)
    if os.path.lexists(folder / WEIGHTS_FILE):
        return [folder / WEIGHTS_FILE], []
    refuse_pickles(folder)
    raise UserError(f"{folder}: it has a config.json, but no weights (no {WEIGHTS_FILE}); download them too")


def refuse_pickles(folder: Path) -> None:
    pickled = next(iter(sorted(path for pattern in PICKLES for path in folder.glob(pattern))), None)
    if pickled is not None:
        convert = "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
        raise UserError(
            f"{folder}: its weights are pickled ({printable(pickled.name, 60)}), which can run code, and are not "
            f"opened; take a copy with {WEIGHTS_FILE}, or if you trust it, convert it with transformers: {convert}"
        )


def safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """One-line errors."""
    try:
        return read_header(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the model is incomplete: {_AGAIN}") from None
    except NotValid as error:
        raise UserError(f"{path}: not a whole safetensors file ({printable(error, 200)}); {_AGAIN}") from None


def _weights(folder: Path) -> dict[str, TensorEntry]:
    paths, listed = weight_files(folder)
    found: dict[str, TensorEntry] = {}
    for path in paths:
        found |= safetensors_header(path)
    missing = next((name for name in listed if name not in found), None)
    if missing is not None:
        raise UserError(f"{folder}: {printable(missing, 80)} is not in its file; {_AGAIN}")
    return found


def _check_counts(folder: Path, config: dict[str, Any], entries: dict[str, TensorEntry]) -> None:
    """Weights that the files do not have would be made at random, whatever memory that takes."""
    inner = config.get("text_config")
    found = {**config, **(inner if isinstance(inner, dict) else {})}
    layers, hidden, vocabulary = (_first(found, *names) for names in _NAMES)
    least = layers * hidden * hidden + vocabulary * hidden
    bits = sum(entry.end - entry.start for entry in entries.values()) * 8
    if least * _LEAST_BITS > bits or layers > len(entries):
        raise UserError(
            f"{folder}: config.json describes {layers:,} layers and at least {least:,} weights, but the files have "
            f"{len(entries):,} tensors of {bits // 8:,} bytes; {_AGAIN}"
        )


_NAMES = (
    ("num_hidden_layers", "n_layer", "n_layers"), ("hidden_size", "n_embd", "d_model"), ("vocab_size",),
)  # fmt: skip


def _first(config: dict[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if type(config.get(name)) is int), 0)


def read_object(path: Path, most: int = 8 << 20) -> dict[str, Any]:
    try:
        check_link(path)
        found = load_foreign_json(path, most)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {_AGAIN}") from None
    except NotValid as error:
        raise UserError(f"{path}: {printable(error, 200)}; {_AGAIN}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: not a mapping; {_AGAIN}")
    return found


def _check_config(path: Path, config: dict[str, Any]) -> None:
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise UserError(f"{path}: no model_type in it, so nobody knows what model it is; take the publisher's own file")
    inner = config.get("text_config")
    for found in (config, inner if isinstance(inner, dict) else {}):
        for key, most in _MOST.items():
            value = found.get(key)
            several = value if key == "intermediate_size" and isinstance(value, list) else [value]
            if value is not None and not all(type(one) is int and 0 < one <= most for one in several):
                raise UserError(f"{path}: {key} is {json.dumps(value)[:40]}, which no model has; {_AGAIN}")
        _check_ids(path, found)
    for found in _mappings(config):
        for key, value in found.items():
            # transformers would download and run a kernel of that name
            if "implementation" in key and any(mark in json.dumps(value) for mark in "/:@"):
                raise UserError(f"{path}: {printable(key, 40)} names code to download; remove that line from the file")


def _check_ids(path: Path, found: dict[str, Any]) -> None:
    for key in _IDS:
        value = found.get(key)
        for one in value if isinstance(value, list) else [value]:
            if one is not None and not (type(one) is int and -1 <= one < 10**8):
                raise UserError(f"{path}: {key} is {json.dumps(value)[:40]}, not a token's id; {_AGAIN}")


def _check_generation(path: Path, found: dict[str, Any]) -> None:
    _check_ids(path, found)
    numbers = {"temperature": 1e6, "top_p": 1.0, "top_k": 1e9, "repetition_penalty": 1e6, "max_length": 1e10,
               "max_new_tokens": 1e10, "num_beams": 64, "num_return_sequences": 64}  # fmt: skip
    for key, most in numbers.items():
        value = found.get(key)
        if value is not None and not is_number(value, most):
            raise UserError(f"{path}: {key} is {json.dumps(value)[:40]}; correct it, or remove that line")


def is_number(value: Any, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most


def _mappings(found: Any) -> Iterator[dict[str, Any]]:
    rest = [found]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            yield one
            rest += one.values()
        elif isinstance(one, list):
            rest += one
