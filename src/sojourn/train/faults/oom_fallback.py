"""What a run gives up, one rung at a time, when memory runs out. Nothing of the result changes but rounding.

Recordings → fewer rows at a time → selective, then full recomputation → the loss in chunks → the optimizer's moments in
the host's memory. The rung is kept in the run's folder, so that the next call on the same kind of device starts on it.
"""

from __future__ import annotations

import gc
import json
from typing import Any

from sojourn.config.renamed import current
from sojourn.config.schema import RunConfig
from sojourn.errors import RunFailed
from sojourn.resolve.oom_fallback import MEMORY_SAVING, saves_more_memory
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json, write_json

_WORDS = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class OomFallback(Exception):
    """The run must be built anew with these settings; `clean`: no weight had been touched when memory ran out."""

    def __init__(self, fallback: dict[str, Any], clean: bool) -> None:
        super().__init__(format_fallback(fallback))
        self.fallback, self.clean = fallback, clean


class NoFallbackLeft(RunFailed):
    """Nothing is left to give up."""

    def __init__(self, says: str, clean: bool) -> None:
        super().__init__(says)
        self.clean = clean


def is_oom(error: BaseException) -> bool:
    """Torch's own error, or one of those of the libraries below it."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word.lower() in str(error).lower() for word in _WORDS)


def next_fallback(config: RunConfig, in_update: bool = False, recorded: bool = False) -> dict[str, Any] | None:
    """What to give up next, by key; None where nothing is left. `recorded`: recordings hold memory.

    In the update no activations are left to save: moments in the host's memory are what helps there.
    """
    train = config.train
    if recorded:
        return {"train.cuda_graphs": "off"}
    offload = {"train.offload": "optimizer"} if train.optimizer == "adamw" and train.offload == "off" else None
    if in_update and offload is not None:
        return offload
    micro = int(train.micro_batch)
    if micro > 1:
        return {"train.micro_batch": max(n for n in range(1, micro) if train.global_batch % n == 0)}
    if train.activation_checkpointing != "full":
        return {
            "train.activation_checkpointing": "full" if train.activation_checkpointing == "selective" else "selective"
        }
    if config.advanced.chunked_loss == "off":
        return {"advanced.chunked_loss": "on"}
    return offload


def format_fallback(rung: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in rung.items())


def save_fallback(run: RunFolder, rung: dict[str, Any], device: str) -> None:
    """Adds a rung to those of earlier times."""
    run.path.mkdir(parents=True, exist_ok=True)  # on a machine that does not write the run itself
    write_json(run.ladder, {"device": device, **load_fallbacks(run, device), **rung})


def load_fallbacks(run: RunFolder, device: str) -> dict[str, Any]:
    """The settings that memory forced on this run, on this kind of device."""
    found = read_json(run.ladder)
    if not isinstance(found, dict) or found.pop("device", None) != device:
        return {}
    settings: dict[str, Any] = {}
    for key, value in found.items():
        path, setting = current(tuple(key.split(".")) if "." in key else ("train", key), value)  # once without `train.`
        if (name := ".".join(path)) in MEMORY_SAVING:
            settings[name] = setting
    return settings


def merge_fallbacks(several: list[str]) -> dict[str, Any]:
    """Of what the ranks remember (as JSON), whatever saves most."""
    rung: dict[str, Any] = {}
    for found in map(json.loads, several):
        rung.update({k: v for k, v in found.items() if k not in rung or saves_more_memory(k, v, rung[k])})
    return rung


def free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
