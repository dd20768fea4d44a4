"""What a box is, as one JSON line after a marker; standard library only, Python 3.8 to 3.13, also through `python -`.

Its argument is a JSON object; every key is optional:
  home          our folder's parent there; versions and jobs below it are listed
  variables     names of environment variables to look for, here, in PID 1 and in the login shell
  folders       folders to look for; paths: folders whose disks are described too
  hosts         ["pypi.org:443"]: which of them accept a TCP connection within 2 s
  import_torch  import torch in the best Python, to see whether CUDA works (seconds on a cold disk)
  packages      list every installed distribution of the best Python, and of those with a torch
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Facts = dict[str, Any]

MARKER = "SOJOURN-PROBE "
SUPPORTED = ((3, 10), (3, 13))
_SECONDS = 10.0
_IMPORT_SECONDS = 120.0
_MOST_PYTHONS = 24

# Where images keep their Python; ~ is the user's home folder.
_PYTHONS = (
    "/root/miniconda3", "/opt/conda", "/opt/miniconda3", "/root/anaconda3", "/usr/local/miniconda3", "/root/miniforge3",
    "~/miniconda3", "~/anaconda3", "~/miniforge3", "~/mambaforge", "/venv/main", "/opt/venv", "/workspace/venv",
    "/opt/environments/python/main", "~/.venv", "~/venv", "/usr/local", "/usr",
)  # fmt: skip
_PROGRAMS = ("~/.local/bin", "~/.cargo/bin", "~/miniconda3/bin", "/opt/conda/bin", "/root/miniconda3/bin")

# Runs inside each candidate; works on any Python 3 and imports nothing heavy.
_DESCRIBE = r"""
import json, os, re, sys, sysconfig
def find(name):
    try:
        import importlib.util
        return importlib.util.find_spec(name) is not None
    except Exception:
        return False
packages, torch = {}, {}
for folder in sys.path:
    if not os.path.isdir(folder):
        continue
    for entry in os.listdir(folder):
        stem, dot, kind = entry.rpartition(".")
        if kind in ("dist-info", "egg-info") and "-" in stem:
            parts = stem.split("-")
            name = re.sub(r"[-_.]+", "-", parts[0]).lower()
            packages.setdefault(name, parts[1])
            if name == "torch" and not torch:
                torch = {"version": parts[1], "info": os.path.join(folder, entry)}
                torch["file"] = os.path.join(folder, "torch", "__init__.py")
    file = os.path.join(folder, "torch", "version.py")
    if os.path.isfile(file) and "cuda" not in torch:
        text = open(file).read()
        for key in ("cuda", "hip"):
            found = re.search(r"(?m)^" + key + r"\b[^=]*=\s*'([^']+)'", text)
            torch[key] = found.group(1) if found else None
base = getattr(sys, "base_prefix", sys.prefix)
print(json.dumps({
    "executable": sys.executable, "version": list(sys.version_info[:3]), "prefix": sys.prefix, "base_prefix": base,
    "torch": torch if "version" in torch else None, "packages": packages,
    "pip": packages.get("pip") if find("pip") else None,
    "venv": find("venv"), "ensurepip": find("ensurepip"), "site": [p for p in sys.path if p.endswith("-packages")],
    "conda": os.path.isdir(os.path.join(sys.prefix, "conda-meta")), "platform": sysconfig.get_platform(),
    "libc": os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None,
}))
"""

_IMPORT_TORCH = r"""
import json, torch
ready = torch.cuda.is_available()
print(json.dumps({"version": torch.__version__, "file": torch.__file__, "cuda": torch.version.cuda,
                  "cuda_available": ready, "devices": torch.cuda.device_count() if ready else 0}))
"""


def run(argv: list[str], seconds: float = _SECONDS, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Exit code, output and error output of a child in its own session, which is killed as a whole when it is late."""
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    try:
        child = subprocess.Popen(argv, stdin=none, stdout=pipe, stderr=pipe, env=env, start_new_session=True)
    except OSError as error:
        return 127, "", str(error)
    try:
        out, err = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except OSError:
            child.kill()
        child.communicate()
        return 124, "", f"no answer within {seconds:g} s"
    return child.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")


def last_line(text: str, otherwise: str) -> str:
    return (text.strip().splitlines() or [otherwise])[-1][:300]


def read(path: str | Path, most: int = 1 << 16) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


def _parse_environment(text: str) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def environments() -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Ours, the login shell's and PID 1's: a command over SSH sees neither the image's nor the profile's variables."""
    shell = os.environ.get("SHELL") or "/bin/sh"
    if not os.access(shell, os.X_OK):
        shell = "/bin/sh"
    quiet = {key: value for key, value in os.environ.items() if not key.startswith("SSH_")}  # some profiles start tmux
    code, text, _ = run([shell, "-lc", "printf '\\0'; env -0"], 5.0, quiet)
    login = _parse_environment(text) if code == 0 else {}
    return dict(os.environ), login, _parse_environment(read("/proc/1/environ", 1 << 20))


def find_pythons(envs: Iterable[Mapping[str, str]], home: str = "") -> list[str]:
    """Executables, each environment once: what is on any of the PATHs, conda, its envs, venvs."""
    envs = list(envs)
    roots = [Path(path).expanduser() for path in _PYTHONS]
    roots += [Path(env[name]) for env in envs for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if env.get(name)]
    found: list[Path] = []
    for env in reversed(envs):
        for folder in env.get("PATH", "").split(os.pathsep):
            found += [Path(folder, name) for name in ("python", "python3") if folder]
    for root in roots:
        found += [root / "bin/python", root / "bin/python3", *sorted(root.glob("envs/*/bin/python"))]
        found += sorted(root.glob("bin/python3.[0-9]*"), reverse=True)
    found += sorted(Path("/").glob("venv/*/bin/python")) + sorted(Path("/").glob("opt/*/bin/python"))
    found += sorted(Path.home().glob(".pyenv/versions/*/bin/python"), reverse=True)
    seen, kept = set(), []
    ours = str(Path(home, ".sojourn")) + os.sep if home else None
    for path in found:
        text = str(path)
        if "/shims/" in text or text.endswith("-config") or not os.access(text, os.X_OK):
            continue
        if ours and text.startswith(ours):
            continue
        top = path.parent.parent
        # the Python of a venv is a link to that of its parent, and is another environment all the same
        key = os.path.realpath(top if (top / "pyvenv.cfg").is_file() else path)
        if key not in seen:
            seen.add(key)
            kept.append(text)
    return kept[:_MOST_PYTHONS]


def describe_pythons(paths: list[str]) -> list[Facts]:
    rows: list[Facts] = [{} for _ in paths]

    def work(index: int) -> None:
        code, out, err = run([paths[index], "-c", _DESCRIBE])
        try:
            rows[index] = dict(json.loads(out.strip().splitlines()[-1]), path=paths[index])
        except (ValueError, IndexError):
            rows[index] = {"path": paths[index], "error": last_line(err, f"exit code {code}")}

    parallel(work, range(len(paths)))
    return sorted(rows, key=_rank, reverse=True)


def _rank(row: Facts) -> tuple[Any, ...]:
    """The best first: a Python that we support with a torch, a CUDA one, a new one; the system's own Python last."""
    version = tuple(row.get("version", (0, 0)))[:2]
    torch = row.get("torch") or {}
    numbers = [int(part) for part in re.findall(r"\d+", torch.get("version", "").split("+")[0])[:3]]
    built = bool(torch.get("cuda") or torch.get("hip"))
    usable = SUPPORTED[0] <= version <= SUPPORTED[1]
    apart = row.get("prefix") not in ("/usr", "/usr/local")
    return usable and bool(torch), usable, built, bool(torch), numbers, bool(row.get("pip")), apart, version


def parallel(work: Callable[[Any], None], items: Iterable[Any], seconds: float | None = None) -> None:
    """Threads that are left behind when they take longer: looking up a name, say, has no time limit of its own."""
    threads = [threading.Thread(target=work, args=(item,), daemon=True) for item in items]
    for thread in threads:
        thread.start()
    until = None if seconds is None else time.monotonic() + seconds
    for thread in threads:
        thread.join(None if until is None else max(until - time.monotonic(), 0))


def import_torch(python: str, seconds: float = _IMPORT_SECONDS, env: Mapping[str, str] | None = None) -> Facts:
    code, out, err = run([python, "-c", _IMPORT_TORCH], seconds, env)
    try:
        return dict(json.loads(out.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        return {"error": last_line(err, f"exit code {code}")}


def gpus(path: str) -> Facts | list[Facts] | None:
    """What nvidia-smi lists; None where there is no nvidia-smi, {"error"} where it fails."""
    program = shutil.which("nvidia-smi", path=path) or shutil.which("nvidia-smi", path="/usr/bin:/usr/local/nvidia/bin")
    if not program:
        return None
    fields = {"index": "index", "name": "name", "memory_mib": "memory.total", "used_mib": "memory.used"}
    fields["driver"] = "driver_version"
    more = {"utilization": "utilization.gpu", "compute_mode": "compute_mode", "uuid": "uuid"}
    more["ecc_errors"] = "ecc.errors.uncorrected.volatile.total"
    code, out, err = 0, "", ""
    for asked in ({**fields, **more}, fields):  # older drivers and MIG slices refuse a field that they do not know
        argv = [program, "--query-gpu=" + ",".join(asked.values()), "--format=csv,noheader,nounits"]
        code, out, err = run(argv, 15.0)
        rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines() if line.strip()]
        if code == 0 and all(len(row) == len(asked) for row in rows):
            pairs = [zip(asked, row) for row in rows]
            return [{name: int(cell) if cell.isdigit() else cell for name, cell in pair} for pair in pairs]
        if "No devices were found" in out + err:
            return []
    return {"error": ((err or out).strip().splitlines() or [f"nvidia-smi: exit code {code}"])[0][:300]}


def disks(paths: Iterable[str]) -> list[Facts]:
    """Of every folder that exists: size, free bytes and inodes, file system, and whether we may write there."""
    mounts = [line.split(" ") for line in read("/proc/mounts", 1 << 20).splitlines()]
    points = [(m[1].replace("\\040", " "), m[2], m[3].split(",")) for m in mounts if len(m) > 3]
    found = []
    for path in dict.fromkeys(paths):
        try:
            stat = os.statvfs(path)
        except OSError:
            continue
        real = os.path.realpath(path).rstrip("/") + "/"
        under = [point for point in points if real.startswith(point[0].rstrip("/") + "/")]
        mount, kind, options = max(under, key=lambda point: len(point[0])) if under else ("", "", [])
        found.append({
            "path": path, "size": stat.f_frsize * stat.f_blocks, "free": stat.f_frsize * stat.f_bavail,
            "inodes": stat.f_files, "free_inodes": stat.f_favail, "mount": mount, "filesystem": kind,
            "writable": "ro" not in options and os.access(path, os.W_OK),
        })  # fmt: skip
    return found


def memory() -> dict[str, int]:
    """Bytes in all and free, of the container where it has a limit."""
    rows = dict(re.findall(r"(?m)^(\w+):\s+(\d+) kB", read("/proc/meminfo")))
    total, free = int(rows.get("MemTotal", 0)) * 1024, int(rows.get("MemAvailable", 0)) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, taken = read(limit).strip(), read(used).strip()
        if most.isdigit() and int(most) < total:
            total, free = int(most), min(free, max(int(most) - int(taken or 0), 0))
    return {"total": total, "free": free}


def cpus() -> float:
    count = float(len(os.sched_getaffinity(0)))
    quota, _, period = read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if not period:
        quota, period = (read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if quota.isdigit() and period.isdigit() and int(period):
        count = min(count, int(quota) / int(period))
    return round(count, 2)


def is_container() -> bool:
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return True
    words = read("/proc/1/cgroup") + read("/proc/1/environ")
    return any(word in words for word in ("docker", "kubepods", "containerd", "lxc", "container="))


def reachable(hosts: Iterable[str], seconds: float = 2.0) -> dict[str, bool]:
    answers = dict.fromkeys(hosts, False)

    def work(host: str) -> None:
        name, _, port = host.rpartition(":")
        try:
            socket.create_connection((name, int(port)), seconds).close()
            answers[host] = True
        except (OSError, ValueError):
            pass

    parallel(work, list(answers), seconds + 1)
    return dict(answers)


def jobs(home: str) -> dict[str, Facts]:
    """Names below HOME/.sojourn/jobs with the state that each supervisor wrote, and whether its pid is in use."""
    found: dict[str, Facts] = {}
    for file in Path(home, ".sojourn", "jobs").glob("*/status.json"):
        try:
            status = json.loads(read(file, 1 << 20))
            alive = Path("/proc", str(int(status.get("pid") or 0))).is_dir()
            found[file.parent.name] = {"state": status.get("state"), "alive": alive}
        except (ValueError, AttributeError, TypeError):
            found[file.parent.name] = {"state": None, "alive": False}
    return found


def sojourn_versions(home: str) -> list[str]:
    pattern = "lib/python3*/site-packages/sojourn-*.dist-info"
    folder = Path(home, ".sojourn")
    found = [*folder.glob("env/" + pattern), *folder.glob("envs/*/" + pattern)]
    return sorted({path.name[len("sojourn-") : -len(".dist-info")] for path in found})


def user_name() -> str:
    import pwd  # the laptop imports this file too, and Windows has no pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run under a number without a name
        return str(os.getuid())


def collect(asked: Facts) -> Facts:
    started = time.monotonic()
    home, user_home = asked.get("home") or "", str(Path.home())
    envs = environments()
    path = os.pathsep.join(env.get("PATH", "") for env in reversed(envs))
    programs = os.pathsep.join([path, *(str(Path(folder).expanduser()) for folder in _PROGRAMS)])
    pythons = describe_pythons(find_pythons(envs, home))
    for index, row in enumerate(pythons):
        if not asked.get("packages") or (index and not row.get("torch")):
            row.pop("packages", None)
    best = pythons[0] if pythons else {}
    if asked.get("import_torch") and best.get("torch"):
        best["torch"]["imported"] = import_torch(best["path"])
    variables: dict[str, str] = {}
    for env in reversed(envs):
        variables.update({name: env[name] for name in asked.get("variables", ()) if name in env})
    paths = ["/", "/tmp", "/dev/shm", user_home, home, *asked.get("paths", ())]  # noqa: S108
    return {
        "version": 1, "user": user_name(), "hostname": socket.gethostname(), "user_home": user_home,
        "python": sys.executable, "pythons": pythons,
        "uv": shutil.which("uv", path=programs), "conda": shutil.which("conda", path=programs), "gpus": gpus(path),
        "variables": variables, "folders": [folder for folder in asked.get("folders", ()) if Path(folder).is_dir()],
        "disks": disks([p for p in paths if p]), "memory": memory(), "cpus": cpus(), "clock": time.time(),
        "kernel": platform.release(), "machine": platform.machine(), "container": is_container(),
        "reachable": reachable(asked.get("hosts", ())), "sojourn": sojourn_versions(home) if home else [],
        "jobs": jobs(home) if home else {}, "seconds": round(time.monotonic() - started, 3),
    }  # fmt: skip


def main() -> None:
    asked = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    print("\n" + MARKER + json.dumps(collect(asked)), flush=True)


if __name__ == "__main__":
    main()
