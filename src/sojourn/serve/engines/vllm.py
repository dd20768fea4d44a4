"""vLLM behind the gateway: its own server as a child process on a Unix socket, in an environment of its own
(`sojourn install vllm`). For more than one GPU, and for models that the builtin engine does not compute."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import RunFailed, UserError
from sojourn.infer.find import FoundModel
from sojourn.infer.runtimes.managed_environment import VLLM, has_gpu
from sojourn.infer.runtimes.vllm import refuses, serve_arguments
from sojourn.serve.engines.base import EngineInfo, EngineStats

if TYPE_CHECKING:
    import httpx

    from sojourn.infer.runtimes.vllm_server import VllmServer
    from sojourn.serve.engines.choose import EngineOptions

_QUANTIZATIONS = {"fp8": "fp8", "nf4": "bitsandbytes"}
_MAX_REQUESTS = 256


def make_engine(found: FoundModel, options: EngineOptions) -> VllmEngine:
    """Refuses what vLLM cannot open before anything is loaded."""
    if reason := VLLM.why_unavailable():
        raise UserError(f"--engine vllm: {reason}")
    folder = found.path.resolve()
    if found.is_checkpoint or folder.suffix == ".gguf":
        raise UserError(f"--engine vllm: {found.path} is no folder that vLLM opens; type: sojourn export … --to vllm")
    if reason := refuses(folder):
        raise UserError(f"--engine vllm: {reason}; try: --engine builtin")
    if options.quantization is not None and options.quantization not in _QUANTIZATIONS:
        raise UserError(f"--quantize {options.quantization}: vLLM has {', '.join(_QUANTIZATIONS)}")
    return VllmEngine(folder, options)


class VllmEngine:
    base_url = "http://vllm/v1"

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        self._folder, self._options = folder, options
        self._server: VllmServer | None = None
        self._adapters = dict(options.adapters)
        self._info: EngineInfo | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise RunFailed("vLLM is not started")
        return replace(self._info, adapters=tuple(self._adapters))

    def transport(self) -> httpx.AsyncHTTPTransport:
        """How the gateway reaches it."""
        import httpx

        return httpx.AsyncHTTPTransport(uds=str(self._running().socket))

    def _running(self) -> VllmServer:
        if self._server is None:
            raise RunFailed("vLLM is not started")
        return self._server

    async def start(self) -> None:
        self._server = await asyncio.to_thread(self._open)
        (served, *_) = (await asyncio.to_thread(self._server.get, "/v1/models"))["data"]
        self._info = EngineInfo(
            self._name, Path(serve_arguments(self._folder, self._name)[0]), int(served["max_model_len"]), 0,
            self._options.max_requests or _MAX_REQUESTS, device="cuda" if has_gpu() else "cpu", dtype="vLLM's",
        )  # fmt: skip

    @property
    def _name(self) -> str:
        return self._options.name or self._folder.name

    def _open(self) -> VllmServer:
        from sojourn.infer.runtimes.vllm_server import VllmServer

        options = self._options
        arguments = serve_arguments(self._folder, self._name)
        limits = {"--max-model-len": options.max_length, "--max-num-seqs": options.max_requests}
        arguments += [word for key, value in limits.items() if value is not None for word in (key, str(value))]
        if options.quantization is not None:
            arguments += ["--quantization", _QUANTIZATIONS[options.quantization]]
        if self._adapters:
            loras = [f"{name}={Path(path).resolve()}" for name, path in self._adapters.items()]
            arguments += [*(() if "--enable-lora" in arguments else ("--enable-lora",)), "--lora-modules", *loras]
        if (gpus := _gpus()) > 1 and "tensor-parallel-size" not in options.vllm_args:
            arguments += ["--tensor-parallel-size", str(gpus)]
        return VllmServer([*arguments, *shlex.split(options.vllm_args)], eager=not has_gpu(), runtime_lora=True)

    async def health(self) -> bool:
        return self._server is not None and await asyncio.to_thread(self._server.is_healthy)

    async def restart(self) -> None:
        await self.close()
        await self.start()

    async def close(self) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
            self._server = None

    def stats(self) -> EngineStats:
        return EngineStats()

    async def load_adapter(self, name: str, path: Path) -> None:
        if not self._adapters:
            raise UserError("vLLM must be started with an adapter to load others: sojourn serve … --adapter NAME=PATH")
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path.resolve())})
        self._adapters[name] = str(path)

    async def unload_adapter(self, name: str) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})
        self._adapters.pop(name, None)

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        await asyncio.to_thread(self._running().post, path, body)

    async def reload(self, path: Path) -> None:
        raise UserError("--engine vllm: it fills the GPU's memory, so other weights need a new start of the server")


def _gpus() -> int:
    import torch

    return int(torch.cuda.device_count())
