"""An engine that is another program's server: a child process that speaks OpenAI's API, on a Unix socket."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import RunFailed, UserError
from sojourn.serve.engines.base import EngineInfo, EngineStats

if TYPE_CHECKING:
    import httpx

    from sojourn.infer.runtimes.server_process import ServerProcess


class ServerEngine(ABC):
    """`title`: of the program, for messages. `gauges`: fields of `EngineStats` by the names of its own metrics. `path`:
    of the model, checked."""

    title: str
    gauges: Mapping[str, str]
    base_url = "http://server/v1"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._server: ServerProcess | None = None
        self._info: EngineInfo | None = None

    @abstractmethod
    def check_path(self, path: Path) -> Path:
        """The path as the program opens it. Raises UserError, with what to type, where it would not."""

    @abstractmethod
    def open_server(self) -> ServerProcess:
        """Starts it, and returns when it answers."""

    @abstractmethod
    def read_info(self, served: dict[str, Any]) -> EngineInfo:
        """`served`: the model's entry of its /v1/models."""

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise RunFailed(f"{self.title} is not started")
        return self._info

    @property
    def running(self) -> ServerProcess:
        if self._server is None:
            raise RunFailed(f"{self.title} is not started")
        return self._server

    def transport(self) -> httpx.AsyncHTTPTransport:
        """How the gateway reaches it."""
        import httpx

        return httpx.AsyncHTTPTransport(uds=str(self.running.socket))

    async def start(self) -> None:
        self._server = await asyncio.to_thread(self.open_server)
        (served, *_) = (await asyncio.to_thread(self._server.get, "/v1/models"))["data"]
        self._info = self.read_info(served)

    async def health(self) -> bool:
        return self._server is not None and await asyncio.to_thread(self._server.is_healthy)

    def why_dead(self) -> str:
        if self._server is None:
            return "" if self._info is None else f"{self.title} is not running"
        return self._server.why_ended()

    async def restart(self) -> None:
        await self.close()
        await self.start()

    async def reload(self, path: Path) -> None:
        """It fills the memory, so the old weights go first. No request may run. Where the new ones do not load, the old
        ones are loaded again."""
        old, self.path = self.path, self.check_path(path)
        try:
            await self.restart()
        except (UserError, RunFailed) as error:
            self.path = old
            await self.restart()
            raise UserError(f"{error}; {old} is served again") from None

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.close)

    def translate(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return body

    async def stats(self) -> EngineStats:
        import httpx

        try:
            text = await asyncio.to_thread(self.running.get_text, "/metrics")
        except (httpx.HTTPError, RunFailed):
            return EngineStats()  # gone: the gateway notices by itself
        found = read_prometheus(text)
        return EngineStats(**{field: int(found[name]) for name, field in self.gauges.items() if name in found})

    async def load_adapter(self, name: str, path: Path) -> None:
        raise UserError(f"{self.title} cannot load adapters while it runs; try: --engine builtin")

    async def unload_adapter(self, name: str) -> None:
        raise UserError(f"{self.title} cannot unload adapters while it runs; try: --engine builtin")


def read_prometheus(text: str) -> dict[str, float]:
    """Values by name, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition("{")[0].partition(" ")[0], None, line.rpartition(" ")[2]
        if line.startswith("#") or not name:
            continue
        try:
            found[name] = found.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return found
