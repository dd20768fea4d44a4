"""llama.cpp behind the gateway, for GGUF files, which it computes in their own quantization.

With the package llama-cpp-python, the builtin engine schedules and samples, and llama.cpp computes: the API is whole.
Without it, a `llama-server` on PATH is proxied.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from sojourn.errors import UserError
from sojourn.infer.find import FoundModel
from sojourn.infer.runtimes import llamacpp_process
from sojourn.infer.runtimes.llamacpp import threads
from sojourn.infer.runtimes.server_process import ServerProcess
from sojourn.serve.engines.base import Engine, EngineInfo, EngineOptions
from sojourn.serve.engines.builtin import BuiltinEngine
from sojourn.serve.engines.builtin_process import ModelToServe
from sojourn.serve.engines.server_engine import ServerEngine
from sojourn.storage.gguf_header import check_gguf

_PROGRAM = "llama-server"
_MAX_REQUESTS = 8
_MOST_CONTEXT = 8192  # tokens a request of llama-server, unless --max-length says more: it allocates them at once
# OpenAI's defaults, where llama-server has others
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0, "repeat_last_n": -1}
_REFUSED = ("stop_token_ids", "echo", "text")


def cannot_serve(found: FoundModel, options: EngineOptions) -> str:
    """Empty, or why llama.cpp does not serve this here, and what would."""
    if found.path.suffix != ".gguf":
        return f"{found.path} is no GGUF file; make one: sojourn export … --to gguf, or try: --engine builtin"
    if options.quantization is not None:
        return "--quantize: a GGUF file has its quantization; make another one: sojourn export … --to gguf --quantize"
    if options.adapters:
        return "--adapter: llama.cpp has none here; try: --engine builtin"
    if llamacpp_process.find_python() is None and shutil.which(_PROGRAM) is None:
        return f"{llamacpp_process.unavailable()}; or put {_PROGRAM} on PATH"
    return ""


def make_engine(found: FoundModel, options: EngineOptions) -> Engine:
    if reason := cannot_serve(found, options):
        raise UserError(f"--engine llamacpp: {reason}")
    path = check_file(found.path)
    if llamacpp_process.find_python() is None:
        return LlamaServerEngine(path, options)
    settings = {"max_rows": options.max_requests, "context": options.max_length}
    return LlamaCppEngine(ModelToServe(str(path), options.device, None, settings, kind="llamacpp"))


def check_file(path: Path) -> Path:
    """Damage and files that are no model are named before anything is loaded."""
    if path.suffix != ".gguf":
        raise UserError(f"{path} is no GGUF file; make one: sojourn export … --to gguf")
    kind = check_gguf(path, weights=False).values.get("general.type")
    if kind == "adapter":
        raise UserError(f"{path}: an adapter, not a model; merge it first: sojourn merge")
    check_gguf(path)
    return path.resolve()


class LlamaCppEngine(BuiltinEngine):
    """With llama-cpp-python."""

    async def load_adapter(self, name: str, path: Path) -> None:
        raise UserError("--engine llamacpp has no adapters; try: --engine builtin")

    async def reload(self, path: Path) -> None:
        await super().reload(check_file(path))


class LlamaServerEngine(ServerEngine):
    title = _PROGRAM
    gauges = {  # noqa: RUF012
        "llamacpp:requests_processing": "running", "llamacpp:requests_deferred": "waiting",
    }  # fmt: skip

    def __init__(self, path: Path, options: EngineOptions) -> None:
        super().__init__(path)
        self._options, self._rows = options, options.max_requests or _MAX_REQUESTS

    def check_path(self, path: Path) -> Path:
        return check_file(path)

    def read_info(self, served: dict[str, Any]) -> EngineInfo:
        device = "cpu" if self._options.device == "cpu" else "as llama-server chooses"
        meta = served.get("meta") or {}
        return EngineInfo(
            str(self.path), self.path.parent, min(self._context, int(meta.get("n_ctx_train") or self._context)), 0,
            self._rows, device=device, dtype="as in the GGUF file",
        )  # fmt: skip

    @property
    def _context(self) -> int:
        values = check_gguf(self.path).values
        trained = int(values.get(f"{values['general.architecture']}.context_length") or _MOST_CONTEXT)
        return min(self._options.max_length or _MOST_CONTEXT, trained)

    def open_server(self) -> ServerProcess:
        def command(socket: Path) -> list[str]:
            layers = ["--n-gpu-layers", "0"] if self._options.device == "cpu" else []
            return [
                str(shutil.which(_PROGRAM)), "--model", str(self.path), "--host", str(socket), "--jinja", "--metrics",
                "--alias", self._options.name or self.path.stem, "--parallel", str(self._rows),
                "--ctx-size", str(self._context * self._rows), "--threads", str(threads()), *layers,
            ]  # fmt: skip

        return ServerProcess(self.title, command, dict(os.environ))

    def translate(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """In llama-server's names, with OpenAI's defaults. What it would ignore is refused."""
        for name in _REFUSED:
            if body.get(name):
                raise UserError(
                    f"{name}: {self.title} has no such parameter; leave it out, or install llama-cpp-python"
                )
        if (body.get("n") or 1) > 1:
            raise UserError(f"n: {self.title} gives one answer a request; ask several times")
        if isinstance(body.get("tool_choice"), dict):
            raise UserError(f"tool_choice: {self.title} takes none, auto or required")
        given = {**_DEFAULTS, **body}
        if "repetition_penalty" in body:
            given["repeat_penalty"] = given.pop("repetition_penalty")
        given["top_k"] = max(0, given["top_k"])
        return given
