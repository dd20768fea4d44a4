"""CPU, memory and disks as a process here may really use them: cgroup and affinity limits included."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from sojourn.expand_user import expand_user

ROOT = Path("/")


@dataclass(frozen=True)
class Cpu:
    """`usable` is what this process may run on; a container often gets fewer than the machine has."""

    model: str
    logical: int
    physical: int | None
    usable: float
    limited_by: str | None = None


@dataclass(frozen=True)
class Memory:
    """RAM in bytes; `limit` is the smaller of the machine's and the container's."""

    total: int
    available: int
    limit: int
    limited_by: str | None = None


@dataclass(frozen=True)
class Volume:
    """Space and inodes of the filesystem that holds a path; inode counts are None where there is no such count."""

    path: Path
    device: int
    total: int
    free: int
    inodes_total: int | None
    inodes_free: int | None


def cpu(root: Path = ROOT) -> Cpu:
    import psutil

    logical = os.cpu_count() or 1
    usable, limited_by = float(logical), None
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
        if allowed < usable:
            usable, limited_by = float(allowed), "CPU affinity"
    quota = cgroup_cpus(root)
    if quota is not None and quota < usable:
        usable, limited_by = quota, "the container's CPU quota"
    return Cpu(_cpu_model(root), logical, psutil.cpu_count(logical=False), usable, limited_by)


def memory(root: Path = ROOT) -> Memory:
    import psutil

    seen = psutil.virtual_memory()
    limit, used = cgroup_memory(root)
    if limit is None or limit >= seen.total:
        return Memory(seen.total, seen.available, seen.total)
    free_here = max(limit - used, 0) if used is not None else limit
    return Memory(seen.total, min(seen.available, free_here), limit, "the container's memory limit")


def volume(path: Path) -> Volume:
    """The filesystem under `path`, or under its nearest parent that exists."""
    import shutil

    there = existing(path)
    space = shutil.disk_usage(there)
    total, free = None, None
    if sys.platform != "win32":
        stat = os.statvfs(there)
        if stat.f_files:  # btrfs and some network disks count none
            total, free = stat.f_files, stat.f_favail
    return Volume(there, there.stat().st_dev, space.total, space.free, total, free)


def existing(path: Path) -> Path:
    """The path itself, or the nearest parent that exists."""
    there = expand_user(path).absolute()
    while not there.exists() and there.parent != there:
        there = there.parent
    return there


def cgroup_cpus(root: Path = ROOT) -> float | None:
    """The CPU quota of this process's control group and its parents, version 2 or 1."""
    limits = []
    for folder in _cgroups(root, ""):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            limits.append(int(quota) / int(period))
    for folder in _cgroups(root, "cpu"):
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # -1 means no limit
            limits.append(int(quota) / int(period))
    return min((limit for limit in limits if limit > 0), default=None)


def cgroup_memory(root: Path = ROOT) -> tuple[int | None, int | None]:
    """The memory limit that binds first, in bytes, and what is used of it without the page cache."""
    found: list[tuple[int, Path]] = []
    for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        for folder in _cgroups(root, controller):
            text = _text(folder / name)
            if text.isdigit() and int(text) < 1 << 60:  # version 1 writes a huge number for "no limit"
                found.append((int(text), folder))
    if not found:
        return None, None
    limit, folder = min(found, key=lambda pair: pair[0])
    used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
    if not used.isdigit():
        return limit, None
    stat = dict(line.split()[:2] for line in _text(folder / "memory.stat").splitlines() if len(line.split()) == 2)
    cache = int(stat.get("inactive_file") or stat.get("total_inactive_file") or 0)
    return limit, max(int(used) - cache, 0)


def _cgroups(root: Path, controller: str) -> list[Path]:
    """The folders of our control group, innermost first, up to the mount's top."""
    top = root / "sys/fs/cgroup" / controller
    ours = ""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if controller in names.split(","):
            ours = path.strip("/")
    folders = [top / ours] if ours else []
    while folders and folders[-1] != top:
        folders.append(folders[-1].parent)
    return folders or [top]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# ARM CPUs report a part number; these are the ones in rented machines.
_ARM = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}


def _cpu_model(root: Path) -> str:
    import platform

    if sys.platform == "darwin":
        import subprocess

        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
        return name or platform.machine()
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key in ("model name", "Hardware") and value:
            return value
        if key == "CPU part" and value in _ARM:
            return _ARM[value]
    return platform.processor() or platform.machine() or "unknown"
