"""Resuming a run with another configuration: changes that keep the result are logged, others are refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sojourn.config.load import dump
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json_object

# Sections that decide the result. The rest (where and when to save, micro-batching) may change freely.
_DECISIVE = ("model", "method", "train")  # data is identified by the hash of its prepared artefact
_MODELS = {"model.base": "base", "method.adapter": "adapter"}  # settings that name one: its key in environment.json
_HARMLESS = {
    f"train.{key}"
    for key in (
        "micro_batch",
        "device",
        "precision",
        "attention",
        "activation_checkpointing",
        "fp8",
        "compile",
        "cuda_graphs",
        "offload",
        "optimizer_in_backward",
        "eval_every",
        "eval_rows",
        "samples",
        "sample_tokens",
        "patience",
        "rehearse",
        "deterministic",
        "on_nan",
        "on_spike",
        "max_bad_steps",
    )
}


# With another value the checkpoint's weights do not fit.
_SHAPES = (
    *(f"model.{key}" for key in ("params", "depth", "d_model", "num_layers", "num_heads", "num_kv_heads", "ffn_size",
                                 "tie_embeddings")),
    *(f"method.{key}" for key in ("kind", "rank", "targets", "dora", "modules_to_save")),
)  # fmt: skip


def refuse_harmful_changes(started_with: RunConfig, config: RunConfig, run: RunFolder) -> None:
    harmful = harmful_changes(started_with, config, run)
    if harmful:
        raise UserError(
            f"{run.path} was started with other settings ({harmful}); restore them to resume it, or "
            + another_run(config, fits_weights=not any(f"{key} was" in harmful for key in _SHAPES))
        )
    for key, (old, new) in _changes(started_with, config).items():
        run.event("config_changed", key=key, before=old, now=new)


def another_run(config: RunConfig, fits_weights: bool) -> str:
    """What to type for a run with the new settings. `fits_weights`: it can start from the old one's checkpoint."""
    if fits_weights:
        return "continue with the new ones from its last checkpoint: --fork NEWNAME"
    new = "name=NEWNAME" if config.save.folder is None else "save.folder=NEWFOLDER"
    return f"start another run with the new ones: {new}"


def harmful_changes(started_with: RunConfig, config: RunConfig, run: RunFolder) -> str:
    """The first changes that would change the numbers, as text; empty where there are none."""
    return _describe_harmful(_changes(started_with, config), config, run)


def decisive_differences(started_with: RunConfig, config: RunConfig, run: RunFolder) -> str:
    """The same for a configuration as typed, of which `auto` may become anything."""
    now = flatten(dump(config))
    changed = {key: change for key, change in _changes(started_with, config).items() if now.get(key) != "auto"}
    return _describe_harmful(changed, config, run)


def data_section(config: RunConfig) -> dict[str, Any]:
    """Without what does not change the data."""
    return {key: value for key, value in dump(config)["data"].items() if key != "workers"}


def _describe_harmful(changed: dict[str, tuple[Any, Any]], config: RunConfig, run: RunFolder) -> str:
    known = read_json_object(run.environment)
    moved = {key for key, name in _MODELS.items() if name in known and model_fingerprint(config, key) == known[name]}
    harmful = [key for key in changed if key.split(".")[0] in _DECISIVE and key not in _HARMLESS | moved]
    return "; ".join(f"{key} was {changed[key][0]}, now {changed[key][1]}" for key in harmful[:3])


def _changes(started_with: RunConfig, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    before, now = flatten(dump(started_with)), flatten(dump(config))
    return {
        key: (before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) not in (now.get(key), "auto")
    }


def settings_hash(config: RunConfig, artefact_hash: str) -> str:
    """Of everything that decides the numbers: equal for the same run on any machine. Defaults are left out, so that a
    new key does not change it."""
    sections = config.model_dump(mode="json", include=set(_DECISIVE), exclude_defaults=True)
    decisive = {key: value for key, value in flatten(sections).items() if key not in _HARMLESS | _MODELS.keys()}
    adapter = model_fingerprint(config, "method.adapter")
    facts = [sorted(decisive.items()), model_fingerprint(config, "model.base"), artefact_hash]
    facts += [adapter] if adapter is not None else []
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def requests_no_change(started_with: RunConfig, config: RunConfig) -> bool:
    """Whether a configuration as typed equals the resolved one that the run was started with."""
    before, now = flatten(dump(started_with)), flatten(dump(config))
    return all(value in ("auto", before.get(key)) for key, value in now.items())


def model_fingerprints(config: RunConfig) -> dict[str, str | None]:
    """For environment.json: a run whose models lie elsewhere is the same run."""
    return {name: model_fingerprint(config, key) for key, name in _MODELS.items()}


def model_fingerprint(config: RunConfig, key: str) -> str | None:
    """Identifies a model or an adapter wherever it is stored: its configuration and its files' names and sizes."""
    given = config.model.base if key == "model.base" else config.method.adapter
    if given is None or not Path(given).exists():
        return given
    path, digest = Path(given), hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.suffix in (".safetensors", ".bin", ".gguf"):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        elif file.name in ("config.json", "adapter_config.json"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    if not isinstance(values, dict):
        return {prefix: values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else key))
    return flat
