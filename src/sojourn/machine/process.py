"""Identifies this machine and its processes: pids are reused, and clocks are set while runs train."""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from pathlib import Path


@cache
def boot_id() -> str:
    """One per boot of a kernel: all containers of a machine share it, no two machines do."""
    for file in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        try:
            return Path(file).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
    return socket.gethostname()


@cache
def pid_namespace() -> str:
    """Pids mean something only within it."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def current_process() -> tuple[int, float]:
    """Pid and start time. On Linux in seconds after boot, so that setting the clock does not change it."""
    return os.getpid(), _start_time_of_this_process(os.getpid())


@cache
def _start_time_of_this_process(pid: int) -> float:
    return start_time(pid)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_time_of_this_process.cache_clear)


def is_alive(pid: int, started: float) -> bool:
    """Whether that process, of this boot and this pid namespace, still runs."""
    import psutil

    try:
        if abs(start_time(pid) - started) < 1:
            return True
        # Older versions wrote the time of day.
        return started > 1e9 and abs(psutil.Process(pid).create_time() - started) < 5 and _is_running(pid)
    except (psutil.Error, OSError, ValueError, TypeError, OverflowError):
        return False


def start_time(pid: int) -> float:
    """Raises where there is no such process, or where it has ended and waits for its parent to notice."""
    import psutil

    if not sys.platform.startswith("linux"):
        if not _is_running(pid):
            raise psutil.NoSuchProcess(pid)
        return float(psutil.Process(pid).create_time())
    fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise psutil.ZombieProcess(pid)
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _is_running(pid: int) -> bool:
    import psutil

    return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
