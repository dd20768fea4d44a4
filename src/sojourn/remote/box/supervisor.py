"""Runs one job on a rented box while the laptop is closed: phases in order, restarts, limits, the shutdown gate.

One file, standard library only, Python 3.8 to 3.13; copied to the box. The laptop imports its pure functions.

    supervisor.py start JOBDIR [--again]   detaches and prints its pid; does nothing where one runs or the job has ended
    supervisor.py stop JOBDIR              asks for a graceful stop: the trainer saves, the run can be resumed
    supervisor.py status JOBDIR            status.json, with the state "lost" where it died without a terminal state
    supervisor.py gate JOBDIR ACTION       whether power_off or release would lose a checkpoint or a model
    supervisor.py shim JOBDIR PHASE N      internal: owns one phase, writes its exit code, restarts a dead supervisor

JOBDIR/
  spec.json            what to do: written by the laptop; spec.used.json: the copy that this job runs by
  status.json          where the job stands (replaced atomically every two seconds)
  state.json           what a restarted supervisor must not forget: cost, restarts, how the job ended
  supervisor.json, shim.json, phase-PHASE.json   pid, start time and boot of the processes
  exit-PHASE.json      how the phase ended
  verified.json        every checkpoint and model: files, SHA-256, places
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
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Callable, Iterable, NamedTuple, NoReturn

try:
    import fcntl
except ImportError:  # Windows: the laptop imports the pure functions only
    fcntl = None  # type: ignore[assignment]

TERMINAL = ("done", "stopped", "failed")
_FILE = os.path.abspath(__file__)
MARK = "SOJOURN_JOB"  # in the environment of every process of a phase
MANIFEST, SEAL = "manifest.json", ".mirror.json"


# ---------------------------------------------------------------------------------------------------- the specification


class SpecError(Exception):
    """spec.json is wrong; one line."""


@dataclass(frozen=True)
class Phase:
    """`restart`: a crash is followed by another attempt."""

    name: str
    argv: list[str]
    restart: bool = False


@dataclass(frozen=True)
class Spec:
    """spec.json. `spent_before` and `seconds_before`: on other boxes; what this job spent here is in state.json.
    Intervals are in seconds."""

    run: str
    home: str
    run_folder: str
    phases: list[Phase]
    env: dict[str, str] = field(default_factory=dict)
    secret_env_files: dict[str, str] = field(default_factory=dict)
    price_per_hour: float | None = None
    currency: str = ""
    budget: float | None = None
    spent_before: float = 0.0
    seconds_before: float = 0.0
    deadline: float | None = None
    stall_minutes: float = 15.0
    min_free_bytes: float = 512 << 20
    max_restarts: int = 3
    grace_seconds: float = 60.0
    hold_minutes: float = 30.0
    mirror: str | None = None
    disks: list[dict[str, Any]] = field(default_factory=list)
    platform: str = "generic"
    stop: dict[str, Any] = field(default_factory=dict)
    notify: list[dict[str, Any]] = field(default_factory=list)
    heartbeat_seconds: float = 2.0
    poll_seconds: float = 0.5
    gpu_seconds: float = 30.0
    disk_seconds: float = 10.0
    backoff_seconds: float = 5.0
    lease_seconds: float = 30.0
    notify_seconds: float = 10.0
    shim_seconds: float = 1.0
    hash: str = ""


_REQUIRED = {"run": str, "home": str, "run_folder": str, "phases": list}
_NUMBERS = (
    "spent_before", "seconds_before", "stall_minutes", "min_free_bytes", "max_restarts", "grace_seconds",
    "hold_minutes", "heartbeat_seconds", "poll_seconds", "gpu_seconds", "disk_seconds", "backoff_seconds",
    "lease_seconds", "notify_seconds", "shim_seconds",
)  # fmt: skip
_OPTIONAL_NUMBERS = ("price_per_hour", "budget", "deadline")
_OTHERS = {"env": dict, "secret_env_files": dict, "disks": list, "stop": dict, "notify": list, "currency": str}


def parse_spec(data: bytes) -> Spec:
    """Raises `SpecError` with the key that is wrong."""
    try:
        found = json.loads(data.decode("utf-8"))
    except ValueError:
        raise SpecError("not valid JSON") from None
    if not isinstance(found, dict):
        raise SpecError("not a JSON object")
    if found.get("version") != 1:
        raise SpecError(f"version: {found.get('version')!r}; this supervisor knows 1")
    for key, kind in _REQUIRED.items():
        if key not in found:
            raise SpecError(f"{key}: missing")
        if not isinstance(found[key], kind) or not found[key]:
            raise SpecError(f"{key}: {found[key]!r} is not a {kind.__name__} with content")
    values: dict[str, Any] = {key: found[key] for key in _REQUIRED}
    values["phases"] = [_parse_phase(item, index) for index, item in enumerate(found["phases"])]
    if len({phase.name for phase in values["phases"]}) < len(values["phases"]):
        raise SpecError("phases: two have the same name")
    for key in (*_NUMBERS, *_OPTIONAL_NUMBERS):
        value = found.get(key)
        if value is None:
            continue
        if type(value) not in (int, float) or not 0 <= value < 1e15:
            raise SpecError(f"{key}: {value!r} is not a number from 0")
        values[key] = value
    for key, kind in _OTHERS.items():
        if found.get(key) is not None:
            if not isinstance(found[key], kind):
                raise SpecError(f"{key}: {found[key]!r} is not a {kind.__name__}")
            values[key] = found[key]
    if values.get("budget") is not None and values.get("price_per_hour") is None:
        raise SpecError("budget: needs price_per_hour")
    if found.get("mirror"):
        values["mirror"] = str(found["mirror"])
    values["platform"] = str(found.get("platform") or "generic")
    return Spec(hash=hashlib.sha256(data).hexdigest()[:16], **values)


def _parse_phase(item: Any, index: int) -> Phase:
    name, argv = (item.get("name"), item.get("argv")) if isinstance(item, dict) else (None, None)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise SpecError(f"phases[{index}].name: {name!r} is not a plain name")
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise SpecError(f"phases[{index}].argv: {argv!r} is not a list of words")
    return Phase(name, argv, bool(item.get("restart", False)))


def read_spec(path: Path) -> Spec:
    try:
        return parse_spec(path.read_bytes())
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    except SpecError as error:
        raise SpecError(f"{path}: {error}; write it anew with: sojourn launch") from None


# ------------------------------------------------------------------------------------------------- files and processes


@dataclass(frozen=True)
class Job:
    """The files of a job."""

    folder: Path

    @property
    def status(self) -> Path:
        return self.folder / "status.json"

    @property
    def state(self) -> Path:
        return self.folder / "state.json"

    @property
    def used_spec(self) -> Path:
        return self.folder / "spec.used.json"

    @property
    def supervisor(self) -> Path:
        return self.folder / "supervisor.json"

    @property
    def shim(self) -> Path:
        return self.folder / "shim.json"

    @property
    def stop_request(self) -> Path:
        return self.folder / "stop"

    @property
    def secrets(self) -> Path:
        return self.folder / "secrets"

    @property
    def reserve(self) -> Path:
        return self.folder / ".reserve"

    def phase(self, name: str) -> Path:
        return self.folder / f"phase-{name}.json"

    def exit(self, name: str) -> Path:
        return self.folder / f"exit-{name}.json"

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"


def read_json(path: Path) -> dict[str, Any]:
    """Empty where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(job: Job, path: Path, value: dict[str, Any], sync: bool = True) -> None:
    """Atomically. On a full disk the reserve is given up first; then the old file is overwritten."""
    data = (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "replace")
    for last in (False, True):
        try:
            return _replace_file(path, data, sync)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not last:
                with contextlib.suppress(OSError):
                    job.reserve.unlink()
    with open(path, "r+b") as file:  # as long as the old content: needs no space
        length = os.fstat(file.fileno()).st_size
        if len(data) > length:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        file.write(data.ljust(length))
    return None


def _replace_file(path: Path, data: bytes, sync: bool) -> None:
    stage = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(stage, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(stage, path)
    except BaseException:
        with contextlib.suppress(OSError):
            stage.unlink()
        raise


def make_reserve(job: Job, size: int = 256 << 10) -> None:
    """Space for the last status, exit codes and verdicts on a disk that is full."""
    with contextlib.suppress(OSError):
        if not job.reserve.exists():
            job.reserve.write_bytes(b"\1" * size)


def uptime() -> float:
    """Seconds since the machine booted: never set, counts time asleep."""
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


def identity(pid: int) -> dict[str, Any]:
    return {"pid": pid, "started": start_time(pid)}


def lives(record: dict[str, Any]) -> bool:
    return is_alive(record.get("pid"), record.get("started"))


def trainer_of(job: Job, phase: str) -> dict[str, Any]:
    found = read_json(job.phase(phase)).get("trainer")
    return found if isinstance(found, dict) else {}


def processes_of(job: Job) -> list[int]:
    """Every process that a phase of this job has left behind, whoever its parent is."""
    mark = f"{MARK}={job.folder}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return [pid for pid in found if start_time(pid) is not None]


def cpu_ticks(pids: Iterable[int]) -> int:
    """CPU time of these processes and of the children they have waited for."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_all(job: Job, patience: float = 10.0) -> None:
    """SIGKILL until none is left: a process may fork while the list is read."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        left = processes_of(job)
        if not left:
            return
        for pid in left:
            send(pid, signal.SIGKILL)
        time.sleep(0.05)


def lock(path: Path) -> IO[bytes] | None:
    """An exclusive lock that ends with this process; None where another process has it."""
    file = open(path, "ab")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except OSError as error:
        file.close()
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
    # A network drive without locks: a lock of the same name in this machine's temporary folder.
    name = hashlib.sha256(str(path).encode()).hexdigest()[:24]
    file = open(Path(tempfile.gettempdir()) / f"sojourn-{name}.lock", "ab")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except OSError:
        file.close()
        return None


def last_line(path: Path, start: int = 0) -> str:
    """The last line with text that was written after byte `start`, without colours and overwritten progress bars."""
    for line in reversed(tail(path, start).splitlines()):
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.rpartition("\r")[2]).strip()
        if text:
            return text[:400]
    return ""


def tail(path: Path, start: int = 0, most: int = 16384) -> str:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - most, 0))
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


# -------------------------------------------------------------------------------------- decisions, without any effects


class Verdict(NamedTuple):
    """What the shutdown gate says. `reason`: why it refused, and what to type."""

    allowed: bool
    reason: str


def survival(path: str, disks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The disk that `path` lies on: of those that contain it the longest; {} where none does. Links are resolved."""
    best: dict[str, Any] = {}
    length = -1
    parts = [part for part in posixpath.normpath(path).split("/") if part]
    for disk in disks:
        root = [part for part in posixpath.normpath(str(disk.get("path", ""))).split("/") if part]
        if str(disk.get("path", "")).startswith("/") and parts[: len(root)] == root and len(root) > length:
            best, length = disk, len(root)
    return best


def place_survives(place: dict[str, Any], action: str, disks: Iterable[dict[str, Any]]) -> bool:
    """Whether this verified copy is still there after the action, for as long as anybody may need it."""
    if not place.get("verified"):
        return False
    if place.get("kind") in ("home", "hub"):
        return True
    disk = survival(str(place.get("path", "")), disks)
    needed = ("release",) if action == "release" else ("stop", "release")
    return disk.get("survives") in needed and not disk.get("kept_hours")


def gate(
    platform: str, action: str, disks: list[dict[str, Any]], items: list[dict[str, Any]] | None, run: str = "RUN"
) -> Verdict:
    """Whether this box may be powered off or released. `items`: every checkpoint and model with its places; None where
    they could not be listed. Paths are real ones, without links."""
    if action not in ("power_off", "release"):
        return Verdict(False, f"{action!r} is not an action; type power_off or release")
    if platform in ("", "generic", "unknown"):
        return Verdict(
            False, "a box of an unknown platform is never powered off or released by Sojourn; do it in its own console"
        )
    if items is None:
        return Verdict(False, "the run folder could not be read; check its disk, then type: sojourn pull " + run)
    for item in items:
        if not any(place_survives(place, action, disks) for place in item.get("places", [])):
            why = _why_lost(item, action, disks)
            command = f"sojourn pull {item.get('run') or run} --all"
            return Verdict(False, f"{item.get('name')} {why}; on your laptop, type: {command}")
    return Verdict(True, "")


def _why_lost(item: dict[str, Any], action: str, disks: list[dict[str, Any]]) -> str:
    what = "a release" if action == "release" else "a power-off"
    places = item.get("places", [])
    good = [place for place in places if place.get("verified") and place.get("kind") == "disk"]
    if not good:
        damage = next((place["damage"] for place in places if place.get("damage")), "no copy is verified")
        return f"has no verified copy ({damage})"
    path = str(good[0].get("path"))
    disk = survival(path, disks)
    if disk.get("kept_hours") and action == "power_off":
        return f"lies only on {disk['path']}, which is wiped {disk['kept_hours']:g} h after a power-off"
    return f"lies only in {path}, which does not survive {what}"


def after_exit(
    code: int | None, asked: str | None, phase: Phase, restarts: int, most: int, gpu: str | None
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
    if code == 2:
        return "failed", "input"
    if code in (126, 127):
        return "failed", "start"
    if not phase.restart or restarts >= most:
        return "failed", asked or "crash"
    return "restart", asked or "crash"


def budget_threshold(budget: float, price_per_hour: float, grace_seconds: float) -> float:
    """Where the trainer is asked to stop, so that its last save still fits into the budget."""
    return budget - min(price_per_hour * grace_seconds / 3600, 0.1 * budget)


# Xids that mean broken hardware. 13, 31, 43 and 45 are the program's own faults, or follow a SIGKILL.
HARDWARE_XIDS = frozenset({48, 62, 64, 74, 79, 94, 95, 119, 120, 140})
_XID = re.compile(r"\bXid\b(?:\s*\(PCI:([0-9a-fA-F:.]+)\))?\D*?:\s*(\d+)")
_GPU_TEXTS = re.compile(
    r"uncorrectable ECC|cudaErrorECCUncorrectable|fallen off the bus|fell off the bus|GPU is lost"
    r"|Unable to determine the device handle",
    re.IGNORECASE,
)


def gpu_error_in(text: str, buses: Iterable[str] = ()) -> str | None:
    """The first line that says a GPU is broken. `buses`: PCI addresses of this box's GPUs, where known: the kernel's
    log also has those of other tenants."""
    known = {bus_key(bus) for bus in buses}
    for line in text.splitlines():
        if _GPU_TEXTS.search(line):
            return line.strip()[:200]
        match = _XID.search(line)
        if match and int(match[2]) in HARDWARE_XIDS and (not known or not match[1] or bus_key(match[1]) in known):
            return line.strip()[:200]
    return None


def bus_key(bus: str) -> str:
    """`00000000:3B:00.0` of nvidia-smi and `0000:3b:00` of the kernel are the same GPU."""
    return bus.strip().lower().partition(".")[0].lstrip("0:")


def read_status(folder: Path) -> dict[str, Any]:
    """status.json; the state is "lost" where it is not terminal and its supervisor is gone."""
    status = read_json(Job(folder).status)
    state = status.get("state")
    if state in TERMINAL:
        return status
    if lives(status) or lives(read_json(Job(folder).supervisor)):
        return status or {"state": "starting"}
    if not status and not Job(folder).state.exists() and not Job(folder).status.exists():
        return {"state": "none", "message": f"{folder}: no job was started here", "resumable": False}
    message = "the supervisor and its trainer ended without a terminal state; launch again to resume"
    return {**status, "state": "lost", "message": message, "resumable": True, "reason": "lost"}


# ----------------------------------------------------------------------------------------- what is in the run folder


Tick = Callable[[], None]


def sha256(path: Path, tick: Tick = lambda: None) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while True:
            chunk = file.read(8 << 20)
            if not chunk:
                return digest.hexdigest()
            digest.update(chunk)
            tick()


def list_files(folder: Path) -> list[str]:
    """Relative to it, with forward slashes; without a mirror's seal."""
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in found if name != SEAL)


def hash_files(folder: Path, tick: Tick = lambda: None) -> dict[str, dict[str, Any]]:
    return {
        name: {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name, tick)}
        for name in list_files(folder)
    }


def digest_of(files: dict[str, dict[str, Any]]) -> str:
    """One digest for a folder: two copies with the same digest are byte-identical."""
    lines = [f"{files[name]['sha256']} {files[name]['size']} {name}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def checkpoint_damage(folder: Path, files: dict[str, dict[str, Any]]) -> str | None:
    manifest = read_json(folder / MANIFEST)
    if not manifest:
        return "no readable manifest.json"
    for name, listed in manifest.items():
        if not isinstance(listed, dict) or "sha256" not in listed:
            return "no readable manifest.json"
        if name not in files:
            return f"{name} is missing"
        if files[name] != {"size": listed.get("size"), "sha256": listed["sha256"]}:
            return f"{name} does not match manifest.json"
    return None


def model_damage(folder: Path, files: dict[str, dict[str, Any]]) -> str | None:
    """final/ and best/ have no manifest: what must be there is there, and every weight file is as long as it says."""
    if "config.json" not in files and "adapter_config.json" not in files:
        return "neither config.json nor adapter_config.json"
    weights = [name for name in files if name.endswith(".safetensors")]
    for index in (name for name in files if name.endswith(".safetensors.index.json")):
        listed = read_json(folder / index).get("weight_map")
        missing = sorted(set(listed.values()) - set(files)) if isinstance(listed, dict) else ["weight_map"]
        if missing:
            return f"{missing[0]} is missing"
    if not weights:
        return "no .safetensors file"
    return next((found for found in (_safetensors_damage(folder / name) for name in weights) if found), None)


def _safetensors_damage(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > 100 << 20:
                return f"{path.name} has no header"
            header = json.loads(file.read(length).decode("utf-8"))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            expected = 8 + length + max(ends, default=0)
            return None if os.fstat(file.fileno()).st_size == expected else f"{path.name} is cut short"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return f"{path.name} has no header"


def checkpoint_folders(run_folder: Path) -> list[Path]:
    return sorted(path for path in (run_folder / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name))


def item_folders(run_folder: Path) -> list[tuple[str, Path]]:
    """Every checkpoint and model of a run, and a checkpoint that was saved elsewhere because the disk failed."""
    found = [(f"checkpoints/{path.name}", path) for path in checkpoint_folders(run_folder)]
    found += [(name, run_folder / name) for name in ("final", "best") if (run_folder / name).is_dir()]
    message = str(read_json(run_folder / "status.json").get("message", ""))
    rescued = re.search(r"save\.resume=(/\S+)", message)
    if rescued and Path(rescued[1]).is_dir():
        found.append((f"rescued {Path(rescued[1]).name}", Path(rescued[1])))
    return found


def inspect(spec: Spec, job: Job, tick: Tick = lambda: None) -> list[dict[str, Any]]:
    """Every checkpoint and model of the run: its files, what is wrong with it, and its places, each read and hashed."""
    run_folder = Path(spec.run_folder)
    at_home = read_json(job.folder / "pulled").get("verified")
    on_hub = _names_on_hub(spec, run_folder)
    items = []
    for name, folder in item_folders(run_folder):
        files = hash_files(folder, tick)
        is_model = name in ("final", "best")
        damage = model_damage(folder, files) if is_model else checkpoint_damage(folder, files)
        digest = digest_of(files)
        place = {"kind": "disk", "path": os.path.realpath(str(folder)), "verified": damage is None, "damage": damage}
        item: dict[str, Any] = {
            "run": spec.run,
            "name": name,
            "digest": digest,
            "files": files,
            "damage": damage,
            "places": [place],
        }
        if spec.mirror and not spec.mirror.startswith("hub:"):
            item["places"].append(_mirror_place(Path(spec.mirror).expanduser() / spec.run / name, files, tick))
        if name in on_hub:
            item["places"].append({"kind": "hub", "path": spec.mirror, "verified": True, "mirror": True})
        if isinstance(at_home, dict) and at_home.get(name) == digest:
            item["places"].append({"kind": "home", "path": "", "verified": True})
        items.append(item)
    return items


def _mirror_place(copy: Path, files: dict[str, dict[str, Any]], tick: Tick) -> dict[str, Any]:
    try:
        damage = None if copy.is_dir() else "not in the mirror"
        if damage is None and hash_files(copy, tick) != files:
            damage = "the copy in the mirror differs"
    except OSError as error:
        damage = f"the mirror cannot be read: {error.strerror}"
    real = os.path.realpath(str(copy))
    return {"kind": "disk", "path": real, "verified": damage is None, "damage": damage, "mirror": True}


def _names_on_hub(spec: Spec, run_folder: Path) -> set[str]:
    """What the trainer has copied to the hub and compared with the hub's own hashes, as its events say."""
    if not spec.mirror or not spec.mirror.startswith("hub:"):
        return set()
    names = set()
    with contextlib.suppress(OSError), open(run_folder / "events.jsonl", encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, AttributeError):
                event = json.loads(line)
                if event.get("kind") == "mirrored" and str(event.get("where")).endswith(" " + spec.mirror[4:]):
                    names.add(f"checkpoints/{event.get('path')}")
    if read_json(run_folder / "status.json").get("state") == "done":  # the trainer is done only after these arrived
        names |= {"final", "best"}
    return names


def problems(items: list[dict[str, Any]], spec: Spec, is_done: bool) -> list[str]:
    """Why the run is not verified; empty where it is. The trainer mirrors models only when it is done."""
    found = []
    for item in items:
        if item["damage"]:
            found.append(f"{item['name']}: {item['damage']}")
        if spec.mirror and (is_done or item["name"].startswith("checkpoints/")):
            copies = [place for place in item["places"] if place.get("mirror")]
            if not any(place["verified"] for place in copies):
                found.append(f"{item['name']}: {copies[0]['damage'] if copies else 'not in the mirror'}")
    if is_done and not any(item["name"] == "final" for item in items):
        found.append("final: missing")
    return found


def other_items(spec: Spec, job: Job) -> list[dict[str, Any]]:
    """Checkpoints and models of other runs on this box. A power-off does not touch what lies on a disk that survives
    it, so their bytes are not read again; what the laptop has at home counts as its own record says."""
    found = []
    runs = Path(spec.run_folder).parent
    for run_folder in sorted(path for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []:
        if os.path.realpath(str(run_folder)) == os.path.realpath(spec.run_folder):
            continue
        record = job.folder.parent / run_folder.name
        at_home = read_json(record / "pulled").get("verified")
        known = {item["name"]: item for item in read_json(record / "verified.json").get("items", [])}
        for name, folder in item_folders(run_folder):
            places = [{"kind": "disk", "path": os.path.realpath(str(folder)), "verified": True}]
            places += [place for place in known.get(name, {}).get("places", []) if place.get("kind") != "home"]
            digest = known.get(name, {}).get("digest")
            if digest and isinstance(at_home, dict) and at_home.get(name) == digest:
                places.append({"kind": "home", "path": "", "verified": True})
            found.append({"run": run_folder.name, "name": f"{run_folder.name}/{name}", "places": places})
    return found


def other_jobs(spec: Spec, job: Job) -> list[str]:
    """Names of other runs that train on this box, launched or started by hand."""
    records = [path for path in job.folder.parent.glob("*/supervisor.json") if path.parent != job.folder]
    names = {path.parent.name for path in records if lives(read_json(path))}
    for path in Path(spec.run_folder).parent.glob("*/status.json"):
        status = read_json(path)
        started = (start_time(status.get("pid")) or "/").rpartition("/")[2]
        if path.parent.name != spec.run and status.get("state") in ("starting", "running") and started:
            seconds = int(started) / os.sysconf("SC_CLK_TCK")
            names |= {path.parent.name} if abs(seconds - float(status.get("started") or 0)) < 1 else set()
    return sorted(names)


def check_gate(spec: Spec, job: Job, action: str, items: list[dict[str, Any]] | None) -> Verdict:
    """The gate for this box: this run, other runs, and jobs that still run."""
    busy = other_jobs(spec, job)
    if busy and spec.platform not in ("", "generic", "unknown"):
        return Verdict(False, f"{busy[0]} still runs on this box; wait for it, or type: sojourn stop {busy[0]}")
    try:
        everything = None if items is None else items + other_items(spec, job)
    except OSError:
        everything = None
    disks = [{**disk, "path": os.path.realpath(str(disk.get("path")))} for disk in spec.disks]
    return gate(spec.platform, action, disks, everything, spec.run)


# ------------------------------------------------------------------------------------------------------------- watches


class Bill:
    """Seconds and money of this job on this box. A restarted supervisor goes on from what was written; the gap counts
    where a phase ran through it."""

    def __init__(self, spec: Spec, state: dict[str, Any], status: dict[str, Any]) -> None:
        self._spec = spec
        kept = state.get("seconds"), state.get("money")
        if not all(
            isinstance(value, (int, float)) for value in kept
        ):  # damaged: the status has both, with those before
            seconds, money = status.get("seconds"), status.get("money")
            kept = (
                max(0.0, seconds - spec.seconds_before) if isinstance(seconds, (int, float)) else 0.0,
                max(0.0, money - spec.spent_before) if isinstance(money, (int, float)) else 0.0,
            )
        self.seconds, self.money = float(kept[0] or 0.0), float(kept[1] or 0.0)
        self._last = uptime()

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        self.money += (self._spec.price_per_hour or 0.0) * seconds / 3600

    def add_gap(self, state: dict[str, Any], until: float) -> None:
        """From the last heartbeat of the supervisor before this one, on the same boot."""
        last = state.get("uptime")
        if state.get("boot") == boot_id() and isinstance(last, (int, float)) and last < until:
            self.add(until - last)

    def tick(self) -> None:
        now = uptime()
        self.add(max(0.0, now - self._last))
        self._last = now

    @property
    def total_seconds(self) -> float:
        return self._spec.seconds_before + self.seconds

    @property
    def total_money(self) -> float | None:
        if self._spec.price_per_hour is None and not self._spec.spent_before:
            return None
        return self._spec.spent_before + self.money


class Command:
    """A short command that is never waited for: `poll` gives (code, output) once, or None while it runs. Its output is
    kept in memory: the disk may be full."""

    def __init__(self, argv: list[str], timeout: float) -> None:
        self._argv, self._timeout = argv, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._until = 0.0

    def start(self) -> None:
        if self._process is not None:
            return
        self._output = _memory_file()
        self._until = time.monotonic() + self._timeout
        try:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT
            )
        except OSError:
            self._output.close()

    def poll(self) -> tuple[int | None, str] | None:
        """The code is None after the timeout."""
        if self._process is None or self._output is None:
            return None
        code = self._process.poll()
        if code is None and time.monotonic() < self._until:
            return None
        if code is None:
            self._process.kill()
        with self._output as file:
            file.seek(0)
            text = file.read(4 << 20).decode("utf-8", "replace")
        self._process = None
        return code, text


def _memory_file() -> IO[bytes]:
    try:
        return os.fdopen(os.memfd_create("output"), "w+b")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile()


class GpuWatch:
    """nvidia-smi and the kernel's log. `error`: how a GPU broke. `busy_at`: when one was last seen working."""

    QUERY = "pci.bus_id,utilization.gpu,ecc.errors.uncorrected.volatile.total"

    def __init__(self, interval: float) -> None:
        tool, kernel_log = shutil.which("nvidia-smi"), shutil.which("dmesg")
        self.is_there = False  # nvidia-smi has answered once: in a box's no-GPU mode it never does
        self.shows_load = False  # a MIG slice has no utilization
        self.busy_at = time.monotonic()
        self.error: str | None = None
        self._interval, self._due = interval, 0.0
        self._tool = Command([tool, f"--query-gpu={self.QUERY}", "--format=csv,noheader,nounits"], 60) if tool else None
        self._kernel_log = Command([kernel_log], 20) if kernel_log and tool else None
        self._ecc: dict[str, int] = {}
        self._failures = 0
        self._old_lines: set[str] | None = None

    def poll(self) -> None:
        commands = [command for command in (self._tool, self._kernel_log) if command]
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._interval
            for command in commands:
                command.start()
        answer = self._tool.poll() if self._tool else None
        if answer is not None:
            self._read_gpus(*answer)
        answer = self._kernel_log.poll() if self._kernel_log else None
        if answer is not None and answer[0] == 0:
            self._read_kernel_log(answer[1])

    def _read_gpus(self, code: int | None, text: str) -> None:
        broken = gpu_error_in(text)
        if code == 0 and broken is None:
            self._failures = 0
            self.is_there = True
            return self._read_table(text)
        if not self.is_there:
            return None
        self._failures += 1
        what = (text.strip().splitlines() or ["no answer"])[0][:200]
        if broken is not None:
            self.error = f"nvidia-smi: {broken}"
        elif self._failures >= 3:  # one failure may be a busy machine
            self.error = f"nvidia-smi failed {self._failures} times in a row: {what}"
        return None

    def _read_table(self, text: str) -> None:
        rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") >= 2]
        gone = sorted(set(self._ecc) - {row[0] for row in rows})
        if gone:
            self.error = f"nvidia-smi no longer lists the GPU {gone[0]}"
        for bus, busy, ecc, *_ in rows:
            self.shows_load = self.shows_load or busy.isdigit()
            if busy.isdigit() and int(busy) > 5:
                self.busy_at = time.monotonic()
            errors = int(ecc) if ecc.isdigit() else 0
            if errors > self._ecc.setdefault(bus, errors):
                self.error = f"uncorrectable ECC errors of the GPU {bus} rose from {self._ecc[bus]} to {errors}"

    def _read_kernel_log(self, text: str) -> None:
        lines = {line for line in text.splitlines() if "Xid" in line}
        new = set() if self._old_lines is None else lines - self._old_lines
        self._old_lines = lines | (self._old_lines or set())
        found = gpu_error_in("\n".join(sorted(new)), self._ecc)
        if found is not None:
            self.error = f"kernel log: {found}"


class StallWatch:
    """When the phase last gave a sign of life, by the monotonic clock: the machine's clock may be set meanwhile."""

    def __init__(self, spec: Spec, job: Job, phase: Phase, gpu: GpuWatch) -> None:
        self._spec, self._job, self._phase, self._gpu = spec, job, phase, gpu
        self._seconds = spec.stall_minutes * 60
        self._signs: tuple[Any, ...] = ()
        self._sign_at = self._cpu_at = time.monotonic()
        self._sample_due, self._ticks = 0.0, -1
        self._has_stepped = False
        self._first_step: int | None = None

    def poll(self, step: int) -> bool:
        now = time.monotonic()
        run = Path(self._spec.run_folder)
        signs = (step, size_of(run / "metrics.jsonl"), size_of(self._job.log(self._phase.name)))
        if signs != self._signs:
            self._signs, self._sign_at = signs, now
        if self._first_step is None:
            self._first_step = step
        self._has_stepped = self._has_stepped or step > self._first_step
        if now >= self._sample_due:
            self._sample_cpu(now)
        if not self._seconds or now - self._sign_at < self._seconds:
            return False
        # Loading and compiling use the CPU alone; only after the first step does an idle GPU mean a stall by itself.
        gpu_decides = self._gpu.shows_load and self._phase.restart and self._has_stepped
        gpu_idle = not self._gpu.shows_load or now - self._gpu.busy_at >= self._seconds
        cpu_idle = now - self._cpu_at >= self._seconds
        return gpu_idle and (gpu_decides or cpu_idle)

    def _sample_cpu(self, now: float) -> None:
        """Less than 1 % of a core is standing still."""
        interval = min(30.0, max(0.2, self._seconds / 4))
        ticks = cpu_ticks(processes_of(self._job))
        if ticks < self._ticks or ticks - self._ticks > 0.01 * interval * os.sysconf("SC_CLK_TCK"):
            self._cpu_at = now
        self._ticks, self._sample_due = ticks, now + interval


def free_bytes(path: str) -> int | None:
    """Of the disk that `path` is on, or will be on."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(str(place)).free
    except OSError:
        return None


# ------------------------------------------------------------------------------------------------------- notifications


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A token is sent to the address that the user gave, and to no other."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def notification_request(
    entry: dict[str, Any], secret: str, message: dict[str, Any]
) -> tuple[str, dict[str, str], bytes]:
    """URL, headers and body of one notification."""
    kind, title, text = entry.get("kind"), str(message["title"]), str(message["text"])
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "sojourn"}
    body: dict[str, Any]
    if kind == "webhook":
        url, body = secret, {**message, "content": f"{title}: {text}"}
    elif kind == "autodl":
        url = "https://www.autodl.com/api/v1/wechat/message/send"
        headers["Authorization"] = secret
        body = {"title": title, "name": str(message["run"]), "content": text}
    elif kind == "serverchan":
        newer = re.match(r"sctp(\d+)t", secret)
        url = (
            f"https://{newer[1]}.push.ft07.com/send/{secret}.send"
            if newer
            else f"https://sctapi.ftqq.com/{secret}.send"
        )
        body = {"title": title, "desp": text}
    elif kind == "bark":
        server, _, key = secret.rstrip("/").rpartition("/")  # a key, or the address of an own server with the key
        url, body = f"{server or 'https://api.day.app'}/push", {"device_key": key, "title": title, "body": text}
    else:
        raise ValueError(f"unknown kind {kind!r}")
    if entry.get("url"):  # for an own server
        url = str(entry["url"])
    return url, headers, json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


def send_notification(entry: dict[str, Any], secret: str, message: dict[str, Any], timeout: float) -> str | None:
    """None, or why it failed; never waits longer than `timeout` seconds."""
    failure: list[str | None] = ["no answer in time"]

    def work() -> None:
        try:
            failure[0] = _send_notification(entry, secret, message, timeout)
        except urllib.error.HTTPError as error:
            failure[0] = f"HTTP {error.code}"
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            failure[0] = f"{type(error).__name__}: {error}"

    thread = threading.Thread(target=work, daemon=True)  # a name lookup has no timeout of its own
    thread.start()
    thread.join(timeout)
    return failure[0]


def _send_notification(entry: dict[str, Any], secret: str, message: dict[str, Any], timeout: float) -> str | None:
    if entry.get("kind") == "command":
        argv = entry.get("argv") or json.loads(secret)
        text = f"{message['title']}\n\n{message['text']}\n".encode("utf-8", "replace")
        done = subprocess.run(
            argv, input=text, timeout=timeout, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
        )
        return None if done.returncode == 0 else f"exit code {done.returncode}"
    url, headers, body = notification_request(entry, secret, message)
    if not url.startswith(("https://", "http://")):
        return "its address does not start with https://"
    request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310
    with urllib.request.build_opener(_NoRedirects()).open(request, timeout=timeout) as answer:
        text = answer.read(4096)
    with contextlib.suppress(ValueError, AttributeError):
        if entry.get("kind") == "webhook":
            return None
        code = json.loads(text.decode("utf-8", "replace")).get("code", 0)
        if code not in (0, 200, "Success"):
            return f"refused with code {str(code)[:40]}"
    return None


# ------------------------------------------------------------------------------------------------------ the supervisor


class Supervisor:
    """Owns the job while it holds the lock. Everything it must not forget is in state.json before it acts."""

    def __init__(self, job: Job, spec: Spec) -> None:
        self.job, self.spec = job, spec
        self.state = read_json(job.state)
        if "attempt" not in self.state:
            self.state.update(recover_attempt(job, spec))
        self.bill = Bill(spec, self.state, read_json(job.status))
        self.gpu = GpuWatch(spec.gpu_seconds)
        self.me = identity(os.getpid())
        self.status: dict[str, Any] = {
            "state": "starting", "phase": "", "message": "", "exit_code": None, "resumable": True, "reason": "",
            "restarts": self.state.get("restarts", 0), "step": 0, "total_steps": 0, "verified": False,
            "stop_action": "none",
        }  # fmt: skip
        self._heartbeat_due = self._sync_due = self._disk_due = 0.0
        self._deadline = None if spec.deadline is None else time.monotonic() + spec.deadline - time.time()
        self._signals: list[int] = []
        self._metrics: tuple[int, int] = (-1, 0)  # size, last step
        self._secrets = _read_secrets(job)
        self._notify_secrets = [_read_secret(job, entry) for entry in spec.notify]  # the files may be gone at the end

    # Status, log and cost

    def log(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self.scrub(text)}", flush=True)

    def scrub(self, text: str) -> str:
        """A trainer's last line, or an error, may quote a secret."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def set(self, **facts: Any) -> None:
        """Changes the status and writes it at once."""
        if "message" in facts:
            facts["message"] = self.scrub(str(facts["message"]))
        self.status.update(facts)
        self.heartbeat(sync=True)

    def heartbeat(self, sync: bool = False) -> None:
        now = time.monotonic()
        self._heartbeat_due = now + self.spec.heartbeat_seconds
        self.bill.tick()
        money = self.bill.total_money
        facts = {
            **self.status, **self.me, "run": self.spec.run, "spec": self.spec.hash, "updated": time.time(),
            "uptime": uptime(), "seconds": round(self.bill.total_seconds, 3),
            "money": None if money is None else round(money, 6), "currency": self.spec.currency,
        }  # fmt: skip
        self._write(self.job.status, facts, sync)
        self.save_state(sync or now >= self._sync_due)
        if now >= self._sync_due:
            self._sync_due = now + 10

    def save_state(self, sync: bool = True, **facts: Any) -> None:
        self.state.update(facts)
        self.state.update(seconds=self.bill.seconds, money=self.bill.money, uptime=uptime(), boot=boot_id())
        self._write(self.job.state, self.state, sync)

    def _write(self, path: Path, value: dict[str, Any], sync: bool) -> None:
        try:
            write_json(self.job, path, value, sync)
        except OSError as error:
            self.log(f"{path.name} could not be written: {error.strerror}")

    def tick(self) -> None:
        """Called at least every half second, also from long work."""
        self.gpu.poll()
        if time.monotonic() >= self._heartbeat_due:
            self.read_progress()
            self.heartbeat()

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            self.tick()
            rest = until - time.monotonic()
            if rest <= 0:
                return
            time.sleep(min(rest, self.spec.poll_seconds))

    def read_progress(self) -> int:
        """The step of the run, from its status and its metrics."""
        run = Path(self.spec.run_folder)
        status = read_json(run / "status.json")
        for key in ("step", "total_steps"):
            if type(status.get(key)) is int:
                self.status[key] = status[key]
        size = size_of(run / "metrics.jsonl")
        if size != self._metrics[0]:
            steps = re.findall(r'"step": ?(\d+)', tail(run / "metrics.jsonl", 0, 4096))
            self._metrics = size, int(steps[-1]) if steps else 0
        if self.status["phase"] and type(self.status["step"]) is int:
            self.status["step"] = max(self.status["step"], self._metrics[1])
        if self.status["step"] > self.state.get("best_step", 0):
            self.state["best_step"] = self.status["step"]
            if self.state.get("restarts"):
                self.state["restarts"] = 0  # the trainer makes progress
        self.status["restarts"] = self.state.get("total_restarts", 0)
        return int(self.status["step"])

    # The course of a job

    def run(self) -> None:
        self.catch_signals()
        make_reserve(self.job)
        self.bill_gap()
        self.set(state="running")
        outcome = self.state.get("outcome")
        if not isinstance(outcome, dict):
            outcome = self.run_phases()
            self.log(f"{outcome['state']}: {outcome['message']}")
            self.save_state(outcome=outcome)
        self.finish(outcome)

    def catch_signals(self) -> None:
        signal.signal(signal.SIGHUP, lambda *_: None)  # a handler, not SIG_IGN: that would be inherited
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda found, _: self._signals.append(found))

    def bill_gap(self) -> None:
        """The time in which a phase ran without a supervisor."""
        name = str(self.state.get("phase", ""))
        if not name or self.state.get("outcome"):
            return
        ended = read_json(self.job.exit(name))
        if lives(trainer_of(self.job, name)):
            self.bill.add_gap(self.state, uptime())
        elif ended.get("attempt") == self.state.get("attempt") and isinstance(ended.get("uptime"), (int, float)):
            self.bill.add_gap(self.state, ended["uptime"])

    def run_phases(self) -> dict[str, Any]:
        for phase in self.spec.phases:
            ended = read_json(self.job.exit(phase.name))
            if ended.get("code") == 0 and ended.get("argv") == phase.argv:
                continue
            outcome = self.run_phase(phase)
            if outcome is not None:
                return outcome
        return self.outcome("done", "", f"{self.spec.run} is done", 0)

    def outcome(self, state: str, reason: str, message: str, code: int | None) -> dict[str, Any]:
        resumable = state == "stopped" or (state == "failed" and reason not in ("input", "start"))
        return {
            "state": state, "reason": reason, "message": self.scrub(message), "exit_code": code, "resumable": resumable,
            "phase": self.state.get("phase", ""),
        }  # fmt: skip

    def run_phase(self, phase: Phase) -> dict[str, Any] | None:
        """None where the next phase may start."""
        while True:
            limit = self.find_limit()
            if limit is not None and not self.is_running(phase):
                return self.outcome("stopped", limit[0], limit[1], None)
            self.start_phase(phase)
            asked, detail = self.watch(phase)
            code, text = self.exit_of(phase)
            gpu = gpu_error_in(self.phase_output(phase)) if phase.restart else None
            restarts, most = int(self.state.get("restarts", 0)), int(self.spec.max_restarts)
            what, reason = after_exit(code, asked, phase, restarts, most, gpu)
            kill_all(self.job)  # workers that their parent left behind would hold the GPU
            self.log(f"{phase.name} ended: {text}")
            if what == "next":
                return None
            if what != "restart":
                message = self.describe_end(phase, reason, detail or gpu or "", text)
                if what == "stopped" and reason != "limit" and phase.restart and code != 3:
                    message += f" (the trainer did not save before it ended: {text})"
                return self.outcome(what, reason, message, code)
            self.save_state(restarts=restarts + 1, total_restarts=int(self.state.get("total_restarts", 0)) + 1)
            wait = min(300.0, self.spec.backoff_seconds * 2**restarts)
            self.set(message=f"{detail or text}; restart {restarts + 1} of {most} in {wait:.0f} s", reason=reason)
            self.wait_unless_stopped(wait)

    def wait_unless_stopped(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.find_limit() is None:
            self.pause(min(self.spec.poll_seconds, max(0.0, until - time.monotonic())))

    def describe_end(self, phase: Phase, reason: str, detail: str, text: str) -> str:
        line = last_line(self.job.log(phase.name), int(self.state.get("log_start", 0)))
        if reason == "limit":
            return line or f"{phase.name} stopped at a limit of its own; launch again to resume"
        if reason == "input":
            return line or f"{phase.name}: wrong input"
        if reason == "gpu":
            return f"GPU error: {detail}; use another machine, then launch again to resume"
        if reason in ("crash", "stall", "start"):
            tried = f" after {self.state.get('restarts', 0)} restarts without a new step" if phase.restart else ""
            return f"{phase.name} failed{tried} ({detail or text}){': ' + line if line else ''}"
        return detail

    def find_limit(self) -> tuple[str, str] | None:
        """Why nothing more may run: (reason, message)."""
        spec = self.spec
        if self._signals:
            return "signal", f"the supervisor got signal {self._signals[0]}; launch again to resume"
        if self.job.stop_request.exists():
            return "stop", "stopped as asked; launch again to resume"
        money = self.bill.total_money
        if spec.budget is not None and spec.price_per_hour is not None and money is not None:
            self.bill.tick()
            money = self.bill.total_money or 0.0
            if money >= budget_threshold(spec.budget, spec.price_per_hour, spec.grace_seconds):
                spent, budget = f"{money:.2f} {spec.currency}".strip(), f"{spec.budget:g} {spec.currency}".strip()
                return "budget", f"the budget of {budget} is used up ({spent} spent); raise it to resume"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "deadline", "the deadline has come; set a later one to resume"
        return self.find_full_disk()

    def find_full_disk(self) -> tuple[str, str] | None:
        if time.monotonic() < self._disk_due or not self.spec.min_free_bytes:
            return None
        self._disk_due = time.monotonic() + self.spec.disk_seconds
        for path in (self.spec.run_folder, self.spec.home):
            free = free_bytes(path)
            if free is not None and free < self.spec.min_free_bytes:
                self._disk_due = 0.0  # asked again, it is still full
                return "disk", (
                    f"{path}: {free / 2**20:,.0f} MiB are free, fewer than {self.spec.min_free_bytes / 2**20:,.0f}; "
                    "free some space to resume"
                )
        return None

    # One phase

    def is_running(self, phase: Phase) -> bool:
        """Whether an attempt of it is under way: it lives, has ended unseen, or its shim is about to start it."""
        return self.state.get("phase") == phase.name and not self.state.get("attempt_over", True)

    def start_phase(self, phase: Phase) -> None:
        """Adopts the attempt under way, or starts the next one."""
        adopted = self.is_running(phase)
        if not adopted:
            self.save_state(
                phase=phase.name, attempt=int(self.state.get("attempt", 0)) + 1, attempt_over=False,
                log_start=max(0, size_of(self.job.log(phase.name))),
            )  # fmt: skip
            self.start_shim(phase)
        self.log(f"{phase.name}: {'adopted' if adopted else 'started'}, attempt {self.state['attempt']}")
        self.set(state="running", phase=phase.name, message="", reason="")

    def start_shim(self, phase: Phase) -> None:
        argv = [sys.executable, _FILE, "shim", str(self.job.folder), phase.name]
        with open(self.job.log(phase.name), "ab") as log:
            self._shim = subprocess.Popen(
                [*argv, str(self.state["attempt"])], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, cwd="/",
            )  # fmt: skip
        self._shim_due = time.monotonic() + 5

    _shim: subprocess.Popen[bytes] | None = None
    _shim_due = 0.0

    def phase_has_ended(self, phase: Phase) -> bool:
        """Starts another shim where the phase has lost its own."""
        attempt = self.state["attempt"]
        if read_json(self.job.exit(phase.name)).get("attempt") == attempt:
            return True
        if self._shim is not None and self._shim.poll() is None:
            return False
        shim = read_json(self.job.shim)
        if shim.get("phase") == phase.name and shim.get("attempt") == attempt and lives(shim):
            return False
        if time.monotonic() >= self._shim_due:
            self.start_shim(phase)
        return False

    def watch(self, phase: Phase) -> tuple[str | None, str]:
        """Until the phase has ended: (why the supervisor stopped it, in words)."""
        stall = StallWatch(self.spec, self.job, phase, self.gpu)
        asked: tuple[str | None, str] = (None, "")
        kill_at: float | None = None
        while not self.phase_has_ended(phase):
            if asked[0] is None:
                asked = self.find_reason(phase, stall)
                if asked[0] is not None:
                    self.log(f"stopping {phase.name}: {asked[1]}")
                    self.set(message=f"stopping: {asked[1]}", reason=asked[0])
                    trainer = trainer_of(self.job, phase.name)
                    if asked[0] != "stall" and lives(trainer):
                        send(trainer["pid"], signal.SIGTERM)
                        kill_at = time.monotonic() + self.spec.grace_seconds
                    else:
                        kill_at = time.monotonic()
            elif kill_at is not None and time.monotonic() >= kill_at:
                kill_all(self.job)
            self.pause(self.spec.poll_seconds)
        self.save_state(attempt_over=True)
        self.read_progress()
        return asked

    def find_reason(self, phase: Phase, stall: StallWatch) -> tuple[str | None, str]:
        limit = self.find_limit()
        if limit is not None:
            return limit
        if self.gpu.error is not None and phase.restart:
            return "gpu", self.gpu.error
        if stall.poll(self.read_progress()):
            text = gpu_error_in(self.phase_output(phase))
            if text is not None:
                return "gpu", text
            return "stall", f"no sign of progress for {self.spec.stall_minutes:g} min while nothing was computed"
        return None, ""

    def phase_output(self, phase: Phase) -> str:
        return tail(self.job.log(phase.name), int(self.state.get("log_start", 0)))

    def exit_of(self, phase: Phase) -> tuple[int | None, str]:
        """The exit code, and how it ended in words. Where nobody saw the end, the run's own status tells it."""
        record = read_json(self.job.exit(phase.name))
        code = record.get("code")
        if record.get("signal"):
            return code, f"signal {record['signal']}"
        if isinstance(code, int):
            return code, f"exit code {code}"
        status = read_json(Path(self.spec.run_folder) / "status.json")
        began = read_json(self.job.phase(phase.name)).get("began", 0.0)
        updated = status.get("updated")
        if phase.restart and isinstance(updated, (int, float)) and updated >= began:
            code = {"done": 0, "stopped": 3}.get(str(status.get("state")))
        return code, "its end was not seen" if code is None else f"exit code {code}, by its status"

    # The end: verify, notify, hold, gate, stop action

    def finish(self, outcome: dict[str, Any]) -> None:
        self.set(state="running", phase="verify", message=f"{outcome['message']}; verifying what was saved")
        items, wrong = self.verify(outcome)
        if wrong:
            outcome = {**outcome, "message": f"{outcome['message']}; not verified: {'; '.join(wrong[:3])}"}
        self.set(verified=not wrong, reason=outcome["reason"], message=outcome["message"])
        if not self.state.get("notified"):
            self.notify(outcome["state"], outcome["message"])
            self.save_state(notified=True)
        self.end(outcome, items)

    def verify(self, outcome: dict[str, Any]) -> tuple[list[dict[str, Any]] | None, list[str]]:
        is_done = outcome["state"] == "done" and any(phase.restart for phase in self.spec.phases)
        try:
            items = inspect(self.spec, self.job, self.tick)
        except OSError as error:
            return None, [f"{error.filename}: {error.strerror}"]
        self._write(self.job.folder / "verified.json", {"version": 1, "items": items}, True)
        return items, problems(items, self.spec, is_done)

    def notify(self, state: str, text: str) -> None:
        message = {
            "title": f"Sojourn: {self.spec.run} {state}", "text": text, "run": self.spec.run, "state": state,
            "seconds": round(self.bill.total_seconds), "money": self.bill.total_money, "currency": self.spec.currency,
        }  # fmt: skip
        for index, entry in enumerate(self.spec.notify):
            secret = self._notify_secrets[index]
            failure = send_notification(entry, secret, message, self.spec.notify_seconds)
            if failure is not None:
                self.log(f"notification {entry.get('kind')} failed: {failure}")
            self.tick()

    def end(self, outcome: dict[str, Any], items: list[dict[str, Any]] | None) -> None:
        action = str(self.spec.stop.get("action") or "none")
        wanted = (
            bool(self.spec.stop.get("when_done")) and action != "none" and outcome["reason"] not in ("stop", "signal")
        )
        if wanted and outcome["state"] == "failed":
            wanted = bool(self.spec.stop.get("when_failed", True))
        stop_action = "none"
        if wanted:
            self.hold(outcome)
            if (self.job.folder / "pulled").exists():
                items = self.verify(outcome)[0]
            wanted = not self.job.stop_request.exists() and not self._signals
            verdict = check_gate(self.spec, self.job, action, items) if wanted else Verdict(False, "stopped as asked")
            command = self.spec.stop.get("command")
            if verdict.allowed and not command:
                verdict = Verdict(False, f"there is no command on this box for {action}; type: sojourn release")
            stop_action = "done" if verdict.allowed else f"refused: {verdict.reason}"
            if not verdict.allowed:
                self.log(f"{action} refused: {verdict.reason}")
                self.notify(outcome["state"], f"{outcome['message']}; the box still runs: {verdict.reason}")
        if not outcome["resumable"]:
            shutil.rmtree(str(self.job.secrets), ignore_errors=True)
        self.set(**{**outcome, "stop_action": stop_action})
        if stop_action == "done":
            self.stop_box([os.path.expandvars(str(word)) for word in self.spec.stop["command"]], outcome)

    def stop_box(self, command: list[str], outcome: dict[str, Any]) -> None:
        """The status is final before: this process ends with the box."""
        self.log(f"stopping this box: {command[0]}")
        with contextlib.suppress(OSError, AttributeError):
            os.sync()
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=120, check=False)
            failure = None if done.returncode == 0 else f"exit code {done.returncode}"
        except (OSError, subprocess.SubprocessError) as error:
            failure = str(error)
        if failure is not None:
            self.log(f"the box could not be stopped: {failure}")
            self.set(stop_action=f"refused: {command[0]} failed ({failure}); stop the box in its console")
            self.notify(str(outcome["state"]), f"the box could not be stopped ({failure}); stop it in its console")

    def hold(self, outcome: dict[str, Any]) -> None:
        """While a laptop follows and has not pulled yet. Freshness is counted from when a touch was seen: the laptop's
        clock and this one may differ."""
        attached, pulled = self.job.folder / "attached", self.job.folder / "pulled"
        until = time.monotonic() + self.spec.hold_minutes * 60
        touched = _mtime(attached)
        if touched is None or abs(time.time() - touched) > self.spec.lease_seconds:
            return
        fresh_until = time.monotonic() + self.spec.lease_seconds
        self.set(state="holding", phase="", message=f"{outcome['message']}; waiting for the laptop to pull")
        while not pulled.exists() and time.monotonic() < min(until, fresh_until) and not self.is_over_budget():
            if self.job.stop_request.exists() or self._signals:
                return
            if _mtime(attached) != touched:
                touched, fresh_until = _mtime(attached), time.monotonic() + self.spec.lease_seconds
            self.pause(self.spec.poll_seconds)

    def is_over_budget(self) -> bool:
        money = self.bill.total_money
        return self.spec.budget is not None and money is not None and money >= self.spec.budget


def recover_attempt(job: Job, spec: Spec) -> dict[str, Any]:
    """What state.json would say of the last attempt, from the files of its shim: state.json is missing or damaged."""
    last = 0
    for phase in spec.phases:
        record, ended = read_json(job.phase(phase.name)), read_json(job.exit(phase.name))
        last = max([last, *(each["attempt"] for each in (record, ended) if type(each.get("attempt")) is int)])
        if lives(trainer_of(job, phase.name)):
            return {"phase": phase.name, "attempt": record["attempt"], "attempt_over": False}
    return {"attempt": last} if last else {}


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _read_secret(job: Job, entry: dict[str, Any]) -> str:
    try:
        return (job.folder / str(entry["secret"])).read_text(encoding="utf-8").strip()
    except (KeyError, OSError, ValueError):
        return ""


def _read_secrets(job: Job) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for path in job.secrets.iterdir():
            with contextlib.suppress(OSError, ValueError):
                text = path.read_text(encoding="utf-8").strip()
                found += [text] if len(text) >= 6 else []
    return sorted(found, key=len, reverse=True)


# ------------------------------------------------------------------------------------------------------------ the shim


def run_shim(job: Job, spec: Spec, phase: Phase, attempt: int) -> None:
    """Owns one attempt of a phase: starts it, or watches the one that lives; writes how it ended; and starts the
    supervisor again where that is gone, until the next shim has taken over or the job is over."""
    for caught in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(caught, lambda *_: None)  # handlers are not inherited by the trainer
    held = lock(job.folder / f".lock-{phase.name}")
    if held is None:
        return
    me = {**identity(os.getpid()), "phase": phase.name, "attempt": attempt}
    write_json(job, job.shim, me)
    guard = _Guard(job, spec)
    if read_json(job.exit(phase.name)).get("attempt") != attempt:
        code, number = _run_attempt(job, spec, phase, attempt, guard)
        ended = {
            "attempt": attempt, "code": code, "signal": number, "argv": phase.argv, "ended": time.time(),
            "uptime": uptime(), "boot": boot_id(),
        }  # fmt: skip
        _write_patiently(job, job.exit(phase.name), ended)
    held.close()
    while read_json(job.status).get("state") not in TERMINAL:
        now = read_json(job.shim)
        if now and (now.get("pid"), now.get("started")) != (me["pid"], me["started"]):
            return
        guard.check()
        time.sleep(spec.shim_seconds)


def _run_attempt(job: Job, spec: Spec, phase: Phase, attempt: int, guard: _Guard) -> tuple[int | None, int | None]:
    """(exit code, signal); both None where nobody saw the end."""
    record = read_json(job.phase(phase.name))
    trainer = record.get("trainer") or {}
    if record.get("attempt") == attempt:
        while lives(trainer):  # another shim's child: that one was killed
            guard.check()
            time.sleep(min(spec.shim_seconds, spec.poll_seconds))
        return None, None
    kill_all(job)
    try:
        child = _start_trainer(job, spec, phase, attempt)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{phase.argv[0]}: could not be started: {getattr(error, 'strerror', None) or error}", flush=True)
        return 127, None
    while True:
        try:
            code = child.wait(spec.shim_seconds)
            return (code, None) if code >= 0 else (128 - code, -code)
        except subprocess.TimeoutExpired:
            guard.check()


def _start_trainer(job: Job, spec: Spec, phase: Phase, attempt: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **{str(key): str(value) for key, value in spec.env.items()}}
    environment.update({name: str(path) for name, path in spec.secret_env_files.items()})
    environment[MARK] = str(job.folder)

    def record() -> None:
        """In the child, before it becomes the trainer: there is no trainer without a record."""
        value = {"attempt": attempt, "trainer": identity(os.getpid()), "began": time.time()}
        write_json(job, job.phase(phase.name), value)

    return subprocess.Popen(
        phase.argv, stdin=subprocess.DEVNULL, env=environment, cwd=spec.home if Path(spec.home).is_dir() else "/",
        start_new_session=True, preexec_fn=record,
    )  # fmt: skip


def _write_patiently(job: Job, path: Path, value: dict[str, Any]) -> None:
    while True:
        try:
            return write_json(job, path, value)
        except OSError as error:
            print(f"{path.name} could not be written: {error.strerror}; trying again", file=sys.stderr, flush=True)
            time.sleep(2)


class _Guard:
    """Starts the supervisor again where it died without a terminal state, or stands still."""

    STANDS_STILL = 300.0  # seconds without a heartbeat

    def __init__(self, job: Job, spec: Spec) -> None:
        self._job, self._pause, self._due = job, spec.shim_seconds, 0.0

    def check(self) -> None:
        status = read_json(self._job.status)
        if status.get("state") in TERMINAL or time.monotonic() < self._due:
            return
        supervisor = read_json(self._job.supervisor)
        if lives(supervisor):
            last = status.get("uptime")
            ours = status.get("pid") == supervisor.get("pid") and isinstance(last, (int, float))
            if not ours or uptime() - float(last or 0) < self.STANDS_STILL:
                return
            send(supervisor["pid"], signal.SIGKILL)
        subprocess.run(
            [sys.executable, _FILE, "start", str(self._job.folder), "--revive"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        self._due = time.monotonic() + self._pause
        self._pause = min(60.0, 2 * self._pause)


# --------------------------------------------------------------------------------------------------------- commands


def prepare_start(job: Job, spec: Spec) -> None:
    """Before a start that a user asked for: forgets what belongs to an earlier one, except for what it cost."""
    status, state = read_json(job.status), read_json(job.state)
    old: list[Path] = [job.stop_request]
    if status.get("state") in TERMINAL:
        old.append(job.folder / "pulled")
    if status.get("state") == "done":
        old += [*job.folder.glob("exit-*.json"), *job.folder.glob("phase-*.json")]
    for path in old:
        with contextlib.suppress(OSError):
            path.unlink()
    was_done = (state.get("outcome") or {}).get("state") == "done"
    if status.get("state") in TERMINAL or not was_done:  # else its end was cut short, and goes on
        for key in ("outcome", "notified", "best_step"):
            state.pop(key, None)
    if not lives(trainer_of(job, str(state.get("phase", "")))):
        state.update(restarts=0)
        if "attempt" in state:
            state.update(attempt_over=True)
    _replace_file(job.used_spec, (job.folder / "spec.json").read_bytes(), True)
    write_json(job, job.state, state)
    kept: dict[str, Any] = {key: status[key] for key in ("seconds", "money", "step", "total_steps") if key in status}
    started = {"state": "starting", "phase": "", "message": "", "resumable": True, "reason": "", "run": spec.run}
    write_json(job, job.status, {**kept, **started, **identity(os.getpid()), "updated": time.time()})


def start(folder: Path, again: bool = False, revive: bool = False) -> int:
    job = Job(folder)
    spec = read_spec(job.used_spec if revive and job.used_spec.exists() else folder / "spec.json")
    (folder / "logs").mkdir(exist_ok=True)
    pid = living_supervisor(job)
    if pid is not None:
        print(pid)
        return 0
    status = read_json(job.status)
    if status.get("state") in TERMINAL and (revive or (status.get("spec") == spec.hash and not again)):
        print(status.get("pid", 0))
        print(f"this job is {status['state']}; to start it again, add --again", file=sys.stderr)
        return 0
    pid = detach(job, spec, revive)
    if pid is None:
        print(f"the supervisor did not start; see {job.log('supervisor')}", file=sys.stderr)
        return 1
    print(pid)
    return 0


def living_supervisor(job: Job) -> int | None:
    held = lock(job.folder / ".lock")
    if held is not None:
        held.close()
        return None
    for _ in range(100):  # it writes its pid right after it took the lock
        found = read_json(job.supervisor)
        if lives(found):
            return int(found["pid"])
        time.sleep(0.05)
    return None


def detach(job: Job, spec: Spec, revive: bool) -> int | None:
    """Double fork and setsid: the supervisor has no terminal, no parent and no open stream of this session."""
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            _become_supervisor(job, spec, revive, reader, writer)
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    return int(text) if text.isdigit() else living_supervisor(job)


def _become_supervisor(job: Job, spec: Spec, revive: bool, reader: int, writer: int) -> NoReturn:
    code = 1
    try:
        os.close(reader)
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(str(job.log("supervisor")), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for number, target in ((0, null), (1, log), (2, log)):
            os.dup2(target, number)
        keep = os.dup2(writer, 3, inheritable=False)
        os.closerange(4, 65536)
        sys.stdout = sys.stderr = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
        held = lock(job.folder / ".lock")
        if held is not None:
            write_json(job, job.supervisor, identity(os.getpid()))
            if not revive:
                prepare_start(job, spec)
            os.write(keep, str(os.getpid()).encode())
            os.close(keep)
            Supervisor(job, spec).run()
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def stop(folder: Path) -> int:
    """A request on disk: it is not lost with this process, or with the supervisor."""
    job = Job(folder)
    state = read_status(folder).get("state")
    if state in (*TERMINAL, "none"):
        print(f"nothing to stop: {state}")
        return 0
    _replace_file(job.stop_request, b'{"reason": "stop"}\n', True)
    if living_supervisor(job) is None:
        return start(folder, revive=True)
    print("stopping")
    return 0


def show_gate(folder: Path, action: str) -> int:
    job = Job(folder)
    spec = read_spec(job.used_spec if job.used_spec.exists() else folder / "spec.json")
    items: list[dict[str, Any]] | None
    try:
        items = inspect(spec, job)
    except OSError:
        items = None
    verdict = check_gate(spec, job, action, items)
    if verdict.allowed and lives(read_json(job.supervisor)):
        verdict = Verdict(False, f"{spec.run} still runs on this box; wait for it, or type: sojourn stop {spec.run}")
    print(json.dumps({"allowed": verdict.allowed, "reason": verdict.reason, "items": items}))
    return 0


def main(arguments: list[str]) -> int:
    usage = "usage: supervisor.py start|stop|status|gate|shim JOBDIR [PHASE | ACTION]"
    flags = {word for word in arguments if word.startswith("--")}
    words = [word for word in arguments if not word.startswith("--")]
    if len(words) < 2 or flags - {"--again", "--revive"}:
        print(usage, file=sys.stderr)
        return 2
    command, folder = words[0], Path(os.path.realpath(words[1]))
    try:
        if command == "start":
            return start(folder, "--again" in flags, "--revive" in flags)
        if command == "stop":
            return stop(folder)
        if command == "status":
            print(json.dumps(read_status(folder), ensure_ascii=False))
            return 0
        if command == "gate" and len(words) == 3:
            return show_gate(folder, words[2])
        if command == "shim" and len(words) == 4:
            spec = read_spec(Job(folder).used_spec)
            phase = next(phase for phase in spec.phases if phase.name == words[2])
            run_shim(Job(folder), spec, phase, int(words[3]))
            return 0
    except SpecError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    print(usage, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
