"""vLLM as a runtime: its server in a child process, asked over HTTP. A merged folder, or an adapter on its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sojourn.errors import UserError
from sojourn.infer.runtimes.base import Messages, Runtime, Tools
from sojourn.infer.runtimes.managed_environment import VLLM, has_gpu
from sojourn.infer.runtimes.vllm_server import VllmServer
from sojourn.model.adapter_check import ADAPTER_FILE
from sojourn.run.moved_paths import path_here
from sojourn.storage.files import read_json_object

_MOST_CONTEXT = 4096
_MOST_LOGPROBS = 256
_NAME = "model"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank takes
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of its attention on a CPU
DEFAULT_RANK = 16  # without --max-lora-rank
_PLAIN: dict[str, Any] = {  # greedy, whatever generation_config.json says
    "model": _NAME, "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1,
    "presence_penalty": 0, "frequency_penalty": 0, "return_token_ids": True,
}  # fmt: skip


class VllmRuntime(Runtime):
    name = "vllm"

    def __init__(self, server: VllmServer) -> None:
        self._server = server

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        body = {"model": _NAME, "prompt": text, "add_special_tokens": add_special_tokens}
        ids: list[int] = self._server.post("/tokenize", body)["tokens"]
        return ids

    def render_ids(
        self, messages: Messages, tools: Tools | None = None, add_generation_prompt: bool = True
    ) -> list[int] | None:
        body: dict[str, Any] = {
            "model": _NAME, "messages": messages, "add_generation_prompt": add_generation_prompt,
            "add_special_tokens": False,
        }  # fmt: skip
        try:
            ids: list[int] = self._server.post("/tokenize", {**body, **({"tools": tools} if tools else {})})["tokens"]
        except UserError as error:
            raise ValueError(str(error)) from None
        return ids

    def stops_at(self, token: int) -> bool:
        """Asked by making this token the likeliest."""
        body = {**_PLAIN, "prompt": [token], "max_tokens": 2, "logit_bias": {str(token): 100}}
        return bool(self._complete(body)["finish_reason"] == "stop")

    def top_logprobs(self, ids: list[int], count: int) -> list[dict[int, float]] | None:
        """vLLM gives what each token of the prompt follows from, so one more is sent."""
        body = {**_PLAIN, "prompt": [*ids, ids[-1]], "max_tokens": 1, "prompt_logprobs": min(count, _MOST_LOGPROBS)}
        rows = self._complete(body)["prompt_logprobs"]
        return [{int(token): facts["logprob"] for token, facts in (row or {}).items()} for row in rows[1:]]

    def greedy(self, ids: list[int], count: int) -> list[int] | None:
        tokens: list[int] = self._complete({**_PLAIN, "prompt": ids, "max_tokens": count})["token_ids"]
        return tokens

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = self._server.post("/v1/completions", body)["choices"][0]
        return choice

    def close(self) -> None:
        self._server.close()


def unavailable() -> str:
    return VLLM.why_unavailable()


def open_model(path: Path) -> VllmRuntime:
    folder = path.resolve()
    model, *rest = serve_arguments(folder, _NAME)
    context = read_json_object(Path(model) / "config.json").get("max_position_embeddings") or _MOST_CONTEXT
    limits = ["--max-model-len", str(min(int(context), _MOST_CONTEXT)), "--max-logprobs", str(_MOST_LOGPROBS)]
    return VllmRuntime(VllmServer([model, *rest, *limits]))


def refuses(path: Path) -> str:
    """Empty, or why vLLM on this machine cannot open such a model."""
    config = read_json_object(Path(serve_arguments(path, _NAME)[0]) / "config.json")
    size = head_size(config)
    if not has_gpu() and "quantization_config" in config:
        return "its weights are quantized, which are replayed in vLLM on a GPU only"
    if has_gpu() or size == 0 or size in CPU_HEAD_SIZES:
        return ""
    return f"head_dim is {size}, which vLLM takes on a GPU only"


def head_size(config: dict[str, Any]) -> int:
    """0 where config.json does not tell."""
    text = config.get("text_config") or config
    if text.get("head_dim"):
        return int(text["head_dim"])
    width, heads = (
        text.get(key) or text.get(old) for key, old in (("hidden_size", "n_embd"), ("num_attention_heads", "n_head"))
    )
    return int(width) // int(heads) if width and heads else 0


def serve_arguments(folder: Path, name: str) -> list[str]:
    """Of `vllm serve`, for a merged folder, or for an adapter on the base that it names."""
    if not (folder / ADAPTER_FILE).is_file():
        return [str(folder), "--served-model-name", name]
    adapter = read_json_object(folder / ADAPTER_FILE)
    base = path_here(str(adapter.get("base_model_name_or_path")), folder)
    given = [base, "--enable-lora", "--lora-modules", f"{name}={folder}"]
    rank = lora_rank(adapter)
    if rank > DEFAULT_RANK:
        given += ["--max-lora-rank", str(max_lora_rank(rank))]
    if (folder / "tokenizer_config.json").is_file():
        given += ["--tokenizer", str(folder)]
    if (folder / "generation_config.json").is_file():
        given += ["--generation-config", str(folder)]
    return given


def lora_rank(adapter: dict[str, Any]) -> int:
    """The largest of its layers."""
    return max(int(adapter.get("r") or 0), *map(int, (adapter.get("rank_pattern") or {"": 0}).values()))


def max_lora_rank(rank: int) -> int | None:
    """The smallest --max-lora-rank that takes it; None where there is none."""
    return next((one for one in _RANKS if one >= rank), None)
