"""A process named so that it cannot be confused with a later one of the same number: pid and start time."""

from __future__ import annotations

import os


def this_process() -> tuple[int, float]:
    import psutil

    return os.getpid(), psutil.Process().create_time()


def alive(pid: int, started: float) -> bool:
    """Whether that very process still runs."""
    import psutil

    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, TypeError):
        return False
