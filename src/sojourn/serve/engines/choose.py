"""Which engine serves a model, and what keeps an engine from it, known before anything is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sojourn.config.messages import did_you_mean
from sojourn.errors import UserError
from sojourn.infer.find import FoundModel
from sojourn.serve.engines.base import Engine, EngineOptions

ENGINES = ("builtin", "vllm", "llamacpp")


def choose_engine(found: FoundModel, options: EngineOptions) -> str:
    """`auto`: llama.cpp for a GGUF file, where it is installed and can do what is asked; else the builtin engine."""
    if options.engine == "auto":
        from sojourn.serve.engines.llamacpp import cannot_serve

        return "builtin" if found.path.suffix != ".gguf" or cannot_serve(found, options) else "llamacpp"
    if options.engine not in ENGINES:
        hint = did_you_mean(options.engine, ("auto", *ENGINES))
        raise UserError(f"--engine {options.engine}: no such engine{hint}; allowed: auto, {', '.join(ENGINES)}")
    return options.engine


def open_engine(found: FoundModel, options: EngineOptions) -> Engine:
    """The engine, not started. `options.engine`: from `choose_engine`."""
    if options.vllm_args and options.engine != "vllm":
        raise UserError("--vllm-args: for --engine vllm only")
    make: Callable[[FoundModel, EngineOptions], Engine] = _make_builtin
    if options.engine != "builtin":
        make = importlib.import_module(f"sojourn.serve.engines.{options.engine}").make_engine
    return make(found, options)


def _make_builtin(found: FoundModel, options: EngineOptions) -> Any:
    from sojourn.serve.engines.builtin import BuiltinEngine
    from sojourn.serve.engines.builtin_process import ModelToServe

    if (reason := _unsupported_reason(found)) is not None:
        other = "llamacpp" if found.path.suffix == ".gguf" else "vllm"
        raise UserError(f"{found.path}: the builtin engine cannot run it: {reason}; try: --engine {other}")
    given = {
        "max_rows": options.max_requests, "context": options.max_length, "quantization": options.quantization,
        "kv_bytes": options.kv_bytes,
    }  # fmt: skip
    settings = {key: value for key, value in given.items() if value is not None}
    return BuiltinEngine(ModelToServe(str(found.path), options.device, None, settings))


def _gguf_settings(path: Path) -> dict[str, Any]:
    from sojourn.infer.gguf.config import config_of
    from sojourn.infer.gguf.file import GgufFile

    file = GgufFile(path)
    settings = config_of(file)
    if "rope_factors_long.weight" not in file.tensors:
        del settings["rope_parameters"]  # one set of factors is not length-dependent, whatever it is called
    return settings


def _unsupported_reason(found: FoundModel) -> str | None:
    """From the settings alone."""
    from transformers import AutoConfig

    from sojourn.infer.read_decoder import config_unsupported_reason

    try:
        if found.path.suffix == ".gguf":
            config = AutoConfig.for_model(**_gguf_settings(found.path))
        elif (found.path / "config.json").is_file():
            config = AutoConfig.from_pretrained(found.path, local_files_only=True)
        else:
            return None  # an adapter or a checkpoint: the engine looks when it is loaded
    except UserError as error:
        return str(error).removeprefix(f"{found.path}: ")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None  # loading says what is wrong
    return config_unsupported_reason(config.get_text_config())
