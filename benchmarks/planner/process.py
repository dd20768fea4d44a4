"""A case's process as its parent sees it: what it said, how long it has really run, and its quiet turn."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from socket import socket

from benchmarks.planner.child import Task
from benchmarks.planner.protocol import ASK, DONE, GO, LEAVE, READY

PAUSE = 0.02
_TURN = 60.0  # seconds that the others wait for one at most
_SETTLE = 0.1
_LEAVING = 20.0


@dataclass(frozen=True)
class Need:
    """Bytes of the device: until a case makes whole steps, and at the most."""

    first: int = 0
    most: int = 0


@dataclass
class Running:
    """`said`: its words, and its age at each. `whole`: whether it may make whole steps."""

    pid: int
    task: Task
    line: socket
    need: Need = Need()
    process: subprocess.Popen[bytes] | None = None
    ran: float = 0.0
    since: float | None = field(default_factory=time.monotonic)
    said: dict[bytes, float] = field(default_factory=dict)
    whole: bool = False
    status: int | None = None
    quiet: float | None = None
    device: int | None = None

    def __post_init__(self) -> None:
        self.line.setblocking(False)

    @property
    def age(self) -> float:
        """Seconds that it has run, those not counted in which it was stopped, or waited for memory."""
        return self.ran + (0.0 if self.since is None else time.monotonic() - self.since)

    def halt(self) -> None:
        self.ran, self.since = self.age, None

    def go_on(self) -> None:
        self.since = time.monotonic()

    @property
    def holds(self) -> int:
        return self.need.most if self.whole else self.need.first

    @property
    def ready(self) -> bool:
        return READY in self.said and not self.whole

    @property
    def asks(self) -> bool:
        return ASK in self.said and self.quiet is None

    def listen(self) -> None:
        said = b""
        with suppress(OSError):  # nothing was said
            said = self.line.recv(16)
        for word in said:
            self.said.setdefault(bytes([word]), self.age)
        if self.ready:
            self.halt()

    def done(self) -> bool:
        self.listen()
        return DONE in self.said or self.ended()

    def begin_steps(self) -> None:
        self.whole = True
        self.go_on()
        self.tell(GO)

    def tell(self, word: bytes) -> None:
        with suppress(OSError):  # it is gone
            self.line.send(word)

    def ended(self) -> bool:
        """Its exit status is known then."""
        if self.status is None and self.process is not None:
            self.status = self.process.poll()
        elif self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = None if pid == 0 else os.waitstatus_to_exitcode(status)
        return self.status is not None

    def signal(self, number: int) -> None:
        """Signals its process group; a process that has just started may not have one yet."""
        for send in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                send(self.pid, number)

    def kill(self) -> None:
        if self.status is None:
            self.signal(signal.SIGKILL)
        while not self.ended():
            time.sleep(PAUSE)


@contextmanager
def stopped(others: list[Running]) -> Iterator[None]:
    """The others stand still, whatever happens in here."""
    went = [other for other in others if other.since is not None]
    try:
        for other in others:
            other.signal(signal.SIGSTOP)
        for other in went:
            other.halt()
        yield
    finally:
        for other in others:
            other.signal(signal.SIGCONT)
        for other in went:
            other.go_on()


def take_turn(one: Running, others: list[Running], limit: float) -> bool:
    """Lets `one` time its steps and leave, while the others stand still: what comes free then was its own. False: it
    did not come to an end."""
    with stopped(others):
        began = time.monotonic()
        time.sleep(_SETTLE)
        one.tell(GO)
        one.quiet = 0.0
        in_time = _until(one.done, min(limit, _TURN))
        if in_time and not one.ended():
            used = device_used()
            one.tell(LEAVE)
            in_time = _until(one.ended, _LEAVING)
            if used is not None and in_time:
                one.device = _came_free(used)
        one.quiet = time.monotonic() - began
    return in_time


def _until(true: Callable[[], bool], limit: float) -> bool:
    until = time.monotonic() + limit
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(PAUSE / 4)
    return True


def _came_free(used: int) -> int | None:
    """The driver may be a little behind: read until there is less, and twice the same."""
    last, until = used, time.monotonic() + 5
    while time.monotonic() < until:
        now = device_used()
        if now is None or (now < used and now == last):
            break
        last = now
        time.sleep(PAUSE)
    return used - last if last < used else None


def device_used() -> int | None:
    """Bytes of the first GPU that are taken, as the driver counts them: the only count that needs no context."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True).stdout.strip()
        return int(said) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
