"""vLLM behind the gateway, in an environment of its own (`sojourn install vllm`). For more than one GPU, and for models
that the builtin engine does not compute."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.infer.find import MODEL_FILES, FoundModel, adapter_folder
from sojourn.infer.runtimes.managed_environment import VLLM, has_gpu
from sojourn.infer.runtimes.vllm import refuses, serve_arguments
from sojourn.serve.engines.base import EngineInfo
from sojourn.serve.engines.server_engine import ServerEngine

if TYPE_CHECKING:
    from sojourn.infer.runtimes.vllm_server import VllmServer
    from sojourn.serve.engines.base import EngineOptions

_QUANTIZATIONS = {"fp8": "fp8", "nf4": "bitsandbytes"}
_MAX_REQUESTS = 256
_GPU_SHARE = 0.9  # of all models together: vLLM's default for one


def make_engine(found: FoundModel, options: EngineOptions) -> VllmEngine:
    """Refuses what vLLM cannot open before anything is loaded."""
    if reason := VLLM.why_unavailable():
        raise UserError(f"--engine vllm: {reason}")
    if options.quantization is not None and options.quantization not in _QUANTIZATIONS:
        raise UserError(f"--quantize {options.quantization}: vLLM has {', '.join(_QUANTIZATIONS)}")
    return VllmEngine(_check_folder(found.path), options)


def _check_folder(path: Path) -> Path:
    if path.suffix == ".gguf":
        raise UserError(f"--engine vllm: {path} is a GGUF file; try: --engine llamacpp")
    folder = path.resolve()
    if not any((folder / name).is_file() for name in MODEL_FILES):
        raise UserError(f"--engine vllm: {path} is no folder that vLLM opens; type: sojourn export … --to vllm")
    if reason := refuses(folder):
        raise UserError(f"--engine vllm: {reason}; try: --engine builtin")
    return folder


class VllmEngine(ServerEngine):
    title = "vLLM"
    gauges = {  # noqa: RUF012
        "vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting",
        "vllm:prefix_cache_hits_total": "prefix_hit_tokens", "vllm:num_preemptions_total": "preemptions",
    }  # fmt: skip

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        super().__init__(folder)
        self._options = options
        self._adapters = {name: str(adapter_folder(path)) for name, path in options.adapters.items()}

    def check_path(self, path: Path) -> Path:
        return _check_folder(path)

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, adapters=tuple(self._adapters))

    def read_info(self, served: dict[str, Any]) -> EngineInfo:
        return EngineInfo(
            self._name, Path(serve_arguments(self.path, self._name)[0]), int(served["max_model_len"]), 0,
            self._options.max_requests or _MAX_REQUESTS, device="cuda" if has_gpu() else "cpu", dtype="vLLM's",
        )  # fmt: skip

    @property
    def _name(self) -> str:
        return self._options.name or self.path.name

    def open_server(self) -> VllmServer:
        from sojourn.infer.runtimes.vllm_server import VllmServer

        options = self._options
        arguments = serve_arguments(self.path, self._name)
        limits = {"--max-model-len": options.max_length, "--max-num-seqs": options.max_requests}
        arguments += [word for key, value in limits.items() if value is not None for word in (key, str(value))]
        if options.quantization is not None:
            arguments += ["--quantization", _QUANTIZATIONS[options.quantization]]
        if self._adapters:
            loras = [f"{name}={path}" for name, path in self._adapters.items()]
            arguments += [*(() if "--enable-lora" in arguments else ("--enable-lora",)), "--lora-modules", *loras]
        if options.models > 1 and has_gpu() and "gpu-memory-utilization" not in options.vllm_args:
            arguments += ["--gpu-memory-utilization", f"{_GPU_SHARE / options.models:.2f}"]
        if (gpus := _gpus()) > 1 and "tensor-parallel-size" not in options.vllm_args:
            arguments += ["--tensor-parallel-size", str(gpus)]
        return VllmServer([*arguments, *shlex.split(options.vllm_args)], eager=not has_gpu(), runtime_lora=True)

    async def load_adapter(self, name: str, path: Path) -> None:
        if not self._adapters:
            raise UserError("vLLM must be started with an adapter to load others: sojourn serve … --adapter NAME=PATH")
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path.resolve())})
        self._adapters[name] = str(path)

    async def unload_adapter(self, name: str) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})
        self._adapters.pop(name, None)

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        await asyncio.to_thread(self.running.post, path, body)


def _gpus() -> int:
    import torch

    return int(torch.cuda.device_count())
