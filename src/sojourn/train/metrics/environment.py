"""What a run ran on: versions, machine, command. What looks like a secret in the command is hidden."""

from __future__ import annotations

import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("sojourn", "torch", "transformers", "tokenizers", "safetensors", "numpy", "peft")


def describe_environment(device: str) -> dict[str, Any]:
    import torch

    gpu = {}
    if device == "cuda":
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = {
            "gpu": facts.name,
            "gpu_memory": facts.total_memory,
            "capability": f"{facts.major}.{facts.minor}",
            "cuda": torch.version.cuda,
        }
    return {
        "command": [redact_secret(word) for word in sys.argv],
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {name: version_of(name) for name in _PACKAGES},
        "device": device,
        **gpu,
    }


def device_name(device: str) -> str:
    """What must be the same for two machines to have as much memory."""
    import torch

    return str(torch.cuda.get_device_name()) if device == "cuda" else device


def version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def redact_secret(word: str) -> str:
    word = re.sub(r"(?i)((?:token|key|secret|password)[^=]*=).+", r"\1…", word)
    return re.sub(r"\b(hf_|sk-|ghp_)\w{8,}", r"\1…", word)
