"""One model behind the API: its engine, tokenizer, adapters and queue; how it starts, changes and is started again."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from sojourn.errors import UserError
from sojourn.infer.find import adapter_folder, find_model
from sojourn.infer.sampling import SamplingParams
from sojourn.serve.engines.base import Engine, GenerationRequest, ProxyEngine, TokenEngine
from sojourn.serve.errors import ApiError, bad_request
from sojourn.serve.generation import Generation, Plan
from sojourn.serve.limits import Queue
from sojourn.serve.metrics import Metrics
from sojourn.serve.served_model import ServedModel

_LOADING = "the model is being loaded"
_DRAIN_SECONDS = 0.1


class Deployment:
    """`name`: of the model in the API. `source`: what the server was asked to serve; a reload without a name opens it
    again. `adapters`: paths of those to load at the start, by name."""

    def __init__(self, name: str, engine: Engine, source: str = "", adapters: Mapping[str, str] | None = None) -> None:
        self.name, self.engine, self.source, self._adapters = name, engine, source, dict(adapters or {})
        self.queue = Queue(1, 0)
        self.model: ServedModel | None = None  # of an engine that takes token ids
        self._unready: str | None = _LOADING
        self._changing = asyncio.Lock()

    # -- Its engine --

    @property
    def is_proxy(self) -> bool:
        return isinstance(getattr(self.engine, "base_url", None), str)

    @property
    def proxy(self) -> ProxyEngine:
        return self.engine  # type: ignore[return-value]

    @property
    def token_engine(self) -> TokenEngine:
        return self.engine  # type: ignore[return-value]

    @property
    def is_ready(self) -> bool:
        return self._unready is None

    @property
    def names(self) -> tuple[str, ...]:
        """What a request's `model` may be."""
        return (self.name, *self.engine.info.adapters)

    def check_ready(self) -> None:
        if self._unready is not None:
            raise ApiError(503, f"not ready: {self._unready}", code="starting", retry_after=5)

    def ready_model(self) -> ServedModel:
        self.check_ready()
        if self.model is None:
            raise ApiError(503, "no model is loaded", code="starting", retry_after=5)
        return self.model

    async def start(self) -> None:
        """Loads and warms up; requests are answered when this returns."""
        await self.engine.start()
        for name, path in self._adapters.items():
            if name not in self.engine.info.adapters:  # vLLM is started with them
                await self.engine.load_adapter(name, await asyncio.to_thread(adapter_folder, path))
        await self._open_model()
        await self._warm_up()
        self._unready = None

    def mark_unready(self) -> None:
        self._unready = "the engine is started again"

    async def restart(self) -> None:
        """After the engine's end, with the adapters that it had. Requests get 503 meanwhile."""
        self.mark_unready()
        await self.engine.restart()
        await self._warm_up()
        self._unready = None

    async def _open_model(self) -> None:
        info = self.engine.info
        self.queue.running = info.max_requests
        if not self.is_proxy:
            self.model = await asyncio.to_thread(ServedModel.open, info, "fp_" + secrets.token_hex(6))

    async def _warm_up(self) -> None:
        """One real answer, so that the first client does not wait for kernels, caches and compilation."""
        if self.model is None:
            return
        token = min(self.model.info.stop_ids, default=0)
        request = GenerationRequest("warm-up", (token, token), SamplingParams(max_tokens=2), 0, 2)
        async for _ in Generation(self.token_engine, self.model, Plan([request], 1, ()), Metrics()).deltas():
            pass

    async def close(self) -> None:
        await self.engine.close()
        if self.model is not None:
            self.model.close()

    # -- Changes --

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """One change of adapters or weights at a time; a UserError is the client's."""
        self.check_ready()
        if self._changing.locked():
            raise ApiError(409, "another adapter or checkpoint is being loaded", code="busy", retry_after=5)
        async with self._changing:
            try:
                yield
            except UserError as error:
                raise bad_request(str(error)) from None
            except OSError as error:  # a path that is too long, a disk that cannot be read
                raise bad_request(f"cannot be opened: {error.strerror or error}") from None

    async def reload(self, source: str | None = None, checkpoint: str | None = None) -> Path:
        async with self.changing():
            found = await asyncio.to_thread(find_model, source or self.source, checkpoint)
            if self.is_proxy:
                await self._reload_alone(found.path)
            else:
                await self.engine.reload(found.path)
            await self._open_model()
        return found.path

    async def _reload_alone(self, path: Path) -> None:
        """The engine has room for one model only: requests that run end, new ones get 503 meanwhile."""
        self._unready = "other weights are being loaded"
        try:
            while self.queue.taken:
                await asyncio.sleep(_DRAIN_SECONDS)
            await self.engine.reload(path)
        finally:
            self._unready = None
