"""What the board frees goes back to the system. glibc keeps it otherwise, in up to 8 arenas a core and in the holes
between what is still used: that took more than half of the board's memory."""

from __future__ import annotations

import contextlib
import ctypes
import sys

_M_ARENA_MAX = -8  # of malloc.h


def use_few_arenas() -> None:
    """Before threads are started."""
    _call("mallopt", _M_ARENA_MAX, 2)


def give_back() -> None:
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            getattr(ctypes.CDLL("libc.so.6"), name)(*arguments)
