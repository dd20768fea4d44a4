"""vLLM's own server as a child process."""

from __future__ import annotations

from pathlib import Path

from sojourn.infer.runtimes.managed_environment import VLLM, clean_environment, has_gpu
from sojourn.infer.runtimes.server_process import ServerProcess


class VllmServer(ServerProcess):
    """`arguments`: of `vllm serve`, beginning with the model. `eager`: without CUDA graphs, which start slowly.
    `runtime_lora`: adapters may be loaded later."""

    def __init__(self, arguments: list[str], eager: bool = True, runtime_lora: bool = False) -> None:
        environment, extra = clean_environment(), ["--enforce-eager"] if eager else []
        if runtime_lora:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        if not has_gpu():
            extra += ["--dtype", "float32"]
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        model, *rest = arguments

        def command(socket: Path) -> list[str]:
            start = [str(VLLM.python()), "-m", "vllm.entrypoints.openai.api_server"]
            return [*start, "--model", model, "--uds", str(socket), *rest, *extra]

        super().__init__("vLLM", command, environment)
