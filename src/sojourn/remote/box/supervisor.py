"""Runs one job on a rented box while the laptop is closed: phases in order, restarts, limits, the shutdown gate.

One file, standard library only, Python 3.8 to 3.13; copied to the box. The laptop imports its pure functions.

    supervisor.py start JOBDIR [--again]   detaches, prints its pid; a living one, or a job that is done, stays
    supervisor.py stop JOBDIR              asks for a graceful stop: the trainer saves, the run can be resumed
    supervisor.py status JOBDIR            status.json, with the state "lost" where it died without a terminal state
    supervisor.py inspect HOME [PATH …]    every checkpoint and model with its places, read and hashed; what still runs
    supervisor.py shim JOBDIR PHASE N      internal: owns attempt N of a phase, and starts a dead supervisor again

JOBDIR/
  spec.json            what to do, from the laptop; spec.used.json: the copy that this job runs by
  status.json          where the job stands, replaced every two seconds
  state.json           what a restarted supervisor must not forget: cost, attempt, restarts, how the job ended
  supervisor.json, shim.json, phase-PHASE.json   pid and start time of the processes
  exit-PHASE.json      how the phase ended
  verified.json        every checkpoint and model of the run: files, SHA-256, places
  attached             touched by a laptop that follows; pulled: {"verified": {NAME: DIGEST}}, what it has at home
  stop                 the request to stop; secrets/: 0700; logs/PHASE.log, logs/supervisor.log
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import posixpath
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterable, NamedTuple, NoReturn

try:
    import fcntl
except ImportError:  # Windows: the laptop imports the pure functions only
    fcntl = None  # type: ignore[assignment]

Facts = Dict[str, Any]
TERMINAL = ("done", "stopped", "failed")
MARK = "SOJOURN_JOB"  # in the environment of every process of a phase
SEAL = ".mirror.json"
THIS_FILE = os.path.abspath(globals().get("__file__", "supervisor.py"))


# --- the specification -------------------------------------------------------------------------------------------


class SpecError(Exception):
    """spec.json is wrong; one line."""


_REQUIRED = {"run": str, "home": str, "run_folder": str, "phases": list}
# `spent_before` and `seconds_before`: on other boxes; what the job spent on this one is in state.json.
_DEFAULTS: Facts = {
    "env": {}, "secret_env_files": {}, "price_per_hour": None, "currency": "", "budget": None, "spent_before": 0.0,
    "seconds_before": 0.0, "deadline": None, "stall_minutes": 15.0, "min_free_bytes": 512 << 20, "max_restarts": 3,
    "grace_seconds": 60.0, "hold_minutes": 30.0, "mirror": None, "disks": [], "platform": "generic", "stop": {},
    "notify": [], "heartbeat_seconds": 2.0, "poll_seconds": 0.5, "gpu_seconds": 30.0, "disk_seconds": 10.0,
    "backoff_seconds": 5.0, "lease_seconds": 30.0, "notify_seconds": 10.0, "shim_seconds": 1.0,
}  # fmt: skip
_NUMBERS_OR_NULL = ("price_per_hour", "budget", "deadline")


def parse_spec(data: bytes) -> Facts:
    """With every default filled in. Raises `SpecError` with the key that is wrong."""
    try:
        found = json.loads(data.decode("utf-8"))
    except ValueError:
        raise SpecError("not valid JSON") from None
    if not isinstance(found, dict) or found.get("version") != 1:
        raise SpecError("not a specification of version 1")
    for key, kind in _REQUIRED.items():
        if key not in found:
            raise SpecError(f"{key}: missing")
        if not isinstance(found[key], kind) or not found[key]:
            raise SpecError(f"{key}: {found[key]!r} is not a {kind.__name__} with content")
    spec = {**_DEFAULTS, **{key: value for key, value in found.items() if value is not None}}
    for key, default in _DEFAULTS.items():
        value = spec[key]
        if isinstance(default, (int, float)) or (key in _NUMBERS_OR_NULL and value is not None):
            if type(value) not in (int, float) or not 0 <= value < 1e15:
                raise SpecError(f"{key}: {value!r} is not a number from 0")
        elif default is not None and not isinstance(value, type(default)):
            raise SpecError(f"{key}: {value!r} is not a {type(default).__name__}")
    if spec["budget"] is not None and spec["price_per_hour"] is None:
        raise SpecError("budget: needs price_per_hour")
    for index, phase in enumerate(spec["phases"]):
        name, argv = (phase.get("name"), phase.get("argv")) if isinstance(phase, dict) else (None, None)
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            raise SpecError(f"phases[{index}].name: {name!r} is not a plain name")
        if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
            raise SpecError(f"phases[{index}].argv: {argv!r} is not a list of words")
    if len({phase["name"] for phase in spec["phases"]}) < len(spec["phases"]):
        raise SpecError("phases: two have the same name")
    return {**spec, "hash": hashlib.sha256(data).hexdigest()[:16]}


def read_spec(path: Path) -> Facts:
    try:
        return parse_spec(path.read_bytes())
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    except SpecError as error:
        raise SpecError(f"{path}: {error}; write it anew with: sojourn launch") from None


# --- files and processes -----------------------------------------------------------------------------------------


def read_json(path: Path) -> Facts:
    """Empty where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_file(path: Path, data: bytes, sync: bool = True) -> None:
    """Atomically. On a full disk, what must be kept (`sync`) takes the place of the job's reserve."""
    stage = path.with_name(f".{path.name}.{os.getpid()}")
    for attempt in (1, 2):
        try:
            with open(stage, "wb") as file:
                file.write(data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            return os.replace(stage, path)
        except OSError as error:
            _remove(stage)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not sync or attempt == 2:
                raise
            _remove(path.parent / ".reserve")
    return None


def write_json(path: Path, value: Facts, sync: bool = True) -> None:
    write_file(path, (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "replace"), sync)


def _remove(*paths: Path) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def tail(path: Path, start: int = 0, most: int = 16384) -> str:
    """What was written after byte `start`, or the end of it."""
    try:
        with open(path, "rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - most, 0))
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


def last_line(text: str) -> str:
    """The last line that says something, without colours and overwritten progress bars."""
    plain = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in re.split(r"[\r\n]+", text)]
    return next((line[:400] for line in reversed(plain) if line), "")


def uptime() -> float:
    """Seconds since the machine booted: no clock that anybody sets."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def start_time(pid: Any) -> str | None:
    """The boot, and the clock ticks after it; None where there is no such process, or only its zombie."""
    try:
        fields = Path(f"/proc/{int(pid)}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else f"{boot_id()}/{int(fields[19])}"
    except (OSError, ValueError, TypeError, IndexError):
        return None


def is_alive(pid: Any, started: Any) -> bool:
    """A pid alone is not enough: it is reused, and after a reboot it is another process."""
    return isinstance(started, str) and start_time(pid) == started


def identity(pid: int) -> Facts:
    return {"pid": pid, "started": start_time(pid)}


def lives(record: Any) -> bool:
    return isinstance(record, dict) and is_alive(record.get("pid"), record.get("started"))


def processes_of(job: Path) -> list[int]:
    """Every process of a phase of this job, whoever its parent is now."""
    mark, found = os.fsencode(f"{MARK}={job}"), []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.append(int(entry))
    return [pid for pid in found if start_time(pid) is not None]


def cpu_ticks(pids: Iterable[int]) -> int:
    """CPU time of these processes and of the children that they have waited for."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total


def kill_all(job: Path) -> None:
    """SIGKILL until none is left: a process may fork while the list is read. One that cannot die is not waited for."""
    for _ in range(100):
        left = processes_of(job)
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def lock(path: Path) -> IO[bytes] | None:
    """A lock that ends with this process; None where another process has it."""
    file = open(path, "ab")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except OSError as error:
        file.close()
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise


def read_status(job: Path) -> Facts:
    """status.json; the state is "lost" where it is not terminal and its supervisor is gone."""
    status = read_json(job / "status.json")
    if status.get("state") in TERMINAL or lives(status):
        return status
    if lives(read_json(job / "supervisor.json")):
        return {"state": "starting", **status}
    if not (job / "status.json").exists():
        return {"state": "none", "message": f"{job}: no job was started here", "resumable": False}
    message = "the supervisor ended without a terminal state; launch again to resume"
    return {**status, "state": "lost", "reason": "lost", "message": message, "resumable": True}


# --- decisions, without effects ----------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What the shutdown gate says. `reason`: why it refused, and what to type."""

    allowed: bool
    reason: str


def survival(path: str, disks: Iterable[Facts]) -> Facts:
    """The disk that `path` lies on: of those that contain it the longest; {} where none does. Without links."""
    best, length = {}, -1
    parts = [part for part in posixpath.normpath(path).split("/") if part]
    for disk in disks:
        root = [part for part in posixpath.normpath(str(disk.get("path"))).split("/") if part]
        if str(disk.get("path")).startswith("/") and parts[: len(root)] == root and len(root) > length:
            best, length = disk, len(root)
    return best


def place_survives(place: Facts, action: str, disks: Iterable[Facts]) -> bool:
    """Whether this copy is verified, and still there after the action for as long as anybody may need it."""
    if not place.get("verified") or place.get("kind") in ("home", "hub"):
        return bool(place.get("verified"))
    disk = survival(str(place.get("path")), disks)
    return disk.get("survives") in (("release",) if action == "release" else ("stop", "release")) and not disk.get(
        "kept_hours"
    )


def is_known_platform(platform: str) -> bool:
    return platform not in ("", "generic", "unknown")


def gate(platform: str, action: str, disks: list[Facts], items: list[Facts] | None, run: str = "RUN") -> Verdict:
    """Whether this box may be powered off or released. `items`: every checkpoint and model with its places; None where
    they could not be read."""
    if action not in ("power_off", "release"):
        return Verdict(False, f"{action!r} is not an action; type power_off or release")
    if not is_known_platform(platform):
        return Verdict(False, "a box of an unknown platform is never powered off or released; do it in its own console")
    if items is None:
        return Verdict(False, f"the run folder could not be read; check its disk, then: sojourn pull {run} --what all")
    for item in items:
        if not any(place_survives(place, action, disks) for place in item["places"]):
            command = f"sojourn pull {item.get('run') or run} --what all"
            return Verdict(False, f"{_why_lost(item, action, disks)}; on your laptop, type: {command}")
    return Verdict(True, "")


def _why_lost(item: Facts, action: str, disks: list[Facts]) -> str:
    good = [place for place in item["places"] if place.get("verified")]
    if not good:
        damage = next((place["damage"] for place in item["places"] if place.get("damage")), "none is verified")
        return f"{item['name']} has no verified copy ({damage})"
    disk = survival(str(good[0]["path"]), disks)
    if disk.get("kept_hours") and action == "power_off":
        return f"{item['name']} lies only on {disk['path']}, which is wiped {disk['kept_hours']:g} h after a power-off"
    what = "release" if action == "release" else "power-off"
    return f"{item['name']} lies only in {good[0]['path']}, which does not survive a {what}"


def after_exit(
    code: int | None, asked: str | None, restartable: bool, restarts: int, most: int, gpu: str | None
) -> tuple[str, str]:
    """What follows the end of a phase: next, restart, stopped or failed; and the reason. `asked`: why the supervisor
    stopped it; `code` is None where nobody saw the end; `gpu`: a GPU error in its last lines."""
    if code == 0:
        return "next", ""
    if asked == "gpu" or (gpu is not None and asked in (None, "stall")):
        return "failed", "gpu"
    if asked is not None and asked != "stall":
        return "stopped", asked
    if code == 3:
        return "stopped", "limit"
    if code in (2, 127):
        return "failed", "input" if code == 2 else "start"
    return "restart" if restartable and restarts < most else "failed", asked or "crash"


def budget_threshold(budget: float, price_per_hour: float, grace_seconds: float) -> float:
    """Where the trainer is asked to stop, so that its last save still fits into the budget."""
    return budget - min(price_per_hour * grace_seconds / 3600, 0.1 * budget)


# Xids that mean broken hardware. 13, 31, 43 and 45 are the program's own faults, or follow a SIGKILL.
HARDWARE_XIDS = frozenset({48, 62, 64, 74, 79, 94, 95, 119, 120, 140})
_XID = re.compile(r"\bXid\b(?:\s*\(PCI:([0-9a-fA-F:.]+)\))?\D*?:\s*(\d+)")
_BROKEN = re.compile(
    "uncorrectable ECC|ECCUncorrectable|fallen off the bus|fell off the bus|GPU is lost|determine the device handle",
    re.I,
)


def gpu_error_in(text: str, buses: Iterable[str] = ()) -> str | None:
    """The first line that says a GPU is broken. `buses`: PCI addresses of this box's GPUs, where known: the kernel's
    log also has those of other tenants."""
    known = {_bus(bus) for bus in buses}
    for line in text.splitlines():
        xid = _XID.search(line)
        ours = xid is None or not xid[1] or not known or _bus(xid[1]) in known
        if ours and (_BROKEN.search(line) or (xid and int(xid[2]) in HARDWARE_XIDS)):
            return line.strip()[:200]
    return None


def _bus(address: str) -> str:
    """`00000000:3B:00.0` of nvidia-smi and `0000:3b:00` of the kernel are the same GPU."""
    return address.strip().lower().partition(".")[0].lstrip("0:")


# --- checkpoints and models, and where each of them lies -----------------------------------------------------------


Tick = Callable[[], None]
FindDamage = Callable[[Path, Dict[str, Facts]], "str | None"]


def hash_files(folder: Path, tick: Tick = lambda: None) -> dict[str, Facts]:
    """Size and SHA-256 by relative path, without a mirror's seal."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name == SEAL or not path.is_file():
            continue
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(8 << 20), b""):
                digest.update(chunk)
                tick()
        found[name] = {"size": path.stat().st_size, "sha256": digest.hexdigest()}
    return found


def digest_of(files: dict[str, Facts]) -> str:
    """One digest for a folder: two copies with the same digest are byte-identical."""
    lines = [f"{files[name]['sha256']} {files[name]['size']} {name}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def checkpoint_damage(folder: Path, files: dict[str, Facts]) -> str | None:
    manifest = read_json(folder / "manifest.json")
    if not manifest:
        return "no readable manifest.json"
    wrong = [name for name, listed in manifest.items() if files.get(name) != listed]
    return f"{wrong[0]} does not match manifest.json" if wrong else None


def model_damage(folder: Path, files: dict[str, Facts]) -> str | None:
    """final/ and best/ have no manifest: what must be there is there, and every weight file is as long as it says."""
    if "config.json" not in files and "adapter_config.json" not in files:
        return "neither config.json nor adapter_config.json"
    weights = {name for name in files if name.endswith(".safetensors")}
    for index in (name for name in files if name.endswith(".safetensors.index.json")):
        weights |= set((read_json(folder / index).get("weight_map") or {"": "weight_map"}).values())
    if not weights:
        return "no .safetensors file"
    return next((f"{name} is not whole" for name in sorted(weights) if not _is_whole(folder / name)), None)


def _is_whole(safetensors: Path) -> bool:
    try:
        with open(safetensors, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, 100 << 20)).decode("utf-8"))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            return os.fstat(file.fileno()).st_size == 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return False


def item_folders(run: Path) -> list[tuple[str, Path]]:
    """Every checkpoint and model of a run; also a checkpoint that was saved elsewhere because the disk failed."""
    checkpoints = sorted(path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name))
    found = [(f"checkpoints/{path.name}", path) for path in checkpoints]
    found += [(name, run / name) for name in ("final", "best") if (run / name).is_dir()]
    rescued = re.search(r"save\.resume=(/\S+)", str(read_json(run / "status.json").get("message")))
    return found + ([("rescued", Path(rescued[1]))] if rescued and Path(rescued[1]).is_dir() else [])


def inspect_run(run: Path, mirror: str | None, tick: Tick = lambda: None) -> list[Facts]:
    """Every checkpoint and model of a run: its files, what is wrong with it, and its places. Every byte is read."""
    on_hub = _names_on_hub(run, mirror)
    items = []
    for name, folder in item_folders(run):
        find_damage = model_damage if name in ("final", "best") else checkpoint_damage
        files = hash_files(folder, tick)
        damage, digest = find_damage(folder, files), digest_of(files)
        places = [_disk_place(folder, damage)]
        if mirror and not mirror.startswith("hub:"):
            copy = Path(os.path.expanduser(mirror)) / run.name / name
            wrong = _mirror_damage(copy, find_damage, None if damage else files, tick)
            places.append({**_disk_place(copy, wrong), "mirror": True})
        if name in on_hub:
            places.append({"kind": "hub", "path": mirror, "verified": True, "mirror": True})
        items.append(
            {"run": run.name, "name": name, "digest": digest, "files": files, "damage": damage, "places": places}
        )
    return items


def _disk_place(folder: Path, damage: str | None) -> Facts:
    return {"kind": "disk", "path": os.path.realpath(folder), "verified": damage is None, "damage": damage}


def _mirror_damage(copy: Path, find_damage: FindDamage, files: dict[str, Facts] | None, tick: Tick) -> str | None:
    """`files`: what must be there, where the original is whole. A damaged original may have a good copy."""
    try:
        if not copy.is_dir():
            return "not in the mirror"
        found = hash_files(copy, tick)
        return "the copy in the mirror differs" if files not in (None, found) else find_damage(copy, found)
    except OSError as error:
        return f"the mirror cannot be read: {error.strerror}"


def _names_on_hub(run: Path, mirror: str | None) -> set[str]:
    """What the trainer has copied there and compared with the hub's own hashes, as its events say."""
    if not mirror or not mirror.startswith("hub:"):
        return set()
    names = {"final", "best"} if read_json(run / "status.json").get("state") == "done" else set()
    with contextlib.suppress(OSError), open(run / "events.jsonl", encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, AttributeError):
                event = json.loads(line)
                if event.get("kind") == "mirrored" and str(event.get("where")).endswith(" " + mirror[4:]):
                    names.add(f"checkpoints/{event.get('path')}")
    return names


def with_home_copies(items: Iterable[Facts], copies: Facts) -> list[Facts]:
    """`copies`: name and digest of what the laptop has verified. A copy of something damaged saves nothing."""
    home = {"kind": "home", "path": "", "verified": True}
    return [
        {**item, "places": [*item["places"], home]}
        if not item.get("damage") and item.get("digest", "") == copies.get(item["name"])
        else item
        for item in items
    ]


def pulled_copies(job: Path) -> Facts:
    found = read_json(job / "pulled").get("verified")
    return found if isinstance(found, dict) else {}


def problems(items: list[Facts], mirror: str | None, is_done: bool) -> list[str]:
    """Why the run is not verified. The mirror must have the newest checkpoint and, once it is done, the models; an
    older checkpoint may have been waiting for its removal."""
    newest = max((item["name"] for item in items if item["name"].startswith("checkpoints/")), default=None)
    found = [] if not is_done or any(item["name"] == "final" for item in items) else ["final: missing"]
    for item in items:
        found += [f"{item['name']}: {item['damage']}"] if item["damage"] else []
        copies = [place for place in item["places"] if place.get("mirror")]
        needed = item["name"] == newest or (is_done and item["name"] in ("final", "best"))
        damage = copies[0].get("damage") if copies else "not in the mirror"
        if mirror and damage and (needed or damage != "not in the mirror"):
            found.append(f"{item['name']}: {damage}")
    return found


def other_items(run: Path, job: Path) -> list[Facts]:
    """Those of other runs on this box. What lies on a disk that survives is not touched by a power-off, so it is not
    read again; other copies count as their own job has verified them."""
    found = []
    for other in sorted(path for path in run.parent.iterdir() if path.is_dir()) if run.parent.is_dir() else []:
        if os.path.realpath(other) == os.path.realpath(run):
            continue
        record = job.parent / other.name
        known = {item["name"]: item for item in read_json(record / "verified.json").get("items", [])}
        for item in with_home_copies(known.values(), pulled_copies(record)):
            known[item["name"]] = item
        for name, folder in item_folders(other):
            places = [_disk_place(folder, None), *known.get(name, {}).get("places", [])]
            found.append({"run": other.name, "name": f"{other.name}/{name}", "places": places})
    return found


def running_here(home: Path) -> list[str]:
    """Runs that train on this box, launched or started by hand."""
    names = {path.parent.name for path in home.glob(".sojourn/jobs/*/supervisor.json") if lives(read_json(path))}
    for path in home.glob("runs/*/status.json"):
        status, ticks = read_json(path), os.sysconf("SC_CLK_TCK")
        started = (start_time(status.get("pid")) or "").rpartition("/")[2]
        if status.get("state") in ("starting", "running") and started:
            names |= {path.parent.name} if abs(int(started) / ticks - float(status.get("started") or 0)) < 1 else set()
    return sorted(names)


# --- watches -----------------------------------------------------------------------------------------------------


class GpuWatch:
    """nvidia-smi and the kernel's log, asked in a thread: either may hang. `error`: how a GPU broke."""

    QUERY = "--query-gpu=pci.bus_id,utilization.gpu,ecc.errors.uncorrected.volatile.total"

    def __init__(self, interval: float) -> None:
        self.error: str | None = None
        self.shows_load, self.busy_at = False, time.monotonic()
        self._ecc: dict[str, int] = {}  # by GPU, at its first reading
        self._failures, self._old_lines = 0, None  # type: tuple[int, set[str] | None]
        self._tool, self._dmesg = shutil.which("nvidia-smi"), shutil.which("dmesg")
        if self._tool is not None:
            threading.Thread(target=self._work, args=(interval,), daemon=True).start()

    def _work(self, interval: float) -> None:
        while self.error is None:
            self._read_gpus(*_answer([str(self._tool), self.QUERY, "--format=csv,noheader,nounits"]))
            if self._dmesg is not None and self._ecc:
                self._read_kernel_log(*_answer([self._dmesg]))
            time.sleep(interval)

    def _read_gpus(self, code: int | None, text: str) -> None:
        broken = gpu_error_in(text)
        self._failures = 0 if code == 0 else self._failures + 1
        if broken is not None:
            self.error = f"nvidia-smi: {broken}"
        elif self._failures >= 3 and self._ecc:  # once may be chance; a box without its GPU never answers
            self.error = f"nvidia-smi failed {self._failures} times in a row: {last_line(text) or 'no answer'}"
        if self.error is not None or code != 0:
            return
        rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 2]
        for gone in sorted(set(self._ecc) - {row[0] for row in rows}):
            self.error = f"nvidia-smi no longer lists the GPU {gone}"
        for bus, load, ecc in rows:
            self.shows_load = self.shows_load or load.isdigit()  # a MIG slice shows none
            if load.isdigit() and int(load) > 5:
                self.busy_at = time.monotonic()
            errors = int(ecc) if ecc.isdigit() else 0
            if errors > self._ecc.setdefault(bus, errors):
                self.error = f"uncorrectable ECC errors of the GPU {bus} rose from {self._ecc[bus]} to {errors}"

    def _read_kernel_log(self, code: int | None, text: str) -> None:
        """Only lines that were not there at the first reading. A container may not be allowed to read any."""
        lines = {line for line in text.splitlines() if "NVRM" in line}
        new = sorted(lines - (lines if self._old_lines is None else self._old_lines))
        if code == 0:
            self._old_lines = lines | (self._old_lines or set())
        found = gpu_error_in("\n".join(new), self._ecc)
        self.error = self.error or (f"kernel log: {found}" if found else None)


def _answer(argv: list[str]) -> tuple[int | None, str]:
    """Exit code and output; a program that hangs in the driver, where no signal reaches it, is left behind."""
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return None, str(error)
    try:
        output = process.communicate(timeout=60)[0]
        return process.returncode, output.decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        process.kill()
        return None, "no answer in 60 s"


class StallWatch:
    """Whether a phase has given no sign of life for too long. From when its trainer lives, by the monotonic clock."""

    def __init__(self, seconds: float, job: Path, gpu: GpuWatch) -> None:
        self._seconds, self._job, self._gpu = seconds, job, gpu
        self._signs: tuple[int, ...] = ()
        self._sign_at = self._cpu_at = time.monotonic()
        self._sample_due, self._ticks = 0.0, -1
        self._first_step: int | None = None

    def poll(self, step: int, metrics: Path, log: Path) -> bool:
        now = time.monotonic()
        self._first_step = step if self._first_step is None else self._first_step
        signs = (step, file_size(metrics), file_size(log))
        if signs != self._signs:
            self._signs, self._sign_at = signs, now
        if now >= self._sample_due:  # less than 1 % of a core is standing still
            interval, ticks = min(30.0, max(0.2, self._seconds / 4)), cpu_ticks(processes_of(self._job))
            if ticks < self._ticks or ticks - self._ticks > 0.01 * interval * os.sysconf("SC_CLK_TCK"):
                self._cpu_at = now
            self._ticks, self._sample_due = ticks, now + interval
        if not self._seconds or now - self._sign_at < self._seconds:
            return False
        if self._gpu.shows_load and now - self._gpu.busy_at < self._seconds:
            return False
        # Preparing, loading and compiling use the CPU alone: an idle GPU means a stall only after a step was made.
        return (self._gpu.shows_load and step > self._first_step) or now - self._cpu_at >= self._seconds


def free_bytes(path: Path) -> int | None:
    """Of the disk that `path` is on, or will be on."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


# --- notifications -----------------------------------------------------------------------------------------------


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A token is sent to the address that the user gave, and to no other."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def notification_request(entry: Facts, secret: str, message: Facts) -> urllib.request.Request:
    kind, title, text = entry.get("kind"), str(message["title"]), str(message["text"])
    headers, body = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "sojourn"}, dict(message)
    if kind == "webhook":
        url, body = secret, {**message, "content": f"{title}: {text}"}
    elif kind == "autodl":
        url, headers["Authorization"] = "https://www.autodl.com/api/v1/wechat/message/send", secret
        body = {"title": title, "name": str(message["run"]), "content": text}
    elif kind == "serverchan":
        newer = re.match(r"sctp(\d+)t", secret)
        base = f"https://{newer[1]}.push.ft07.com/send/" if newer else "https://sctapi.ftqq.com/"
        url, body = f"{base}{secret}.send", {"title": title, "desp": text}
    elif kind == "bark":  # a key, or the address of one's own server with the key
        server, _, key = secret.rstrip("/").rpartition("/")
        url, body = f"{server or 'https://api.day.app'}/push", {"device_key": key, "title": title, "body": text}
    else:
        raise ValueError(f"unknown kind {kind!r}")
    url = str(entry.get("url") or url)
    if not url.startswith(("https://", "http://")):
        raise ValueError("its address does not start with https://")
    return urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")  # noqa: S310


def send_notification(entry: Facts, secret: str, message: Facts, timeout: float) -> str | None:
    """None, or why it failed; never waits longer than `timeout` seconds."""
    failure: list[str | None] = ["no answer in time"]

    def work() -> None:
        try:
            if entry.get("kind") == "command":
                text = f"{message['title']}\n\n{message['text']}\n".encode("utf-8", "replace")
                argv = entry.get("argv") or shlex.split(secret)
                subprocess.run(argv, input=text, timeout=timeout, check=True, stdout=subprocess.DEVNULL)
            else:
                opener = urllib.request.build_opener(_NoRedirects())
                with opener.open(notification_request(entry, secret, message), timeout=timeout) as answer:
                    answer.read(4096)
            failure[0] = None
        except urllib.error.HTTPError as error:
            failure[0] = f"HTTP {error.code}"
        except subprocess.CalledProcessError as error:
            failure[0] = f"exit code {error.returncode}"
        except Exception as error:  # whatever a server answers
            failure[0] = type(error).__name__

    thread = threading.Thread(target=work, daemon=True)  # a name lookup has no timeout of its own
    thread.start()
    thread.join(timeout)
    return failure[0]


# --- the supervisor ----------------------------------------------------------------------------------------------


class Supervisor:
    """Owns the job while it holds the lock. What it must not forget is in state.json before it acts."""

    def __init__(self, job: Path, spec: Facts, signals: list[int]) -> None:
        self.job, self.spec, self.run_folder, self.signals = job, spec, Path(spec["run_folder"]), signals
        self.state, old = read_json(job / "state.json"), read_json(job / "status.json")
        if not isinstance(self.state.get("seconds"), float):  # damaged: the status knows the cost too
            self.state["seconds"] = max(0.0, float(old.get("seconds") or 0) - spec["seconds_before"])
            self.state["money"] = max(0.0, float(old.get("money") or 0) - spec["spent_before"])
        self.gpu, self.me = GpuWatch(spec["gpu_seconds"]), identity(os.getpid())
        self.status: Facts = {
            "state": "starting", "phase": "", "message": "", "exit_code": None, "resumable": True, "reason": "",
            "step": 0, "total_steps": 0, "verified": False, "stop_action": "none",
        }  # fmt: skip
        self.shim: subprocess.Popen[bytes] | None = None
        self.shim_due = self.heartbeat_due = self.disk_due = 0.0
        self.billed_at = uptime()
        left = None if spec["deadline"] is None else spec["deadline"] - time.time()
        self.deadline = None if left is None else time.monotonic() + left  # the clock may be set meanwhile
        texts = [path.read_text(errors="replace").strip() for path in job.glob("secrets/*") if path.is_file()]
        self.secrets = sorted((text for text in texts if len(text) >= 6), key=len, reverse=True)
        files = [job / str(entry.get("secret", ".")) for entry in spec["notify"]]
        self.notify_secrets = [file.read_text(errors="replace").strip() if file.is_file() else "" for file in files]

    # status and cost

    def scrub(self, text: str) -> str:
        """A trainer's last line, or an error, may quote a secret."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text

    def log(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self.scrub(text)}", flush=True)

    def set(self, **facts: Any) -> None:
        """Changes the status and writes it at once."""
        self.status.update(facts)
        self.status["message"] = self.scrub(self.status["message"])
        self.heartbeat(sync=True)

    def remember(self, **facts: Any) -> None:
        self.state.update(facts)
        self.heartbeat(sync=True)

    def bill(self, seconds: float) -> None:
        self.state["seconds"] += seconds
        self.state["money"] += (self.spec["price_per_hour"] or 0.0) * seconds / 3600

    @property
    def money(self) -> float | None:
        """Of the whole run; None where the price is not known."""
        unknown = self.spec["price_per_hour"] is None and not self.spec["spent_before"]
        return None if unknown else float(self.spec["spent_before"] + self.state["money"])

    def heartbeat(self, sync: bool = False) -> None:
        now = uptime()
        self.bill(max(0.0, now - self.billed_at))
        self.billed_at = self.state["uptime"] = now
        self.state["boot"] = boot_id()
        self.heartbeat_due = time.monotonic() + self.spec["heartbeat_seconds"]
        facts = {
            **self.status, **self.me, "run": self.spec["run"], "spec": self.spec["hash"], "updated": time.time(),
            "seconds": self.spec["seconds_before"] + self.state["seconds"], "money": self.money,
            "currency": self.spec["currency"], "restarts": self.state.get("total_restarts", 0),
        }  # fmt: skip
        for name, value in (("status.json", facts), ("state.json", self.state)):
            try:
                write_json(self.job / name, value, sync)
            except OSError as error:
                self.log(f"{name} could not be written: {error.strerror}")

    def pause(self, seconds: float = 0.0) -> None:
        """The heartbeat, and a wait; also called from long work."""
        if time.monotonic() >= self.heartbeat_due:
            self.read_progress()
            self.heartbeat()
        time.sleep(seconds)

    def read_progress(self) -> int:
        """The step of the run. One that was never reached before gives the trainer all its restarts back."""
        status = read_json(self.run_folder / "status.json")
        steps = re.findall(r'"step": ?(\d+)', tail(self.run_folder / "metrics.jsonl", 0, 4096))
        written = status.get("step") if type(status.get("step")) is int else 0
        self.status["step"] = max(int(steps[-1]) if steps else 0, int(written or 0))
        self.status["total_steps"] = status.get("total_steps", 0)
        if self.status["step"] > self.state.get("best_step", 0):
            self.state.update(best_step=self.status["step"], restarts=0)
        return int(self.status["step"])

    # the course of a job

    def run(self) -> None:
        with contextlib.suppress(OSError):
            (self.job / ".reserve").write_bytes(b"\1" * (256 << 10))
        self.bill_gap()
        self.set(state="running")
        outcome = self.state.get("outcome")
        if not isinstance(outcome, dict):
            outcome = self.run_phases()
            self.log(f"{outcome['state']}: {outcome['message']}")
            self.remember(outcome=outcome)
        self.finish(outcome)

    def bill_gap(self) -> None:
        """The time in which a phase ran without a supervisor: until this one began to count, or the phase ended."""
        name, last = str(self.state.get("phase")), self.state.get("uptime")
        ended = read_json(self.job / f"exit-{name}.json")
        until = ended.get("uptime") if ended.get("attempt") == self.state.get("attempt") else None
        until = self.billed_at if lives(self.trainer(name)) else until
        if self.state.get("boot") == boot_id() and isinstance(last, float) and isinstance(until, float):
            self.bill(max(0.0, min(until, self.billed_at) - last))

    def run_phases(self) -> Facts:
        for phase in self.spec["phases"]:
            ended = read_json(self.job / f"exit-{phase['name']}.json")
            outcome = None if ended.get("code") == 0 and ended.get("argv") == phase["argv"] else self.run_phase(phase)
            if outcome is not None:
                return outcome
        return self.outcome("done", "", f"{self.spec['run']} is done", 0)

    def outcome(self, state: str, reason: str, message: str, code: int | None) -> Facts:
        resumable = state == "stopped" or (state == "failed" and reason not in ("input", "start"))
        facts = {"state": state, "reason": reason, "exit_code": code, "resumable": resumable}
        return {**facts, "message": self.scrub(message), "phase": self.state.get("phase", "")}

    def run_phase(self, phase: Facts) -> Facts | None:
        """None where the next phase may start."""
        while True:
            limit = self.find_limit()
            if limit is not None and self.attempt_under_way(phase) is None:
                return self.outcome("stopped", *limit, None)
            self.start_phase(phase)
            asked, detail = self.watch(phase)
            code, text = self.exit_of(phase)
            self.log(f"{phase['name']} ended: {text}")
            kill_all(self.job)  # workers that their parent left behind would hold the GPU
            output = tail(self.log_of(phase), self.state.get("log_start", 0))
            gpu = gpu_error_in(output) if phase.get("restart") else None
            restarts, most = self.state.get("restarts", 0), self.spec["max_restarts"]
            what, reason = after_exit(code, asked, bool(phase.get("restart")), restarts, most, gpu)
            if what == "next":
                return None
            if what != "restart":
                message = self.describe_end(phase, reason, detail or gpu or "", text, last_line(output))
                unsaved = what == "stopped" and phase.get("restart") and code != 3
                return self.outcome(
                    what, reason, message + (f" (it ended without a save: {text})" if unsaved else ""), code
                )
            self.remember(restarts=restarts + 1, total_restarts=self.state.get("total_restarts", 0) + 1)
            wait = min(300.0, self.spec["backoff_seconds"] * 2**restarts)
            self.set(message=f"{detail or text}; restart {restarts + 1} of {most} in {wait:.0f} s", reason=reason)
            until = time.monotonic() + wait
            while time.monotonic() < until and self.find_limit() is None:
                self.pause(self.spec["poll_seconds"])

    def describe_end(self, phase: Facts, reason: str, detail: str, text: str, line: str) -> str:
        if reason in ("limit", "input"):
            return line or f"{phase['name']}: {text}"
        if reason == "gpu":
            return f"GPU error: {detail}; use another machine, then launch again to resume"
        if reason in ("crash", "stall", "start"):
            tried = (
                f" after {self.state.get('restarts', 0)} restarts without a new step" if phase.get("restart") else ""
            )
            return f"{phase['name']} failed{tried} ({detail or text}){': ' + line if line else ''}"
        return detail

    def find_limit(self) -> tuple[str, str] | None:
        """Why nothing more may run: reason and message."""
        spec = self.spec
        if self.signals:
            return "signal", f"the supervisor got signal {int(self.signals[0])}; launch again to resume"
        if (self.job / "stop").exists() or not self.job.is_dir():
            return "stop", "stopped as asked; launch again to resume"
        if spec["budget"] is not None:
            spent = (self.money or 0.0) + spec["price_per_hour"] * (uptime() - self.billed_at) / 3600
            if spent >= budget_threshold(spec["budget"], spec["price_per_hour"], spec["grace_seconds"]):
                amounts = f"the budget of {spec['budget']:g} {spec['currency']} is used up ({spent:.2f} spent)"
                return "budget", f"{amounts}; launch again with a higher one to resume"
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return "deadline", "the deadline has come; launch again with a later one to resume"
        if spec["min_free_bytes"] and time.monotonic() >= self.disk_due:
            self.disk_due = time.monotonic() + spec["disk_seconds"]
            for path in (self.run_folder, Path(spec["home"])):
                free = free_bytes(path)
                if free is not None and free < spec["min_free_bytes"]:
                    self.disk_due = 0.0
                    return "disk", f"{path}: only {free / 2**20:,.0f} MiB are free; free some space, then launch again"
        return None

    # one phase

    def log_of(self, phase: Facts) -> Path:
        return self.job / "logs" / f"{phase['name']}.log"

    def trainer(self, name: str) -> Facts:
        found = read_json(self.job / f"phase-{name}.json").get("trainer")
        return found if isinstance(found, dict) else {}

    def attempt_under_way(self, phase: Facts) -> int | None:
        """The attempt that lives, has ended unseen, or is about to be started by its shim: also without state.json."""
        shim, ended = read_json(self.job / "shim.json"), read_json(self.job / f"exit-{phase['name']}.json")
        record = read_json(self.job / f"phase-{phase['name']}.json")
        if lives(shim) and shim.get("phase") == phase["name"] and shim.get("attempt") != ended.get("attempt"):
            return int(shim["attempt"])
        if lives(record.get("trainer")):
            return int(record["attempt"])
        known = self.state.get("phase") == phase["name"] and not self.state.get("attempt_over", True)
        return int(self.state["attempt"]) if known else None

    def start_phase(self, phase: Facts) -> None:
        """Adopts the attempt under way, or makes another one: its shim starts it."""
        attempt = self.attempt_under_way(phase)
        if attempt is None:
            attempt, self.state["log_start"] = time.time_ns(), max(0, file_size(self.log_of(phase)))
            self.shim = None  # the one before guards until this one's has taken over
        self.remember(phase=phase["name"], attempt=attempt, attempt_over=False)
        self.set(state="running", phase=phase["name"], message="", reason="")
        self.log(f"{phase['name']} runs, attempt {attempt}")

    def has_ended(self, phase: Facts) -> bool:
        """Starts a shim where the attempt has none."""
        attempt, shim = self.state["attempt"], read_json(self.job / "shim.json")
        if read_json(self.job / f"exit-{phase['name']}.json").get("attempt") == attempt:
            return True
        alive = (shim.get("attempt") == attempt and lives(shim)) or (self.shim is not None and self.shim.poll() is None)
        if not alive and time.monotonic() >= self.shim_due:
            self.shim_due = time.monotonic() + 5 * self.spec["shim_seconds"]
            argv = [sys.executable, THIS_FILE, "shim", str(self.job), phase["name"], str(attempt)]
            with open(self.log_of(phase), "ab") as log:
                self.shim = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
                )
        return False

    def watch(self, phase: Facts) -> tuple[str | None, str]:
        """Until the phase has ended: why the supervisor stopped it, and in words."""
        asked: tuple[str | None, str] = (None, "")
        stall: StallWatch | None = None
        kill_at = 0.0
        self.shim_due = 0.0
        while not self.has_ended(phase):
            trainer = self.trainer(phase["name"])
            if stall is None and lives(trainer):
                stall = StallWatch(self.spec["stall_minutes"] * 60, self.job, self.gpu)
            if asked[0] is None:
                asked = self.find_reason(phase, stall)
                if asked[0] is not None:
                    kill_at = time.monotonic()
                    self.log(f"stopping {phase['name']}: {asked[1]}")
                    self.set(message=f"stopping: {asked[1]}", reason=asked[0])
                    if asked[0] != "stall" and lives(trainer):
                        with contextlib.suppress(OSError):
                            os.kill(trainer["pid"], signal.SIGTERM)
                        kill_at += self.spec["grace_seconds"]
            elif time.monotonic() >= kill_at:
                kill_all(self.job)
                if not self.job.is_dir():
                    break
                if time.monotonic() >= kill_at + 60:  # the driver of a broken GPU holds them
                    return "gpu", f"its processes cannot be killed ({asked[1]})"
            self.pause(self.spec["poll_seconds"])
        self.read_progress()
        self.remember(attempt_over=True)
        return asked

    def find_reason(self, phase: Facts, stall: StallWatch | None) -> tuple[str | None, str]:
        limit = self.find_limit()
        if limit is not None:
            return limit
        if self.gpu.error is not None and phase.get("restart"):
            return "gpu", self.gpu.error
        metrics = self.run_folder / "metrics.jsonl"
        if stall is not None and stall.poll(self.read_progress(), metrics, self.log_of(phase)):
            return "stall", f"no sign of progress for {self.spec['stall_minutes']:g} min while nothing was computed"
        return None, ""

    def exit_of(self, phase: Facts) -> tuple[int | None, str]:
        """The exit code, and how it ended in words. Where nobody saw the end, the run's own status tells it."""
        record, status = read_json(self.job / f"exit-{phase['name']}.json"), read_json(self.run_folder / "status.json")
        record = record if record.get("attempt") == self.state["attempt"] else {}
        code, number, began = record.get("code"), record.get("signal"), record.get("began")
        if isinstance(code, int):
            return code, f"signal {number}" if number else f"exit code {code}"
        updated = status.get("updated")
        if phase.get("restart") and isinstance(updated, float) and isinstance(began, float) and updated >= began:
            code = {"done": 0, "stopped": 3}.get(str(status.get("state")))
        return code, "nobody saw its end" if code is None else f"exit code {code}, by its own status"

    # the end: verify, notify, hold, gate, stop action

    def finish(self, outcome: Facts) -> None:
        self.set(phase="verify", message=f"{outcome['message']}; verifying what was saved")
        items, wrong = self.verify(outcome)
        if wrong:
            outcome = {**outcome, "message": f"{outcome['message']}; not verified: {'; '.join(wrong[:3])}"}
        self.set(verified=not wrong, reason=outcome["reason"], message=outcome["message"])
        if not self.state.get("notified"):
            self.notify(outcome["state"], outcome["message"])
            self.remember(notified=True)
        stop = self.spec["stop"]
        wanted = bool(stop.get("when_done")) and stop.get("action", "none") != "none"
        wanted = wanted and outcome["reason"] not in ("stop", "signal")  # somebody is there, and decides
        refusal = "not asked for"
        if wanted:
            self.hold(outcome)
            items = None if items is None else with_home_copies(items, pulled_copies(self.job))
            refusal = self.why_the_box_stays(items)
        if wanted and refusal:
            self.log(f"{stop['action']} refused: {refusal}")
            self.notify(outcome["state"], f"{outcome['message']}; the box still runs: {refusal}")
        if not outcome["resumable"]:
            shutil.rmtree(self.job / "secrets", ignore_errors=True)
        self.set(**outcome, stop_action="none" if not wanted else f"refused: {refusal}" if refusal else "done")
        if wanted and not refusal:
            self.stop_box(outcome)

    def verify(self, outcome: Facts) -> tuple[list[Facts] | None, list[str]]:
        is_done = outcome["state"] == "done" and any(phase.get("restart") for phase in self.spec["phases"])
        mirror = self.spec["mirror"]
        try:
            items = inspect_run(self.run_folder, mirror, self.pause)
            write_json(self.job / "verified.json", {"version": 1, "items": items})
        except Exception as error:  # whatever the disk holds, the job comes to its end
            return None, [f"{type(error).__name__}: {error}"]
        return items, problems(items, mirror, is_done)

    def notify(self, state: str, text: str) -> None:
        message = {
            "title": f"Sojourn: {self.spec['run']} {state}", "text": self.scrub(text), "run": self.spec["run"],
            "state": state, "seconds": round(self.spec["seconds_before"] + self.state["seconds"]), "money": self.money,
            "currency": self.spec["currency"],
        }  # fmt: skip
        for index, entry in enumerate(self.spec["notify"]):
            failure = send_notification(entry, self.notify_secrets[index], message, self.spec["notify_seconds"])
            if failure is not None:
                self.log(f"notification {entry.get('kind')} failed: {failure}")
            self.pause()

    def hold(self, outcome: Facts) -> None:
        """While a laptop follows and has not pulled yet. A touch counts from when it was seen: clocks differ."""
        attached, touched = self.job / "attached", _modified(self.job / "attached")
        if abs(time.time() - touched) > self.spec["lease_seconds"]:
            return
        until = time.monotonic() + self.spec["hold_minutes"] * 60
        fresh_until = time.monotonic() + self.spec["lease_seconds"]
        self.set(state="holding", message=f"{outcome['message']}; waiting for the laptop to pull")
        while time.monotonic() < min(until, fresh_until) and not (self.job / "pulled").exists():
            over_budget = self.spec["budget"] is not None and (self.money or 0.0) >= self.spec["budget"]
            if over_budget or self.signals or (self.job / "stop").exists():
                return
            if _modified(attached) != touched:
                touched, fresh_until = _modified(attached), time.monotonic() + self.spec["lease_seconds"]
            self.pause(self.spec["poll_seconds"])

    def why_the_box_stays(self, items: list[Facts] | None) -> str:
        """Empty where it may go."""
        spec, stop = self.spec, self.spec["stop"]
        others = [name for name in running_here(Path(spec["home"])) if name != spec["run"]]
        if self.signals or (self.job / "stop").exists():
            return "stopped as asked"
        if others and is_known_platform(spec["platform"]):
            return f"{others[0]} still runs on this box; wait for it, or type: sojourn stop {others[0]}"
        try:
            everything = None if items is None else items + other_items(self.run_folder, self.job)
        except OSError:
            everything = None
        disks = [{**disk, "path": os.path.realpath(str(disk.get("path")))} for disk in spec["disks"]]
        verdict = gate(spec["platform"], stop["action"], disks, everything, spec["run"])
        if verdict.allowed and not stop.get("command"):
            return (
                f"no command on this box can do it; on your laptop, type: sojourn release (the host of {spec['run']})"
            )
        return verdict.reason

    def stop_box(self, outcome: Facts) -> None:
        """The status is final before: this process ends with the box."""
        command = [os.path.expandvars(str(word)) for word in self.spec["stop"]["command"]]
        self.log(f"stopping this box: {command[0]}")
        os.sync()
        code, text = _answer(command)
        if code != 0:
            failure = f"{command[0]} failed ({last_line(text) or code}); stop the box in its console"
            self.set(stop_action=f"refused: {failure}")
            self.notify(str(outcome["state"]), f"the box still runs: {failure}")


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# --- the shim ----------------------------------------------------------------------------------------------------


def run_shim(job: Path, spec: Facts, phase: Facts, attempt: int) -> None:
    """Owns one attempt of a phase: starts it, or watches the one that lives; writes how it ended; and starts the
    supervisor again where that is gone, until the next shim has taken over or the job is over."""
    for caught in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(caught, lambda *_: None)  # handlers are not inherited by the trainer
    held = lock(job / f".lock-{phase['name']}")
    if held is None:
        return
    me = {**identity(os.getpid()), "phase": phase["name"], "attempt": attempt}
    write_json(job / "shim.json", me)
    exit_file = job / f"exit-{phase['name']}.json"
    if read_json(exit_file).get("attempt") != attempt:
        code, number = _run_attempt(job, spec, phase, attempt)
        began = read_json(job / f"phase-{phase['name']}.json").get("began")
        ended = {"attempt": attempt, "code": code, "signal": number, "argv": phase["argv"], "began": began}
        _write_patiently(exit_file, {**ended, "uptime": uptime()})
    held.close()
    while read_json(job / "status.json").get("state") not in TERMINAL and job.is_dir():
        if read_json(job / "shim.json") not in (me, {}):
            return
        guard(job)
        time.sleep(spec["shim_seconds"])


def _run_attempt(job: Path, spec: Facts, phase: Facts, attempt: int) -> tuple[int | None, int | None]:
    """Exit code and signal; both None where nobody saw the end."""
    record = read_json(job / f"phase-{phase['name']}.json")
    if record.get("attempt") == attempt:  # the child of a shim that was killed
        while lives(record.get("trainer")):
            guard(job)
            time.sleep(spec["poll_seconds"])
        return None, None
    kill_all(job)
    try:
        child = _start_trainer(job, spec, phase, attempt)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{phase['argv'][0]}: could not be started: {getattr(error, 'strerror', None) or error}", flush=True)
        return 127, None
    while True:
        try:
            code = child.wait(spec["shim_seconds"])
            return (code, None) if code >= 0 else (128 - code, -code)
        except subprocess.TimeoutExpired:
            guard(job)


def _start_trainer(job: Path, spec: Facts, phase: Facts, attempt: int) -> subprocess.Popen[bytes]:
    given = {key: str(value) for key, value in {**spec["env"], **spec["secret_env_files"], MARK: job}.items()}

    def record() -> None:
        """In the child, before it becomes the trainer: there is no trainer without a record."""
        facts = {"attempt": attempt, "trainer": identity(os.getpid()), "began": time.time()}
        write_json(job / f"phase-{phase['name']}.json", facts)

    return subprocess.Popen(
        phase["argv"], stdin=subprocess.DEVNULL, env={**os.environ, **given}, start_new_session=True, preexec_fn=record,
        cwd=spec["home"] if Path(spec["home"]).is_dir() else "/",
    )  # fmt: skip


def _write_patiently(path: Path, value: Facts) -> None:
    while path.parent.is_dir():
        try:
            return write_json(path, value)
        except OSError as error:
            print(f"{path.name} could not be written: {error.strerror}; trying again", flush=True)
            time.sleep(2)
    return None


def guard(job: Path) -> None:
    """Starts the supervisor again where it died without a terminal state."""
    ended = read_json(job / "status.json").get("state") in TERMINAL or not job.is_dir()
    if not ended and not lives(read_json(job / "supervisor.json")):
        _answer([sys.executable, THIS_FILE, "start", str(job), "--revive"])


# --- commands ----------------------------------------------------------------------------------------------------


def start(job: Path, how: str = "") -> int:
    """`how`: --again also where it is done; --revive from the shim, for the job as it was."""
    again, revive = how == "--again", how == "--revive"
    spec = read_spec(job / ("spec.used.json" if revive and (job / "spec.used.json").exists() else "spec.json"))
    (job / "logs").mkdir(exist_ok=True)
    pid, status = living_supervisor(job), read_json(job / "status.json")
    is_done = status.get("state") == "done" and status.get("spec") == spec["hash"] and not again
    if pid is None:
        stays = is_done or (revive and status.get("state") in TERMINAL)
        pid = status.get("pid") if stays else detach(job, spec, revive)
    if pid is None:
        print(f"the supervisor did not start; see {job}/logs/supervisor.log", file=sys.stderr)
        return 1
    print(pid)
    return 0


def living_supervisor(job: Path) -> int | None:
    held = lock(job / ".lock")
    if held is not None:
        return held.close()
    for _ in range(100):  # it writes its pid right after it took the lock
        found = read_json(job / "supervisor.json")
        if lives(found):
            return int(found["pid"])
        time.sleep(0.05)
    return None


def detach(job: Path, spec: Facts, revive: bool) -> int | None:
    """Double fork and setsid: the supervisor has no terminal, no parent and no open stream of this session."""
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            _become_supervisor(job, spec, revive, writer)
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    return int(text) if text.isdigit() else living_supervisor(job)


def _become_supervisor(job: Path, spec: Facts, revive: bool, writer: int) -> NoReturn:
    code = 1
    try:
        signals = _catch_signals()  # before anyone can know its pid
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(job / "logs/supervisor.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for number, target in ((0, null), (1, log), (2, log)):
            os.dup2(target, number)
        keep = os.dup2(writer, 3, inheritable=False)
        os.closerange(4, 65536)
        sys.stdout = sys.stderr = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
        held = lock(job / ".lock")
        if held is not None:
            write_json(job / "supervisor.json", identity(os.getpid()))
            if not revive:
                forget_last_start(job)
            os.write(keep, str(os.getpid()).encode())
            os.close(keep)
            Supervisor(job, spec, signals).run()
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _catch_signals() -> list[int]:
    """The numbers of those that came. SIGHUP gets a handler, not SIG_IGN: the trainer would inherit that."""
    came: list[int] = []
    signal.signal(signal.SIGHUP, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _: came.append(caught))
    return came


def forget_last_start(job: Path) -> None:
    """Before a start that a user asked for: forgets what belongs to an earlier one, except for what it cost."""
    status, state = read_json(job / "status.json"), read_json(job / "state.json")
    _remove(job / "stop")
    if status.get("state") in TERMINAL:
        _remove(job / "pulled")
    if status.get("state") == "done":
        _remove(*job.glob("exit-*.json"))
    was_done = (state.get("outcome") or {}).get("state") == "done"
    if status.get("state") in TERMINAL or not was_done:  # else its end was cut short, and goes on
        for key in ("outcome", "notified", "best_step"):
            state.pop(key, None)
    state.update(restarts=0, attempt_over=True)  # a trainer that lives is adopted all the same
    write_file(job / "spec.used.json", (job / "spec.json").read_bytes())
    write_json(job / "state.json", state)
    write_json(job / "status.json", {**status, "state": "starting", "reason": "", **identity(os.getpid())})


def stop(job: Path) -> int:
    """A request on disk: neither this process nor the supervisor can lose it."""
    state = read_status(job)["state"]
    if state in (*TERMINAL, "none"):
        print(f"nothing to stop: {state}")
        return 0
    write_file(job / "stop", b"")
    return start(job, "--revive")


def inspect(home: Path, *paths: str) -> int:
    """For the laptop's shutdown gate. `paths`: where the platform's disks are, to be resolved."""
    items: list[Facts] = []
    for run in sorted(path for path in home.glob("runs/*") if path.is_dir()):
        spec = read_json(home / ".sojourn/jobs" / run.name / "spec.used.json")
        items += inspect_run(run, spec.get("mirror"))
    real = {path: os.path.realpath(path) for path in paths}
    print(json.dumps({"running": running_here(home), "items": items, "real": real}))
    return 0


def show_status(job: Path) -> int:
    print(json.dumps(read_status(job), ensure_ascii=False))
    return 0


def shim(job: Path, name: str, attempt: str) -> int:
    spec = read_spec(job / "spec.used.json")
    run_shim(job, spec, next(phase for phase in spec["phases"] if phase["name"] == name), int(attempt))
    return 0


def main(words: list[str]) -> int:
    commands: Dict[str, Callable[..., int]] = {
        "start": start, "stop": stop, "status": show_status, "inspect": inspect, "shim": shim,
    }  # fmt: skip
    if len(words) < 2 or words[0] not in commands:
        print("usage: supervisor.py start|stop|status JOBDIR, or inspect HOME", file=sys.stderr)
        return 2
    try:
        return commands[words[0]](Path(os.path.realpath(words[1])), *words[2:])
    except SpecError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
