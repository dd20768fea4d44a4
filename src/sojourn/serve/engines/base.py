"""What the gateway knows of an engine.

A `TokenEngine` takes token ids and gives token ids: the gateway renders chats, detokenizes, applies stop strings and
parses tool calls. A `ProxyEngine` is a server of its own that speaks OpenAI's API: the gateway forwards bodies to it
after authentication, limits and validation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from sojourn.infer.engine.request import Token

if TYPE_CHECKING:
    import httpx

    from sojourn.infer.sampling import SamplingParams

FinishReason = Literal["stop", "length", "error"]
GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]


@dataclass(frozen=True)
class EngineOptions:
    """As given on the command line. `name`: of the model in the API. `adapters`: paths by name. `kv_bytes`: of the
    builtin engine's KV cache; None: it decides. `models`: how many the server has."""

    engine: str = "auto"
    name: str | None = None
    checkpoint: str | None = None
    device: str = "auto"
    quantization: str | None = None
    max_length: int | None = None
    max_requests: int | None = None
    adapters: dict[str, str] = field(default_factory=dict)
    vllm_args: str = ""  # further ones of `vllm serve`
    kv_bytes: int | None = None
    models: int = 1


@dataclass(frozen=True)
class Grammar:
    """What the answer must match. `text`: a JSON schema, a regular expression or a Lark grammar, by `kind`."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence. Stop strings are the gateway's business: the engine knows stop tokens only.

    `key` decides what is drawn (`sampling.row_key`). `logprobs`: how many alternatives to give for each token; 0 gives
    the chosen token's only, None gives none. `prompt_logprobs` likewise, of the prompt's tokens.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    key: int
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    adapter: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


class Output(NamedTuple):
    """New tokens of one sequence; a stop token that ended it is the last one. The last output has a `finish_reason`.
    `cached_tokens`: of the prompt, from the prefix cache. `prompt_logprobs`: in the first output, one entry a prompt
    token, of which the first is None."""

    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[Token | None, ...] | None = None

    def then(self, later: Output) -> Output:
        """Both as one: what a busy gateway makes of outputs that wait."""
        return later._replace(
            tokens=self.tokens + later.tokens, cached_tokens=self.cached_tokens + later.cached_tokens,
            prompt_logprobs=self.prompt_logprobs or later.prompt_logprobs,
        )  # fmt: skip


@dataclass(frozen=True)
class EngineInfo:
    """`max_requests`: sequences that run at a time. `stop_ids`: the tokens that end an answer (`find_stop_ids`).
    `dtype` and `device` are for messages."""

    model: str
    tokenizer_folder: Path
    context_length: int
    vocab_size: int
    max_requests: int
    stop_ids: frozenset[int] = frozenset()
    adapters: tuple[str, ...] = ()
    device: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class EngineStats:
    """None: the engine does not say."""

    running: int | None = None
    waiting: int | None = None
    kv_used: int | None = None  # blocks
    kv_total: int | None = None
    prefix_hit_tokens: int | None = None
    preemptions: int | None = None


class TokenEngine(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    async def start(self) -> None:
        """Returns when requests are answered. Raises UserError or RunFailed where the model cannot be loaded."""

    async def close(self) -> None: ...

    async def restart(self) -> None:
        """After EngineDied: the same weights and adapters anew."""

    def submit(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        """Leaving the iterator (`aclose`, cancellation) frees the sequence's slot at once. Raises EngineDied where the
        engine is gone."""

    def why_dead(self) -> str:
        """Empty, or why its process is gone."""

    async def stats(self) -> EngineStats: ...

    async def load_adapter(self, name: str, path: Path) -> None:
        """Raises UserError where the adapter does not fit the model."""

    async def unload_adapter(self, name: str) -> None:
        """Sequences that use it end as they started."""

    async def reload(self, path: Path) -> None:
        """New requests are answered by the weights at `path` when this returns; sequences that were submitted before
        end as they started. Raises UserError, and goes on with the old weights, where the new ones do not fit."""


class ProxyEngine(Protocol):
    base_url: str  # of its API, with /v1

    def transport(self) -> httpx.AsyncHTTPTransport | None:
        """How to reach it, where it does not listen on the network."""

    @property
    def info(self) -> EngineInfo: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def restart(self) -> None: ...

    async def health(self) -> bool:
        """Whether it answers now; one that is busy may not."""

    def why_dead(self) -> str: ...

    def translate(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A request as its API takes it. Raises UserError where it cannot honour it."""

    async def stats(self) -> EngineStats: ...

    async def load_adapter(self, name: str, path: Path) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def reload(self, path: Path) -> None: ...


Engine = TokenEngine | ProxyEngine


class EngineDied(Exception):
    """The engine's process is gone; what ran in it is lost."""
