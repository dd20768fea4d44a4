"""What all routes share: the models, limits, metrics and the log; how the server starts and ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sojourn.errors import UserError
from sojourn.infer.grammar import check_grammar
from sojourn.serve.auth import ApiKey, KeyRing
from sojourn.serve.deployment import Deployment
from sojourn.serve.engines.base import Grammar
from sojourn.serve.errors import bad_request, model_not_found
from sojourn.serve.feedback import FeedbackFolder
from sojourn.serve.generation import Generation, Plan
from sojourn.serve.lifecycle import Lifecycle
from sojourn.serve.limits import Admission
from sojourn.serve.metrics import Metrics
from sojourn.serve.request_log import RequestLog
from sojourn.serve.settings import Settings

_WATCH_SECONDS = 1.0


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
    """`deployments`: of which the first is meant where none is named. `feedback`: None keeps none."""

    def __init__(
        self, deployments: Sequence[Deployment], settings: Settings, keys: KeyRing, log: RequestLog,
        feedback: FeedbackFolder | None = None,
    ) -> None:  # fmt: skip
        self.deployments, self.settings, self.keys, self.log, self.feedback = (
            tuple(deployments), settings, keys, log, feedback,
        )  # fmt: skip
        self.metrics, self.lifecycle, self.admission = Metrics(), Lifecycle(settings.request_seconds), Admission()
        self.body_bytes = 0  # of all requests whose body is being read or used
        self.failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        for one in self.deployments:
            one.queue.waiting = settings.max_waiting

    # -- Starting and ending --

    async def start(self) -> None:
        """Loads one model after another: each takes its share of the memory that is left."""
        for one in self.deployments:
            began = time.monotonic()
            try:
                await one.start()
            except Exception as error:
                self._fail(error)
                return
            info = one.engine.info
            shown = {"device": info.device, "dtype": info.dtype, "context_length": info.context_length}
            self.log.write("ready", model=one.name, seconds=round(time.monotonic() - began, 1), **shown)
        if self.lifecycle.state == "starting":
            self.lifecycle.state, self.lifecycle.reason = "ready", ""
            self._run(self._watch())

    def _fail(self, error: Exception) -> None:
        self.lifecycle.state, self.lifecycle.reason, self.failure = "failed", str(error)[:200], error

    def _run(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """An engine whose process is gone is started again, whether or not a request has noticed."""
        while self.lifecycle.state == "ready":
            for one in self.deployments:
                if one.is_ready and (reason := await asyncio.to_thread(one.engine.why_dead)):
                    self.engine_died(one, reason)
            await asyncio.sleep(_WATCH_SECONDS)

    def engine_died(self, deployment: Deployment, reason: str) -> None:
        if self.lifecycle.state == "ready" and deployment.is_ready:
            self.log.write("engine_died", model=deployment.name, reason=reason)
            deployment.mark_unready()
            self._run(self._restart(deployment))

    async def _restart(self, deployment: Deployment) -> None:
        try:
            await deployment.restart()
        except Exception as error:
            self._fail(error)
            return
        self.log.write("engine_restarted", model=deployment.name)

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        for one in self.deployments:
            await one.close()

    @property
    def is_ready(self) -> bool:
        return self.lifecycle.state == "ready" and all(one.is_ready for one in self.deployments)

    @property
    def taken(self) -> int:
        """Sequences that run or wait."""
        return sum(one.queue.taken for one in self.deployments)

    # -- Models --

    def find(self, name: str) -> tuple[Deployment, str | None]:
        """What a request's `model` means, and the adapter; None for the model itself."""
        self.lifecycle.check_ready()
        for one in self.deployments:
            if name == one.name:
                return one, None
            if name in one.engine.info.adapters:
                return one, name
        raise model_not_found(name)

    def deployment(self, name: str | None) -> Deployment:
        """None: the first."""
        self.lifecycle.check_ready()
        for one in self.deployments:
            if name is None or one.name == name:
                return one
        raise model_not_found(str(name))

    # -- Requests --

    @asynccontextmanager
    async def generating(self, record: Record, deployment: Deployment, plan: Plan) -> AsyncIterator[Generation]:
        """A place for the sequences, their time limit, and what they used, counted whatever the end."""
        model, died = deployment.ready_model(), lambda reason: self.engine_died(deployment, reason)
        generation = Generation(deployment.token_engine, model, plan, self.metrics, died)
        with self.admission.admit(record.key, deployment.queue, len(plan.requests)):
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
