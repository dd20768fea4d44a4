"""The link to a box: its connection, the agents over it, commands and forwards. Made again by itself after a loss.

Every operation may be repeated without harm, and is: after a loss, with growing pauses, until `patience` is over.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from sojourn.errors import UserError
from sojourn.remote.agent_client import Agent, AgentFailed, AgentNotStarted, agent_argv
from sojourn.remote.connect import connect
from sojourn.remote.connection import (
    CONNECT_SECONDS,
    ChannelRefused,
    Completed,
    Connection,
    ConnectionLost,
    HostUnreachable,
)
from sojourn.remote.hosts import Host

T = TypeVar("T")
Self = TypeVar("Self", bound="BoxLink")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 15.0
_FIRST_PATIENCE = 45.0  # before the first success, the box is more likely off than its link broken
_AGENT_STARTS = 3


class BoxLink:
    """Connects at the first use. `say` gets a line when the link is lost and one when it is back."""

    def __init__(
        self,
        host: Host,
        say: Callable[[str], None] = lambda line: None,
        patience: float = 300.0,
        password: str | None = None,
        timeout: float = CONNECT_SECONDS,
    ) -> None:
        self.host, self.say, self.patience, self.timeout = host, say, patience, timeout
        self._password = password
        self._connection: Connection | None = None
        self._agents: dict[str, Agent] = {}
        self._bulk: Agent | None = None
        self._first: tuple[Connection, Agent] | None = None  # others connect to the box through this one
        self._forwards: dict[tuple[int, int, str], int] = {}
        self._lock = threading.RLock()
        self._connecting = threading.Lock()  # not the same, since `close` must not wait for a box that does not answer
        self._was_connected = False

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._drop()

    # the connection

    def connection(self, with_agent: bool = False) -> Connection:
        """`with_agent`: one is needed at once, and its channel is asked for while connecting."""
        with self._connecting:
            with self._lock:
                if self._connection is not None:
                    return self._connection
            argv = agent_argv(self.host)
            made = connect(self.host, self._password, self.timeout, [argv] if with_agent else [])
            with self._lock:
                self._connection = made
                self._was_connected = True
                forwards = list(self._forwards)
            for local, remote, remote_host in forwards:
                made.forward(local, remote, remote_host)
            return made

    @contextlib.contextmanager
    def connecting(self) -> Iterator[Callable[[], bool]]:
        """Connects, for an agent, while the body does something else; what it gets says whether that is done. Raises as
        `connection`, at the end."""
        errors: list[BaseException] = []

        def connect_now() -> None:
            try:
                self.connection(with_agent=True)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=connect_now, daemon=True)
        if self._connection is None:
            thread.start()
        yield lambda: not thread.is_alive()
        while thread.is_alive():
            thread.join(0.1)  # on Windows a wait without a timeout cannot be interrupted
        if errors:
            raise errors[0]

    @property
    def round_trip(self) -> float:
        """Seconds, about."""
        return self.connection().round_trip() or 0.0

    def _drop(self) -> None:
        with self._lock:
            agents, self._agents, self._first = list(self._agents.values()), {}, None
            agents += [self._bulk] if self._bulk is not None else []
            connection, self._connection, self._bulk = self._connection, None, None
        for agent in agents:
            with contextlib.suppress(Exception):
                agent.close()
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def again(self, operation: Callable[[], T], progressed: Callable[[], object] = lambda: None) -> T:
        """Repeats `operation` after each lost connection. What `progressed` returns changes whenever something was
        achieved: the patience then counts anew."""
        began, pause, lost, last = time.monotonic(), _FIRST_PAUSE, False, progressed()
        starts = 0
        while True:
            try:
                result = operation()
                if lost:
                    self.say(f"{self.host.name}: connected again")
                return result
            except (ConnectionLost, HostUnreachable) as error:
                self._drop()
                starts = starts + 1 if isinstance(error, AgentNotStarted) else 0
                if starts >= _AGENT_STARTS:
                    raise
                if progressed() != last:
                    began, pause, last = time.monotonic(), _FIRST_PAUSE, progressed()
                patience = self.patience if self._was_connected else min(self.patience, _FIRST_PATIENCE)
                if time.monotonic() - began + pause > patience:
                    raise
                if not lost:
                    self.say(f"{error}; connecting again …")
                    lost = True
                time.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 -- a pause
                pause = min(2 * pause, _LONGEST_PAUSE)

    @contextlib.contextmanager
    def agent(self, name: str = "main", start: bool = True) -> Iterator[Agent]:
        """The agent of this name, kept for the next call. One that was interrupted is not used again. `start`: by a
        login shell where no other way leads to a new one; else that raises ChannelRefused."""
        connection = self.connection(with_agent=True)
        with self._lock:
            agent = self._agents.pop(name, None)
        if agent is None:
            agent = self._new_agent(connection, start)
        try:
            yield agent
        except AgentFailed:
            if agent.pending:
                agent.close()
            else:
                self._keep(name, agent, connection)
            raise
        except BaseException:
            agent.close()
            raise
        self._keep(name, agent, connection)

    def _new_agent(self, connection: Connection, start: bool) -> Agent:
        """Or one that was kept under another name, where the box allows no more channels."""
        with self._lock:
            first = self._first
        if first is not None and first[0] is connection and (beside := first[1].connect(connection)) is not None:
            return beside
        if not start:
            raise ChannelRefused(f"{self.host.name}: one more agent would need a login shell")
        try:
            agent = Agent.start(self.host, connection)
        except ChannelRefused:
            with self._lock:
                if not self._agents:
                    raise
                return self._agents.popitem()[1]
        with self._lock:
            if self._connection is connection:
                self._first = (connection, agent)
        return agent

    def bulk_agent(self) -> Agent | None:
        """Over an `ssh` child, which encrypts several times faster than Python can; None where there is none."""
        from sojourn.remote.openssh_connection import OpensshConnection, ssh_program

        kept, self._bulk = self._bulk, None
        if kept is not None:
            return kept
        if self.host.transport == "openssh" or self.host.jump or self._password or ssh_program() is None:
            return None
        connection = OpensshConnection(self.host, self.timeout, share=False)
        agent: Agent | None = None
        try:
            agent = Agent.start(self.host, connection)
            agent.ask("hello")
        except UserError:
            if agent is not None:
                agent.close()
            return None
        return agent

    def keep_bulk_agent(self) -> None:
        """For the next call of `bulk_agent`."""
        agent = self.bulk_agent()
        with self._lock:
            self._bulk, agent = agent, self._bulk
        if agent is not None:
            agent.close()

    def _keep(self, name: str, agent: Agent, connection: Connection) -> None:
        with self._lock:
            if connection is self._connection and name not in self._agents and not agent.pending:
                self._agents[name] = agent
                return
        agent.close()

    def _ask(self, do: str, blob: bytes = b"", agent: str = "main", **fields: Any) -> tuple[dict[str, Any], bytes]:
        def ask() -> tuple[dict[str, Any], bytes]:
            with self.agent(agent) as channel:
                return channel.ask(do, blob, **fields)

        return self.again(ask)

    # commands

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """The command must be one that may run twice. No secret may be in `argv` or `env`: use `input`."""
        return self.again(lambda: self.connection().run(argv, input=input, timeout=timeout, env=env))

    def forward(self, local_port: int, remote_port: int, remote_host: str = "127.0.0.1") -> int:
        """Kept when the connection is made again."""
        port = self.again(lambda: self.connection().forward(local_port, remote_port, remote_host))
        self._forwards[(port, remote_port, remote_host)] = port
        return port
