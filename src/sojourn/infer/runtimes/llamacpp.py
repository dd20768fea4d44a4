"""llama.cpp as a runtime: a GGUF file, or a folder with one, and an adapter beside it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.infer.gguf.chat import render_chat
from sojourn.infer.gguf.file import GgufFile
from sojourn.infer.gguf.weights import GgufWeights
from sojourn.infer.runtimes import llamacpp_process
from sojourn.infer.runtimes.base import Messages, Runtime, Tools
from sojourn.infer.runtimes.llamacpp_process import LlamaCpp

if TYPE_CHECKING:
    import numpy as np

_MOST_THREADS = 16


class LlamaCppRuntime(Runtime):
    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        self.name, self._path, self._adapter = "llama.cpp", model, adapter
        self._metadata = GgufFile(model).metadata
        self._child = LlamaCpp(model.name)
        try:
            lora = {} if adapter is None else {"lora": str(adapter)}
            opened = self._child.ask("open", path=str(model), threads=threads(), **lora)
        except BaseException:
            self._child.close()
            raise
        self._vocabulary = int(opened["vocabulary"])

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self._child.ask("encode", text=text, add_special=add_special_tokens)["ids"])

    def render(self, messages: Messages, tools: Tools | None = None, add_generation_prompt: bool = True) -> str | None:
        """The template in the file; llama.cpp's own Jinja is in its programs, not in its library."""
        return render_chat(self._metadata, messages, tools, add_generation_prompt)

    def stops_at(self, token: int) -> bool | None:
        return bool(self._child.ask("is_stop", token=token)["stops"])

    def logits(self, ids: list[int]) -> np.ndarray | None:
        import numpy

        with tempfile.TemporaryDirectory(prefix="sojourn-") as folder:
            path = Path(folder) / "logits"
            self._child.ask("logits", ids=ids, path=str(path))
            return numpy.fromfile(path, numpy.float32).reshape(len(ids), self._vocabulary)

    def greedy(self, ids: list[int], count: int) -> list[int] | None:
        return list(self._child.ask("greedy", ids=ids, count=count)["ids"])

    def weights(self) -> Iterable[tuple[str, Any]] | None:
        if self._adapter is not None:
            return None
        weights = GgufWeights(self._path)
        return ((name, weights.load(name)) for name in weights.names())

    def close(self) -> None:
        self._child.close()


def threads() -> int:
    """As many as OMP_NUM_THREADS allows; on a busy machine llama.cpp's threads mostly wait for each other."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdecimal() and int(named) > 0:
        return int(named)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, _MOST_THREADS)


def unavailable() -> str:
    return llamacpp_process.unavailable()


def refuses(path: Path) -> str:
    """An adapter can be replayed only beside its base."""
    try:
        gguf_files(path)
    except UserError as error:
        return str(error).removeprefix(f"{path}: ")
    return ""


def open_model(path: Path) -> LlamaCppRuntime:
    return LlamaCppRuntime(*gguf_files(path))


def gguf_files(path: Path) -> tuple[Path, Path | None]:
    """The model, and the adapter if the folder has one too."""
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    kinds: dict[str, list[Path]] = {"model": [], "adapter": []}
    for file in files:
        kinds.setdefault(str(GgufFile(file)["general.type"] or "model"), []).append(file)
    if kinds["adapter"] and not kinds["model"]:
        raise UserError(f"{path}: an adapter alone; to replay it, put the base's GGUF file beside it")
    if len(kinds["model"]) != 1 or len(kinds["adapter"]) > 1:
        raise UserError(f"{path}: it has {len(kinds['model'])} GGUF models; name the one to open")
    return kinds["model"][0], next(iter(kinds["adapter"]), None)
