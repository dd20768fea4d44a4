"""Which engine serves a model: `auto` takes the builtin one."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from sojourn.config.messages import did_you_mean
from sojourn.errors import UserError
from sojourn.infer.find import FoundModel
from sojourn.serve.engines.base import Engine

ENGINES = ("builtin", "vllm", "llamacpp")


@dataclass(frozen=True)
class EngineOptions:
    """As given on the command line. `name`: of the model in the API. `adapters`: paths by name."""

    engine: str = "auto"
    name: str | None = None
    checkpoint: str | None = None
    device: str = "auto"
    quantization: str | None = None
    max_length: int | None = None
    max_requests: int | None = None
    adapters: dict[str, str] = field(default_factory=dict)
    vllm_args: str = ""  # further ones of `vllm serve`


def open_engine(found: FoundModel, options: EngineOptions) -> Engine:
    """The engine, not started."""
    chosen = "builtin" if options.engine == "auto" else options.engine
    if chosen not in ENGINES:
        hint = did_you_mean(chosen, ("auto", *ENGINES))
        raise UserError(f"--engine {chosen}: no such engine{hint}; allowed: auto, {', '.join(ENGINES)}")
    try:
        module: Any = importlib.import_module(f"sojourn.serve.engines.{chosen}")
    except ModuleNotFoundError as error:
        if error.name != f"sojourn.serve.engines.{chosen}":
            raise
        raise UserError(f"--engine {chosen}: not in this version") from None
    engine: Engine = _BY_NAME[chosen](module, found, options)
    return engine


def _builtin(module: Any, found: FoundModel, options: EngineOptions) -> Any:
    if options.vllm_args:
        raise UserError("--vllm-args: for --engine vllm only")
    if (reason := _unsupported_reason(found)) is not None:
        other = "llamacpp" if found.path.suffix == ".gguf" else "vllm"
        raise UserError(f"{found.path}: the builtin engine cannot run it: {reason}; try: --engine {other}")
    given = {"max_rows": options.max_requests, "context": options.max_length, "quantization": options.quantization}
    settings = {key: value for key, value in given.items() if value is not None}
    return module.BuiltinEngine(str(found.path), options.device, None, settings)


def _unsupported_reason(found: FoundModel) -> str | None:
    """From config.json alone, before anything is loaded."""
    if not (found.path / "config.json").is_file():
        return None  # an adapter, a checkpoint or a GGUF file: the engine looks when it is loaded
    from transformers import AutoConfig

    from sojourn.infer.engine.decoder import config_unsupported_reason

    try:
        config = AutoConfig.from_pretrained(found.path, local_files_only=True)
    except (OSError, ValueError, KeyError, AttributeError):
        return None  # loading says what is wrong
    return config_unsupported_reason(config.get_text_config())


def _other(module: Any, found: FoundModel, options: EngineOptions) -> Any:
    return module.make_engine(found, options)


_BY_NAME = {"builtin": _builtin, "vllm": _other, "llamacpp": _other}
