"""What all routes share: the engine, its model, limits, metrics and the log; how it starts, reloads and ends."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.errors import UserError
from sojourn.infer.grammar import check_grammar
from sojourn.infer.sampling import SamplingParams
from sojourn.serve.auth import ApiKey, KeyRing
from sojourn.serve.engines.base import Engine, GenerationRequest, Grammar, ProxyEngine, TokenEngine
from sojourn.serve.errors import ApiError, bad_request, model_not_found
from sojourn.serve.feedback import FeedbackFolder
from sojourn.serve.generation import Generation, Plan
from sojourn.serve.lifecycle import Lifecycle
from sojourn.serve.limits import Admission
from sojourn.serve.metrics import Metrics
from sojourn.serve.request_log import RequestLog
from sojourn.serve.served_model import ServedModel
from sojourn.serve.settings import Settings


@dataclass
class Record:
    """What the log has of a request."""

    id: str
    key: ApiKey
    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    first_token_seconds: float | None = None
    finish_reason: str | None = None
    user: str | None = None
    prompt: Any = None  # with --log-prompts


class Gateway:
    """`name`: of the model in the API. `source`: what the server was asked to serve; a reload without a name opens it
    again. `adapters`: paths of those to load at the start, by name. `feedback`: None keeps none."""

    def __init__(
        self, engine: Engine, settings: Settings, keys: KeyRing, log: RequestLog, name: str,
        source: str = "", adapters: Mapping[str, str] | None = None, feedback: FeedbackFolder | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.settings, self.keys, self.log, self.source = engine, settings, keys, log, source
        self.name, self._adapters, self.feedback = name, dict(adapters or {}), feedback
        self.metrics, self.lifecycle = Metrics(), Lifecycle(settings.request_seconds)
        self.admission = Admission(1, settings.max_waiting)
        self.body_bytes = 0  # of all requests whose body is being read or used
        self.model: ServedModel | None = None
        self.failure: BaseException | None = None
        self._changing = asyncio.Lock()
        self._restarting: asyncio.Task[None] | None = None

    # -- Starting and ending --

    async def start(self) -> None:
        """Loads and warms up; requests are answered when this returns."""
        try:
            await self.engine.start()
            for name, path in self._adapters.items():
                await self.engine.load_adapter(name, await asyncio.to_thread(adapter_folder, path))
            await self._open_model()
            await self._warm_up()
        except Exception as error:
            self.lifecycle.state, self.lifecycle.reason, self.failure = "failed", str(error)[:200], error
            return
        if self.lifecycle.state == "starting":
            self.lifecycle.state, self.lifecycle.reason = "ready", ""
            info, seconds = self.engine.info, round(time.time() - self.lifecycle.started, 1)
            shown = {"device": info.device, "dtype": info.dtype, "context_length": info.context_length}
            self.log.write("ready", model=self.name, seconds=seconds, **shown)

    async def _open_model(self) -> None:
        info = self.engine.info
        self.admission.running = info.max_requests
        if not is_proxy(self.engine):
            self.model = await asyncio.to_thread(ServedModel.open, info, "fp_" + secrets.token_hex(6))

    async def _warm_up(self) -> None:
        """One real answer, so that the first client does not wait for kernels, caches and compilation."""
        if is_proxy(self.engine) or self.model is None:
            return
        token = min(self.model.info.stop_ids, default=0)
        request = GenerationRequest("warm-up", (token, token), SamplingParams(max_tokens=2), 0, 2)
        plan = Plan([request], 1, ())
        async for _ in Generation(self.token_engine, self.model, plan, Metrics()).deltas():
            pass

    def engine_died(self, reason: str) -> None:
        """Requests get 503 until the engine is started again, with the adapters that it had."""
        if self.lifecycle.state != "ready":
            return
        self.lifecycle.state, self.lifecycle.reason = "starting", "the engine is started again"
        self.log.write("engine_died", reason=reason)
        self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        try:
            await self.engine.restart()
            await self._warm_up()
        except Exception as error:
            self.lifecycle.state, self.lifecycle.reason, self.failure = "failed", str(error)[:200], error
            return
        if self.lifecycle.state == "starting":
            self.lifecycle.state, self.lifecycle.reason = "ready", ""
            self.log.write("engine_restarted")

    async def close(self) -> None:
        if self._restarting is not None:
            self._restarting.cancel()
        await self.engine.close()
        if self.model is not None:
            self.model.close()

    # -- Models --

    @property
    def token_engine(self) -> TokenEngine:
        return self.engine  # type: ignore[return-value]

    def ready_model(self) -> ServedModel:
        self.lifecycle.check_ready()
        if self.model is None:
            raise ApiError(503, "no model is loaded", code="starting", retry_after=5)
        return self.model

    def adapter_of(self, name: str) -> str | None:
        """The adapter that a request's `model` means; None for the base model."""
        if name == self.name:
            return None
        if name in self.engine.info.adapters:
            return name
        raise model_not_found(name)

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """One change of adapters or weights at a time; a UserError is the client's."""
        self.lifecycle.check_ready()
        if self._changing.locked():
            raise ApiError(409, "another adapter or checkpoint is being loaded", code="busy", retry_after=5)
        async with self._changing:
            try:
                yield
            except UserError as error:
                raise bad_request(str(error)) from None
            except OSError as error:  # a path that is too long, a disk that cannot be read
                raise bad_request(f"cannot be opened: {error.strerror or error}") from None

    async def reload(self, name: str | None = None, checkpoint: str | None = None) -> Path:
        from sojourn.infer.find import find_model

        async with self.changing():
            found = await asyncio.to_thread(find_model, name or self.source, checkpoint)
            await self.engine.reload(found.path)
            await self._open_model()
        self.log.write("reloaded", path=str(found.path), model=self.name)
        return found.path

    # -- Requests --

    @asynccontextmanager
    async def generating(self, record: Record, plan: Plan) -> AsyncIterator[Generation]:
        """A place for the sequences, their time limit, and what they used, counted whatever the end."""
        model = self.ready_model()
        generation = Generation(self.token_engine, model, plan, self.metrics, self.engine_died)
        with self.admission.admit(record.key, len(plan.requests)):
            try:
                with self.lifecycle.time_limit():
                    yield generation
            finally:
                self._count(record, generation)

    def _count(self, record: Record, generation: Generation) -> None:
        usage, metrics = generation.usage, self.metrics
        self.admission.count_tokens(record.key, usage.prompt_tokens + usage.completion_tokens)
        metrics.prompt_tokens += usage.prompt_tokens
        metrics.cached_tokens += usage.cached_tokens
        metrics.completion_tokens += usage.completion_tokens
        metrics.histograms["request_prompt_tokens"].add(usage.prompt_tokens)
        metrics.histograms["request_completion_tokens"].add(usage.completion_tokens)
        metrics.histograms["request_seconds"].add(time.monotonic() - generation.clock.start)
        record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        record.cached_tokens = usage.cached_tokens
        record.first_token_seconds = generation.clock.first and round(generation.clock.first, 4)

    async def check_grammar(self, grammar: Grammar | None, param: str) -> None:
        if grammar is None:
            return
        try:
            await asyncio.to_thread(check_grammar, grammar.kind, grammar.text)
        except UserError as error:
            raise bad_request(f"{param}: {error}", param, "invalid_schema") from None


def is_proxy(engine: Engine) -> bool:
    return isinstance(getattr(engine, "base_url", None), str)


def proxy_of(engine: Engine) -> ProxyEngine:
    return engine  # type: ignore[return-value]


def adapter_folder(given: str) -> Path:
    """Of an adapter, or of a run whose final model is one."""
    from sojourn.infer.find import find_model
    from sojourn.model.adapter_check import ADAPTER_FILE

    path = find_model(given).path
    if not (path / ADAPTER_FILE).is_file():
        raise UserError(f"{path} is not an adapter: it has no {ADAPTER_FILE}")
    return path
