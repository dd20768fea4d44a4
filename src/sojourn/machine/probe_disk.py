"""Probes of storage: every volume a run writes to, by really writing to it; shared memory; the clock."""

import errno
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from sojourn.expand_user import expand_user
from sojourn.machine.finding import Finding, Level, gib, guarded
from sojourn.machine.hardware import Volume, existing, volume

_NAMES = {"runs": "disk", "downloads": "download disk", "temporary files": "temporary disk"}
MADE = "2026-11"  # no clock that is right shows an earlier month
MIB = 1024**2
GIB = 1024**3


def hf_cache(env: Mapping[str, str]) -> Path:
    """Where Hugging Face libraries download to, by their own rules."""
    if chosen := env.get("HF_HUB_CACHE"):
        return expand_user(chosen)
    if chosen := env.get("HF_HOME"):
        return expand_user(chosen) / "hub"
    base = env.get("XDG_CACHE_HOME") or "~/.cache"
    return expand_user(base) / "huggingface" / "hub"


def disks(home: Path, env: Mapping[str, str]) -> list[Finding]:
    """One finding for each volume that a run writes to: the home folder, the download cache, the temporary folder."""
    paths = {"runs": home, "downloads": hf_cache(env), "temporary files": Path(tempfile.gettempdir())}
    volumes: dict[tuple[int, bool], tuple[list[str], Path]] = {}
    found = []
    for use, path in paths.items():
        there = existing(path)
        # A folder that cannot be written counts as a volume of its own.
        key = (there.stat().st_dev, there.is_dir() and os.access(there, os.W_OK))
        volumes.setdefault(key, ([], path))[0].append(use)
    for uses, path in volumes.values():
        name = _NAMES[uses[0]]
        found += guarded(name, partial(disk, name, path, uses, home))
    return found


def disk(name: str, path: Path, uses: list[str], home: Path) -> Finding:
    """Space, inodes, and a real write, fsync, read back and rename, with its speed."""
    space = volume(path)
    fix = _elsewhere(uses, home)
    allowed = fix.replace("free some space, or choose a folder on another disk", "choose a folder you may write to")
    data = {
        "path": str(path),
        "uses": uses,
        "total_bytes": space.total,
        "free_bytes": space.free,
        "inodes_free": space.inodes_free,
    }
    if not space.path.is_dir():
        return Finding(name, "fail", f"{path} cannot be made: {space.path} is a file", allowed, data)
    try:
        speed = write_and_read(space.path)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "is full" if full else f"cannot be written: {error.strerror or error}"
        return Finding(name, "fail", f"{path} {why} ({gib(space.free)} free)", fix if full else allowed, data)
    level, lack = _roominess(space)
    inodes = "" if space.inodes_free is None else f", {_short(space.inodes_free)} inodes free"
    also = f" (and {', '.join(uses[1:])})" if len(uses) > 1 else ""
    message = (
        f"{path}{also}: {gib(space.free)} free of {gib(space.total)}{inodes}; {speed:.0f} MB/s written and read back"
    )
    return Finding(name, level, message + lack, fix if lack else None, {**data, "mb_per_s": round(speed, 1)})


def write_and_read(folder: Path, size: int = 4 * MIB) -> float:
    """Writes a file as a checkpoint is written (temporary name, fsync, rename) and compares it; MB/s of the whole."""
    content = os.urandom(size)
    handle, name = tempfile.mkstemp(prefix=".sojourn-doctor-", dir=folder)
    first, second = Path(name), Path(name + ".renamed")
    try:
        start = time.perf_counter()
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        first.replace(second)
        same = second.read_bytes() == content
        took = time.perf_counter() - start
    finally:
        first.unlink(missing_ok=True)
        second.unlink(missing_ok=True)
    if not same:
        raise OSError(errno.EIO, "what was read back is not what was written")
    return size / 1e6 / max(took, 1e-9)


def _roominess(space: Volume) -> tuple[Level, str]:
    if space.free < GIB:
        return "fail", "; less than 1 GiB is left, one checkpoint may not fit"
    if space.inodes_free is not None and space.inodes_free < 100:
        return "fail", "; no files can be made any more (out of inodes)"
    if space.free < 10 * GIB:
        return "warn", "; a 7B model alone takes 15 GB"
    if space.inodes_free is not None and space.inodes_free < 10_000:
        return "warn", "; few inodes are left"
    return "ok", ""


def _elsewhere(uses: list[str], home: Path) -> str:
    if "runs" in uses:
        return "free some space, or choose a folder on another disk: export SOJOURN_HOME=/path/with/room"
    if "downloads" in uses:
        return f"keep downloads with the runs: export HF_HOME={home / 'huggingface'}"
    return f"mkdir -p {home / 'tmp'} && export TMPDIR={home / 'tmp'}"


def _short(count: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.0f}{letter}"
    return str(count)


def shared_memory(folder: Path = Path("/dev/shm")) -> list[Finding]:  # noqa: S108
    """Data-loader workers and multi-GPU runs talk through it; containers often get 64 MiB."""
    if sys.platform != "linux":
        return []
    if not folder.is_dir():
        return [Finding("shared memory", "warn", f"{folder} is not there: keep data workers at 0")]
    space = volume(folder)
    write_and_read(folder, MIB)
    message, data = f"{folder}: {gib(space.total)}", {"total_bytes": space.total, "free_bytes": space.free}
    if space.total < GIB:
        fix = "keep data workers at 0 (num_workers=0); in your own container: docker run --shm-size=8g"
        return [Finding("shared memory", "warn", f"{message}: too small for data-loader workers", fix, data)]
    return [Finding("shared memory", "ok", message, data=data)]


def clock(home: Path) -> Finding:
    """The clock is not behind this version's making, and the disk stamps files with the same time."""
    now = datetime.now(timezone.utc)
    data = {"utc": now.isoformat(timespec="seconds")}
    fix = "set the clock: timedatectl set-ntp true"
    if now.strftime("%Y-%m") < MADE:
        message = f"{now:%Y-%m-%d} is before this version of Sojourn: secure downloads will be refused"
        return Finding("clock", "warn", message, fix, data)
    try:
        with tempfile.NamedTemporaryFile(prefix=".sojourn-doctor-", dir=existing(home)) as file:
            file.write(b".")
            file.flush()
            apart = os.fstat(file.fileno()).st_mtime - time.time()
    except OSError:  # the disk's own finding tells it
        return Finding("clock", "ok", f"{now:%Y-%m-%d %H:%M} UTC", data=data)
    if abs(apart) > 5:
        message = f"the disk of {home} is {apart:+.0f} s off this machine's clock: newest-file rules will err"
        return Finding("clock", "warn", message, fix, {**data, "disk_seconds_off": round(apart, 1)})
    return Finding("clock", "ok", f"{now:%Y-%m-%d %H:%M} UTC, and the disk agrees", data=data)
