"""The environment of a run: versions, machine, command (with secrets redacted)."""

from __future__ import annotations

import platform
import re
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("sojourn", "torch", "transformers", "tokenizers", "safetensors", "numpy", "peft")


def describe_environment(device: str) -> dict[str, Any]:
    import torch

    gpu = {}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = {
            "gpu": properties.name,
            "gpu_memory": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return {
        "command": [redact_secret(arg) for arg in sys.argv],
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {name: version_of(name) for name in _PACKAGES},
        "device": device,
        **gpu,
    }


def device_name(device: str) -> str:
    """Two machines with the same name have the same memory: fallbacks are kept by it."""
    import torch

    return str(torch.cuda.get_device_name()) if device == "cuda" else device


@cache
def version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def redact_secret(arg: str) -> str:
    arg = re.sub(r"(?i)((?:token(?!izer)|key|secret|password)[^=]*=).+", r"\1…", arg)
    return re.sub(r"\b(hf_|sk-|ghp_)\w{8,}", r"\1…", arg)
