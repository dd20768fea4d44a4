"""Checks an adapter that came from elsewhere before peft opens it: its settings name no code, and its weights are
safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sojourn.config.messages import printable
from sojourn.data.tokenize.backtracking import may_backtrack
from sojourn.data.tokenize.tokenizer_check import check_tokenizer
from sojourn.errors import UserError
from sojourn.model.folder_check import is_number, read_object, safetensors_header

ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PATTERNS = ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save")
_NUMBERS = {"r": 65_536.0, "lora_alpha": 1e6, "lora_dropout": 1.0}
_MOST_QUANTIFIERS = 6  # each multiplies the time by the length of a name
_MOST_LAYERS = 1000
_AGAIN = "copy or download it again"


def check_adapter(folder: Path) -> dict[str, Any]:
    """Its settings."""
    path = folder / ADAPTER_FILE
    config = read_object(path)
    _check_base(path, config)
    _check_code(path, config)
    _check_patterns(path, config)
    for key, most in _NUMBERS.items():
        value = config.get(key)
        if value is not None and not is_number(value, most):
            raise UserError(f"{path}: {key} is {json.dumps(value)[:40]}, which no adapter has; {_AGAIN}")
    if not os.path.lexists(folder / ADAPTER_WEIGHTS):
        pickled = "its weights are pickled, which can run code, and are not opened"
        why = pickled if (folder / "adapter_model.bin").exists() else f"no {ADAPTER_WEIGHTS} there"
        raise UserError(f"{folder}: {why}; save it as safetensors with peft's save_pretrained()")
    safetensors_header(folder / ADAPTER_WEIGHTS)
    check_tokenizer(folder)
    return config


def _check_base(path: Path, config: dict[str, Any]) -> None:
    if not isinstance(config.get("peft_type", "LORA"), str):
        raise UserError(f"{path}: peft_type is not a text; {_AGAIN}")
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if base is not None and (not isinstance(base, str) or "://" in base or "\0" in base):
        raise UserError(
            f"{path}: its base is {printable(base, 60)!r}, neither a folder nor a name on the hub; correct "
            "base_model_name_or_path in it"
        )
    if revision is not None and not isinstance(revision, str):
        raise UserError(f"{path}: revision is not a text; {_AGAIN}")


def _check_code(path: Path, config: dict[str, Any]) -> None:
    """Settings by which peft imports modules."""
    mapping = config.get("auto_mapping") or {}
    library = mapping.get("parent_library") if isinstance(mapping, dict) else mapping
    ours = isinstance(library, str) and (library == "transformers" or library.startswith("transformers."))
    named = [] if library is None or ours else ["auto_mapping"]
    named += ["megatron_config"] if config.get("megatron_config") else []
    named += ["megatron_core"] if config.get("megatron_core") not in (None, "megatron.core") else []
    if named:
        raise UserError(f"{path}: {named[0]} names Python code to import; remove that line from the file")


def _check_patterns(path: Path, config: dict[str, Any]) -> None:
    for key in _PATTERNS:
        value = config.get(key)
        names = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(one, str) for one in names):
            raise UserError(f"{path}: {key} is neither a pattern nor a list of names; {_AGAIN}")
        for one in names:
            _check_pattern(path, key, one or "")
    for key in ("rank_pattern", "alpha_pattern"):
        value = config.get(key) or {}
        if not isinstance(value, dict) or not all(is_number(one, 1e6) for one in value.values()):
            raise UserError(f"{path}: {key} is not a mapping of patterns to numbers; {_AGAIN}")
        for one in value:
            _check_pattern(path, key, one)
    layers = config.get("layer_replication")
    if layers is not None and not _are_few_layers(layers):
        raise UserError(f"{path}: layer_replication is {json.dumps(layers)[:40]}, which no adapter has; {_AGAIN}")


def _check_pattern(path: Path, key: str, pattern: str) -> None:
    wild, most = sum(map(pattern.count, "*+{")), 2 if key.endswith("_pattern") else _MOST_QUANTIFIERS
    if len(pattern) > 10_000 or may_backtrack(pattern) or wild > most:
        raise UserError(
            f"{path}: the pattern {pattern[:60]!r} in {key} can take years to match; write the names of the layers "
            "instead"
        )


def _are_few_layers(layers: Any) -> bool:
    try:
        return sum(end - start for start, end in layers) <= _MOST_LAYERS and all(start >= 0 for start, _ in layers)
    except (TypeError, ValueError):
        return False
