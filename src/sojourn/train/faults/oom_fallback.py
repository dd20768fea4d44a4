"""What a run does when memory runs out: one fallback after another. The result changes by rounding only.

The ladder: no CUDA graphs → smaller micro batch → selective, full, then offloaded activation checkpointing → chunked
loss → optimizer states in host memory. Fallbacks are kept in the run's ladder.json, so that the next call on the same
kind of device starts with them.
"""

from __future__ import annotations

import json
from typing import Any

from sojourn.config.renamed import current
from sojourn.config.schema import RunConfig
from sojourn.errors import RunFailed
from sojourn.resolve.activation_offload import offload_unsupported_reason
from sojourn.resolve.micro_batch import CHECKPOINTING
from sojourn.resolve.oom_fallback import is_fallback, saves_more_memory
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json, write_json


class OomFallback(Exception):
    """The run must be rebuilt with these settings; `clean`: no weight had changed when memory ran out."""

    def __init__(self, fallback: dict[str, Any], clean: bool) -> None:
        super().__init__(format_fallback(fallback))
        self.fallback, self.clean = fallback, clean


class NoFallbackLeft(RunFailed):
    """Memory ran out and no fallback is left."""

    def __init__(self, message: str, clean: bool) -> None:
        super().__init__(message)
        self.clean = clean


def next_fallback(
    config: RunConfig, in_optimizer_step: bool = False, has_cuda_graphs: bool = False
) -> dict[str, Any] | None:
    """The next fallback, as settings by key; None where none is left. `has_cuda_graphs`: captured graphs hold memory.

    In the optimizer step there are no activations to save: only optimizer states in host memory help there.
    """
    train = config.train
    accumulates = train.optimizer_in_backward == "off"
    if has_cuda_graphs:
        return {"train.cuda_graphs": "off"}
    offload = {"train.offload": "optimizer"} if train.optimizer == "adamw" and train.offload == "off" else None
    if in_optimizer_step and offload is not None:
        return offload
    micro = int(train.micro_batch)
    if micro > 1 and accumulates:
        return {"train.micro_batch": max(n for n in range(1, micro) if train.global_batch % n == 0)}
    order = CHECKPOINTING if train.device == "cuda" and not offload_unsupported_reason(config) else CHECKPOINTING[:-1]
    if train.activation_checkpointing in order[:-1]:
        return {"train.activation_checkpointing": order[order.index(train.activation_checkpointing) + 1]}
    if config.advanced.chunked_loss == "off":
        return {"advanced.chunked_loss": "on"}
    return offload


def format_fallback(fallback: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in fallback.items())


def save_fallback(run: RunFolder, fallback: dict[str, Any], device: str) -> None:
    """Adds a fallback to those in the run folder."""
    run.path.mkdir(parents=True, exist_ok=True)  # on a node without rank 0
    write_json(run.ladder, {"device": device, **load_fallbacks(run, device), **fallback})


def load_fallbacks(run: RunFolder, device: str) -> dict[str, Any]:
    """The fallbacks that this run took before on this kind of device."""
    found = read_json(run.ladder)
    if not isinstance(found, dict) or found.pop("device", None) != device:
        return {}
    settings: dict[str, Any] = {}
    for key, value in found.items():
        path, setting = current(tuple(key.split(".")) if "." in key else ("train", key), value)  # once without `train.`
        if is_fallback(name := ".".join(path), setting):
            settings[name] = setting
    return settings


def merge_fallbacks(per_rank: list[str]) -> dict[str, Any]:
    """Of the fallbacks of all ranks (as JSON), the settings that save most memory."""
    merged: dict[str, Any] = {}
    for fallbacks in map(json.loads, per_rank):
        merged.update({k: v for k, v in fallbacks.items() if k not in merged or saves_more_memory(k, v, merged[k])})
    return merged
