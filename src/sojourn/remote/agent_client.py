"""Talks to the file server on the box (box/agent.py) over a channel; several requests may be under way."""

from __future__ import annotations

import json
import secrets
import shlex
import threading
import zlib
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed, UserError
from sojourn.remote.box.agent import HEAD, MOST_BYTES
from sojourn.remote.box.channels import LISTENS, MAGIC
from sojourn.remote.connection import FAR_SECONDS, Channel, Connection, ConnectionLost
from sojourn.remote.hosts import Host

PYTHONS = ("python3", "python", "/root/miniconda3/bin/python", "/opt/conda/bin/python", "/usr/bin/python3")
_MODULES = ("hashes", "transfer", "tree", "agent")  # in the order in which they are loaded, after the channels
_TOO_OLD = 97


class AgentFailed(RunFailed):
    """An operation failed on the box; `errno` as there, `kind` is refused, os or bug."""

    def __init__(self, message: str, kind: str, errno: int) -> None:
        super().__init__(message)
        self.kind, self.errno = kind, errno


class AgentNotStarted(ConnectionLost):
    """The file server ended before its first line."""


@cache
def _source() -> bytes:
    """The agent and its modules as one program, compressed. It reads the path of its socket, one line, from stdin."""
    folder = Path(__file__).parent / "box"
    sources = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in ("channels", *_MODULES)}
    program = (
        "import sys, types\n"
        "def _module(name, source=''):\n"
        "    module = sys.modules[name] = types.ModuleType(name)\n"
        "    module.__path__ = []\n"
        "    exec(compile(source, name, 'exec'), module.__dict__)\n"
        "for _name in ('sojourn', 'sojourn.remote', 'sojourn.remote.box'): _module(_name)\n"
        "_path = sys.stdin.buffer.readline().decode().strip()\n"
        f"for _name, _text in {sources!r}.items():\n"
        "    _module('sojourn.remote.box.' + _name, _text)\n"
        "    if _name == 'channels': _socket = sys.modules['sojourn.remote.box.channels'].greet(_path)\n"
        "sys.modules['sojourn.remote.box.agent'].main(_socket)\n"
    )
    return zlib.compress(program.encode(), 9)


def agent_argv(host: Host) -> list[str]:
    """The first Python on the box that is new enough; it reads its program from stdin."""
    loader = (
        f"import sys; sys.version_info < (3, 8) and sys.exit({_TOO_OLD}); import zlib; "
        f"exec(zlib.decompress(sys.stdin.buffer.read({len(_source())})))"
    )
    pythons = " ".join(shlex.quote(name) for name in ([host.python] if host.python else []) + list(PYTHONS))
    # 2: Python 2 does not know -I. 126 and 127: no such program, or a pyenv without a version.
    script = (
        f'for p in {pythons}; do command -v "$p" >/dev/null 2>&1 || continue; "$p" -ISc "{loader}"; r=$?; '
        f"case $r in 2|126|127|{_TOO_OLD}) ;; *) exit $r ;; esac; done; echo no Python 3.8 or newer >&2; exit 127"
    )
    return ["sh", "-c", script]


class Agent:
    """Answers come in the order of the requests. Not for several threads at once, but for `connect`."""

    def __init__(self, host: Host, channel: Channel) -> None:
        """`channel`: to a process on the box that is an agent or becomes one; `start` and `connect` open it."""
        self._host, self._channel = host, channel
        self._received = bytearray()
        self._pending: deque[str] = deque()
        self._greeting = threading.Lock()
        self._greeted = False
        self.socket = ""

    @classmethod
    def start(cls, host: Host, connection: Connection) -> Agent:
        """By a login shell. Where the box is far away, other agents can be had beside this one."""
        agent = cls(host, connection.open(agent_argv(host)))
        if connection.takes_sockets and (connection.round_trip() or 0.0) >= FAR_SECONDS:
            agent.socket = f"/tmp/.sojourn-{secrets.token_hex(16)}/agent"  # noqa: S108 -- in a folder of its own
        agent._channel.write(_source() + f"{agent.socket}\n".encode())
        return agent

    def connect(self, connection: Connection) -> Agent | None:
        """Another one beside this one: a process of it, without a login shell. None where that is not possible."""
        self._greet()
        if not self.socket or not connection.takes_sockets:
            return None
        channel = connection.open_socket(self.socket)
        return None if channel is None else Agent(self._host, channel)

    @property
    def pending(self) -> int:
        return len(self._pending)

    def ask(self, do: str, blob: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        """One request and its answer; only where none is under way."""
        self.send(do, blob, **fields)
        return self.receive()

    def send(self, do: str, blob: bytes = b"", **fields: Any) -> None:
        text = json.dumps({"do": do, **fields}).encode()
        if len(blob) < 1 << 16:
            self._channel.write(HEAD.pack(len(text), len(blob)) + text + blob)
        else:
            self._channel.write(HEAD.pack(len(text), len(blob)) + text)
            self._channel.write(blob)
        self._pending.append(do)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The answer to the oldest request. Raises AgentFailed, ConnectionLost."""
        self._greet()
        head, size = HEAD.unpack(self._take(HEAD.size))
        if max(head, size) > MOST_BYTES:
            raise ConnectionLost(f"{self._host.name}: what the box answers cannot be read")
        answer = json.loads(self._take(head))
        blob = self._take(size)
        do = self._pending.popleft()
        if not answer.get("ok"):
            message = f"{self._host.name}: {answer.get('error') or do}"
            raise AgentFailed(message, str(answer.get("kind")), int(answer.get("errno") or 0))
        if answer.get("packed"):
            blob = zlib.decompress(blob)
        return answer, blob

    def _greet(self) -> None:
        """Some Pythons on boxes print something at their start, so the agent's first line is searched for."""
        with self._greeting:
            if self._greeted:
                return
            while (found := self._received.find(MAGIC)) < 0:
                self._more(1 << 16)
            del self._received[: found + len(MAGIC)]
            if self._take(1) != LISTENS:
                self.socket = ""
            self._greeted = True

    def _take(self, size: int) -> bytes:
        while len(self._received) < size:
            self._more(max(1 << 18, size - len(self._received)))
        data = bytes(memoryview(self._received)[:size])
        del self._received[:size]
        return data

    def _more(self, most: int) -> None:
        data = self._channel.read(most)
        if not data:
            text = self._channel.stderr.decode(errors="replace").strip()
            last = text.splitlines()[-1] if text else "it ended"
            if "no Python 3.8" in text:
                raise UserError(
                    f"{self._host.name}: the box has no Python 3.8 or newer; rent an image with one, or install it "
                    f"there: sojourn shell {self._host.name}"
                )
            if not self._greeted:
                raise AgentNotStarted(f"{self._host.name}: the file server cannot start on the box: {last}")
            raise ConnectionLost(f"{self._host.name}: the file server on the box is gone: {last}")
        self._received += data

    def close(self) -> None:
        self._channel.close()
