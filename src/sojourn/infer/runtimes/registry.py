"""The runtimes by name. Their modules are imported when they are asked for."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sojourn.infer.runtimes.base import Runtime

_MODULES = {
    "transformers": "transformers_runtime",
    "streamed": "streamed_runtime",
    "llamacpp": "llamacpp",
    "gguf": "gguf_runtime",
    "onnxruntime": "onnx_runtime",
    "mlx": "mlx_runtime",
    "vllm": "vllm",
}


def runtime_names() -> list[str]:
    return list(_MODULES)


def available(name: str) -> str:
    """Empty, or why this runtime cannot run here and what to type."""
    if find_spec(_module_name(name)) is None:
        return f"{name} is not part of this version"
    return str(_module(name).unavailable())


def refusal(name: str, path: Path) -> str:
    """Empty, or why this runtime would not open this model on this machine."""
    check = getattr(_module(name), "refuses", None)
    return str(check(path)) if check is not None else ""


def open_runtime(name: str, path: Path, trust_remote_code: bool = False) -> Runtime:
    """`trust_remote_code`: only transformers runs a model's own Python code."""
    allowed = {"trust_remote_code": True} if trust_remote_code and name == "transformers" else {}
    opened: Runtime = _module(name).open_model(path, **allowed)
    return opened


def _module_name(name: str) -> str:
    return f"{__package__}.{_MODULES[name]}"


def _module(name: str) -> Any:
    return import_module(_module_name(name))
