"""Messages of one byte between a case and its parent, and how a case waits for an idle device."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from socket import socket

# From a case: it is open; it needs its memory to go on; it needs quiet; it is done. From its parent: go on; leave.
OPENED, READY, ASK, DONE = b"o", b"r", b"a", b"d"
GO, LEAVE = b"g", b"l"

_SET_DEATH_SIGNAL = 1  # of prctl
_CALM, _AT_ONCE, _PATIENCE = 10, 5e-4, 2.5


def die_with(parent: int) -> None:
    """Without a parent nobody would wake a case that is stopped."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True)
class Line:
    """A case's end of the line to its parent."""

    socket: socket

    def say(self, word: bytes) -> None:
        self.socket.sendall(word)

    def wait_for(self, word: bytes) -> None:
        """A parent that hangs up wants nothing more."""
        if self.socket.recv(1) != word:
            os._exit(1)


def wait_for_calm() -> float:
    """Until the device answers at once: kernels that the others had asked for before they were stopped still run.
    Returns the seconds."""
    import torch

    one, calm, start = torch.ones(1, device="cuda"), 0, time.monotonic()
    while calm < _CALM and time.monotonic() < start + _PATIENCE:
        began = time.perf_counter()
        one.add_(1)
        torch.cuda.synchronize()
        calm = calm + 1 if time.perf_counter() - began < _AT_ONCE else 0
        time.sleep(0.002)
    return time.monotonic() - start
