"""A GGUF file, and an adapter beside it, without llama.cpp: tokenizer and weights are read as llama.cpp would read
them, and computed by transformers in fp32. For machines where llama.cpp is not installed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.data.tokenize.gguf_pre_tokenizers import known
from sojourn.infer.gguf.chat import render_chat
from sojourn.infer.gguf.tokenizer import SENTENCEPIECE_MODEL, STOPS_BY_TEXT, GgufTokenizer
from sojourn.infer.gguf.weights import GgufWeights
from sojourn.infer.model_from_weights import build_model
from sojourn.infer.runtimes import llamacpp, transformers_runtime
from sojourn.infer.runtimes.base import Messages, Runtime, Tools
from sojourn.infer.runtimes.llamacpp import gguf_files
from sojourn.infer.runtimes.transformers_runtime import TransformersRuntime

if TYPE_CHECKING:
    import numpy as np


class GgufRuntime(Runtime):
    def __init__(self, path: Path, adapter: Path | None = None) -> None:
        self.name, self._has_adapter = "GGUF as llama.cpp reads it", adapter is not None
        self._weights = GgufWeights(path, adapter)
        self._metadata = self._weights.file.metadata
        self._tokenizer = GgufTokenizer(self._metadata)
        self._model: _Model | None = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids = self._tokenizer.encode(text)
        if not add_special_tokens:
            return ids
        before = [self._id("bos")] if self._adds("bos") else []
        return [*before, *ids, *([self._id("eos")] if self._adds("eos") else [])]

    def render(self, messages: Messages, tools: Tools | None = None, add_generation_prompt: bool = True) -> str | None:
        return render_chat(self._metadata, messages, tools, add_generation_prompt)

    def stops_at(self, token: int) -> bool | None:
        named = {self._metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
        return token in named or self._tokenizer.tokens[token] in STOPS_BY_TEXT

    def logits(self, ids: list[int]) -> np.ndarray | None:
        return self._opened().logits(ids)

    def greedy(self, ids: list[int], count: int) -> list[int] | None:
        return self._opened().greedy(ids, count)

    def weights(self) -> Iterable[tuple[str, Any]] | None:
        if self._has_adapter:
            return None
        return ((name, self._weights.load(name)) for name in self._weights.names())

    def close(self) -> None:
        self._model = None

    def _opened(self) -> _Model:
        if self._model is None:
            self._model = _Model(self._weights, self)
        return self._model

    def _id(self, name: str) -> int:
        return int(self._metadata[f"tokenizer.ggml.{name}_token_id"])

    def _adds(self, name: str) -> bool:
        found = self._metadata.get(f"tokenizer.ggml.add_{name}_token")
        if found is not None:
            return bool(found)
        pre = known(str(self._metadata.get("tokenizer.ggml.pre")))
        is_spm = self._metadata.get("tokenizer.ggml.model") == SENTENCEPIECE_MODEL
        return name == "bos" and (is_spm or (pre is not None and pre.adds_bos))


class _Model(TransformersRuntime):
    """transformers' model with the file's weights; the file says where generation stops."""

    def __init__(self, weights: GgufWeights, runtime: GgufRuntime) -> None:
        super().__init__(build_model(weights, weights.file.path.name), None)
        self._runtime = runtime

    def stops_at(self, token: int) -> bool:
        return bool(self._runtime.stops_at(token))


def unavailable() -> str:
    return ""


def refuses(path: Path) -> str:
    return llamacpp.refuses(path) or transformers_runtime.refuses(gguf_files(path)[0])


def open_model(path: Path) -> GgufRuntime:
    return GgufRuntime(*gguf_files(path))
