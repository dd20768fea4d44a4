"""Limits what a piece of this process may use: CPU time, and on Linux memory. For computations that a file from
elsewhere decides, such as chat templates and patterns.

A timer can interrupt the main thread only, and only between Python's own instructions; other threads are not limited.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")


class LimitReached(Exception):
    """The message says which limit."""


def call_limited(
    seconds: float, memory: int | None, function: Callable[..., Result], *args: Any, **kwargs: Any
) -> Result:
    """Raises `LimitReached`. `memory`: bytes beyond what the process has now."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return function(*args, **kwargs)

    def interrupt(_: int, __: FrameType | None) -> None:
        raise LimitReached(f"it takes more than {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.5)  # again, where the first one was swallowed
    try:
        if memory is None or sys.platform != "linux":
            return function(*args, **kwargs)
        return _call_in_memory(memory, function, *args, **kwargs)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _call_in_memory(memory: int, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_AS)
    most = _address_space(resource.getpagesize()) + memory
    if limits[0] != resource.RLIM_INFINITY:
        most = min(most, limits[0])
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        return function(*args, **kwargs)
    except MemoryError:
        raise LimitReached(f"it takes more than {memory >> 20:,} MiB of memory") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _address_space(page: int) -> int:
    """Bytes that the process has reserved."""
    handle = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(handle, 64).split()[0]) * page
    finally:
        os.close(handle)
