"""A box as the verbs use it: commands, files, trees, logs, forwards. A lost connection is made again by itself.

Every operation may be repeated without harm, and is: after a loss, with growing pauses, until `patience` is over.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from sojourn.errors import UserError
from sojourn.remote.agent_client import Agent, AgentFailed, AgentNotStarted, agent_argv
from sojourn.remote.connection import CONNECT_SECONDS, Completed, Connection, ConnectionLost, HostUnreachable, connect
from sojourn.remote.hosts import Host

if TYPE_CHECKING:
    from sojourn.remote.ignore import Ignore
    from sojourn.remote.progress import ProgressBar, ProgressCallback
    from sojourn.remote.sync import Synced

T = TypeVar("T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 15.0
_FIRST_PATIENCE = 20.0  # before the first success, the box is more likely off than its link broken
_AGENT_STARTS = 3
_MOST_READ = 64 << 20


@dataclass(frozen=True)
class Found:
    """An entry of a folder on the box."""

    path: str
    kind: str
    size: int
    modified: float
    content: bytes = b""


class Box:
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
        self._forwards: dict[tuple[int, int, str], int] = {}
        self._lock = threading.RLock()
        self._was_connected = False

    def __enter__(self) -> Box:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._drop()

    # the connection

    def connection(self, agents: Callable[[float], int] = lambda round_trip: 0) -> Connection:
        """`agents`: how many will be needed at once, given the round trip in seconds, about."""
        with self._lock:
            if self._connection is None:
                argv = agent_argv(self.host)
                self._connection = connect(
                    self.host, self._password, self.timeout, lambda round_trip: [argv] * agents(round_trip)
                )
                self._was_connected = True
                for (local, remote, remote_host), _ in self._forwards.items():
                    self._connection.forward(local, remote, remote_host)
            return self._connection

    @contextlib.contextmanager
    def connecting(self, agents: Callable[[float], int]) -> Iterator[Callable[[], bool]]:
        """Connects while the body does something else; what it gets says whether that is done. Raises as `connection`,
        at the end."""
        errors: list[BaseException] = []

        def connect_now() -> None:
            try:
                self.connection(agents)
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
            agents, self._agents = list(self._agents.values()), {}
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
    def agent(self, name: str = "main") -> Iterator[Agent]:
        """The agent of this name, kept for the next call. One that was interrupted is not used again."""
        connection = self.connection(lambda round_trip: 1)
        with self._lock:
            agent = self._agents.pop(name, None)
        if agent is None:
            agent = Agent(self.host, connection)
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
            agent = Agent(self.host, connection)
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

    # files

    def read_bytes(self, path: str, most: int = _MOST_READ) -> bytes | None:
        """None where there is no such file."""
        answer, data = self._ask("read", path=path, most=most)
        return data if answer["found"] else None

    def write_bytes(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Atomic and durable; makes the folders on the way."""
        self._ask("write", data, path=path, mode=mode)

    def tail(self, path: str, offset: int, wait: float = 0.0, most: int = 1 << 20) -> bytes:
        """What comes after `offset` bytes; waits up to `wait` seconds for something to come."""
        return self._ask("tail", agent="tail", path=path, offset=offset, wait=min(wait, 60.0), most=most)[1]

    def list_files(self, pattern: str) -> list[Found]:
        """By a glob pattern; `**` for all folders below."""
        return self._list(pattern, content=False)

    def list_json(self, pattern: str) -> dict[str, Any]:
        """The JSON files that match, by path; a file that is not JSON is None."""
        import json

        result = {}
        for found in self._list(pattern, content=True):
            if found.kind == "file":
                try:
                    result[found.path] = json.loads(found.content)
                except ValueError:
                    result[found.path] = None
        return result

    def list_folder(self, path: str) -> list[str]:
        """The names in a folder; none where there is no such folder."""
        from glob import escape

        names = [found.path.rstrip("/").rpartition("/")[2] for found in self._list(f"{escape(path)}/*", content=False)]
        return sorted(names)

    def _list(self, pattern: str, content: bool) -> list[Found]:
        answer, data = self._ask("list", pattern=pattern, content=content, most=_MOST_READ)
        result, at = [], 0
        for path, kind, size, modified, length in answer["found"]:
            result.append(Found(path, kind, size, modified, data[at : at + length]))
            at += length
        return result

    def make_folder(self, path: str, mode: int = 0o755) -> None:
        self._ask("mkdir", path=path, mode=mode)

    def remove(self, path: str) -> None:
        """A file, or a folder with everything in it; nothing where there is none."""
        self._ask("remove", path=path)

    def rename(self, old: str, new: str) -> None:
        self._ask("rename", old=old, new=new)

    def free_bytes(self, path: str) -> int:
        return int(self._ask("disk", path=path)[0]["free"])

    # trees

    def push(
        self,
        items: Sequence[tuple[Path, str]],
        progress: ProgressCallback | None = None,
        ignore: Ignore | None = None,
        *,
        delete: bool = False,
        durable: bool = False,
    ) -> Synced:
        """Files and folders to their paths on the box; only what changed travels. `delete`: what is in the folders on
        the box but not here. `durable`: the box's disks have it before this returns. Raises SyncFailed."""
        from sojourn.remote.upload import Upload

        return Upload(self, list(items), progress, ignore, delete, durable).run()

    def pull(
        self, remote: str, local: Path, progress: ProgressCallback | None = None, ignore: Ignore | None = None
    ) -> Synced:
        """A file or folder of the box to `local`, each file verified. A folder with a manifest.json appears only when
        it is whole. Raises SyncFailed; MissingOnBox where there is no such path."""
        from sojourn.remote.download import Download

        return Download(self, remote, local, progress, ignore).run()

    def pull_file(self, remote: str, local: Path, missing_ok: bool = False) -> bool:
        """False where there is no such file, which is an error unless `missing_ok`."""
        from sojourn.remote.download import MissingOnBox

        try:
            self.pull(remote, local)
        except MissingOnBox:
            if not missing_ok:
                raise
            return False
        return True

    def progress(self, label: str) -> ProgressBar:
        """For `push` and `pull`."""
        from sojourn.remote.progress import ProgressBar

        return ProgressBar(label, self.say)
