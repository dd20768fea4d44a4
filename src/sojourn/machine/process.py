"""Identifies a process by pid and start time, because pids are reused."""

from __future__ import annotations

import os


def current_process() -> tuple[int, float]:
    import psutil

    return os.getpid(), psutil.Process().create_time()


def is_alive(pid: int, started: float) -> bool:
    """Whether that process still runs."""
    import psutil

    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, TypeError):
        return False
