"""Starts the run of a bundle on a machine without SSH: `python NAME.zip`, and the same line to continue it.

Standard library only, Python 3.8 to 3.13. It unpacks into HOME, finds the Python that has torch, installs Sojourn
beside it without touching torch, and starts the supervisor, which lives on when the notebook's page is closed.

    python NAME.zip [--home FOLDER] [--python PROGRAM] [--minutes N] [one of the following]

--foreground  show the log and end with the run, for platforms that end a session when its script ends
--install     unpack and install only;  --train: train in this process, where another program supervises (SkyPilot)
--status      one line: where the run stands;  --stop: save and stop;  --pack: the model as one file to download
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import IO, Any, Dict, List, NoReturn, Optional

Facts = Dict[str, Any]
HOME_MARK, PYTHON_MARK = "@HOME@", "@PYTHON@"
_TERMINAL = ("done", "stopped", "failed", "lost")
_SUPPORTED = ((3, 10), (3, 13))
_PREFIXES = ("/root/miniconda3", "/opt/conda", "/opt/miniconda3", "/venv/main", "/opt/venv", "/usr/local", "/usr")
_ROUNDS = 8

_DESCRIBE = """
import importlib.util, json, site, sys
print(json.dumps({"version": list(sys.version_info[:2]), "torch": importlib.util.find_spec("torch") is not None,
                  "venv": sys.prefix != sys.base_prefix, "sites": site.getsitepackages()}))
"""

# What Sojourn and what was installed with it require and the machine lacks. torch is never among it.
_MISSING = """
import json, re, sys
from importlib import metadata
try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement
extras, own = json.loads(sys.argv[1]), sys.argv[2]
open_, seen, wanted = [("sojourn", extras)], set(), {}
while open_:
    name, asked = open_.pop()
    if name in seen:
        continue
    seen.add(name)
    for line in metadata.requires(name) or []:
        need = Requirement(line)
        if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in ["", *asked]):
            continue
        try:
            found = metadata.distribution(need.name)
        except metadata.PackageNotFoundError:
            found = None
        if found is None or not need.specifier.contains(found.version, prereleases=True):
            wanted.setdefault(re.sub("[-_.]+", "-", need.name.lower()), set()).add(str(need.specifier))
        elif str(found.locate_file("")).startswith(own):
            open_.append((need.name, list(need.extras)))
print(json.dumps({name: ",".join(sorted(filter(None, specs))) for name, specs in wanted.items()}))
"""


class Problem(Exception):
    """One line for the user."""


class Source:
    """The bundle: this program's own archive, or the folder into which it was unpacked."""

    def __init__(self, path: Path) -> None:
        self.folder = path.parent
        self.archive = zipfile.ZipFile(str(path)) if zipfile.is_zipfile(str(path)) else None

    def open(self, name: str) -> IO[bytes]:
        if self.archive is not None:
            return self.archive.open(name)
        return (self.folder / name).open("rb")

    def read_json(self, name: str) -> Facts:
        with self.open(name) as file:
            found: Facts = json.loads(file.read().decode("utf-8"))
        return found


def find_home(platforms: List[Facts]) -> Path:
    """SOJOURN_HOME, else the folder that survives on this platform, else a folder here."""
    given = os.environ.get("SOJOURN_HOME")
    if given:
        return Path(os.path.expanduser(given))
    here = [one for one in platforms if any(_is_set(name) for name in one["env"])]
    here = here or [one for one in platforms if any(os.path.isdir(folder) for folder in one["folders"])]
    for candidate in [*here[0]["home"], *here[0]["fallback"]] if here else []:
        mount, _, below = str(candidate).partition("!")
        if os.path.isdir(mount) and os.access(mount, os.W_OK):
            return Path(mount, below)
    return Path.cwd() / "sojourn"


def _is_set(variable: str) -> bool:
    name, _, value = variable.partition("=")
    return os.environ.get(name) == value if value else name in os.environ


def unpack(source: Source, files: List[Facts], home: Path) -> None:
    """Every file atomically and verified; what is there already, whole, is kept. Marks of completeness come last."""
    for entry in files:
        target = home / entry["path"]
        if target.is_file() and target.stat().st_size == entry["size"] and _digest(target) == entry["sha256"]:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        stage = target.with_name(".%s.%d" % (target.name[:100], os.getpid()))
        digest = hashlib.sha256()
        try:
            with source.open(entry["name"]) as reader, stage.open("wb") as writer:
                for block in iter(lambda: reader.read(1 << 20), b""):
                    digest.update(block)
                    writer.write(block)
                writer.flush()
                os.fsync(writer.fileno())
            if digest.hexdigest() != entry["sha256"]:
                raise Problem("%s: damaged in the bundle; upload it again" % entry["name"])
            os.replace(str(stage), str(target))
        finally:
            if stage.exists():
                stage.unlink()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def describe(python: str) -> Optional[Facts]:
    try:
        answer = subprocess.run(
            [python, "-c", _DESCRIBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60
        )
        return json.loads(answer.stdout.decode()) if answer.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def find_python(given: Optional[str]) -> str:
    """The first Python with torch, of a version that Sojourn supports."""
    found = [sys.executable, shutil.which("python3"), shutil.which("python")]
    found += ["%s/bin/python" % prefix for prefix in _PREFIXES]
    unfit = []
    for python in [given] if given else list(dict.fromkeys(filter(None, found))):
        facts = describe(str(python))
        if facts is None:
            continue
        version = tuple(facts["version"])
        if facts["torch"] and _SUPPORTED[0] <= version <= _SUPPORTED[1]:
            return str(python)
        why = "%d.%d" % version if facts["torch"] else "%d.%d, no torch" % version
        unfit.append("%s (%s)" % (python, why))
    looked = "; found: %s" % ", ".join(unfit) if unfit else ""
    raise Problem("no Python 3.10 to 3.13 with torch%s; choose an image with PyTorch, or: --python PROGRAM" % looked)


def install(python: str, wheel: Path, extras: List[str], home: Path) -> str:
    """The Python of an environment with Sojourn, made beside the image's packages."""
    facts = describe(python) or {}
    key = hashlib.sha256(("%s %s" % (os.path.realpath(python), _digest(wheel))).encode()).hexdigest()[:12]
    folder = home / ".sojourn" / "bundle-env" / key
    own, done = folder / "bin" / "python", folder / "complete"
    if done.is_file():
        return str(own)
    print("installing sojourn into %s (torch stays as it is)" % folder, flush=True)
    shutil.rmtree(str(folder), ignore_errors=True)
    _call([python, "-m", "venv", "--without-pip", "--system-site-packages", str(folder)], "python -m venv failed")
    sites = next(folder.glob("lib/python3*/site-packages"))
    if facts.get("venv"):  # its packages are not the system's
        (sites / "image.pth").write_text("\n".join(facts["sites"]) + "\n", encoding="utf-8")
    pip = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    _call([*pip, "--no-index", "--force-reinstall", str(wheel)], "pip could not install %s" % wheel.name)
    for _ in range(_ROUNDS):
        answer = _call([str(own), "-c", _MISSING, json.dumps(extras), str(folder)], "pip is missing in %s" % python)
        missing: Dict[str, str] = json.loads(answer)
        if "torch" in missing:
            raise Problem("torch%s is needed; the image has an older one; choose a newer image" % missing["torch"])
        missing = {name: spec for name, spec in missing.items() if not name.startswith(("nvidia-", "triton"))}
        if not missing:
            done.write_text(key, encoding="utf-8")
            return str(own)
        print("installing %s" % ", ".join(sorted(missing)), flush=True)
        names = [name + spec for name, spec in sorted(missing.items())]
        _call([*pip, *names], "pip could not install %s" % ", ".join(names))
    raise Problem("packages that fit each other were not found in %d rounds of pip" % _ROUNDS)


def _call(argv: List[str], problem: str) -> str:
    answer = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if answer.returncode:
        lines = (answer.stderr or answer.stdout).decode(errors="replace").strip().splitlines()
        raise Problem("%s: %s" % (problem, lines[-1][:300] if lines else "exit code %d" % answer.returncode))
    return answer.stdout.decode(errors="replace")


def write_job(source: Source, bundle: Facts, home: Path, python: str, deadline: Optional[float]) -> Path:
    """run.yaml (JSON is YAML) and spec.json with this machine's folders in them."""
    job = home / ".sojourn" / "jobs" / str(bundle["run"])
    job.mkdir(parents=True, exist_ok=True)
    for name, target in (("run.json", "run.yaml"), ("spec.json", "spec.json")):
        values = _filled(source.read_json(name), {HOME_MARK: str(home), PYTHON_MARK: python})
        if name == "spec.json" and deadline is not None:
            values["deadline"] = deadline
        text = json.dumps(values, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
        stage = job / (".%s.%d" % (target, os.getpid()))
        stage.write_text(text, encoding="utf-8")
        os.replace(str(stage), str(job / target))
    return job


def _filled(value: Any, marks: Dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(one, marks) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, marks) for one in value]
    if isinstance(value, str):
        for mark, text in marks.items():
            value = value.replace(mark, text)
    return value


def supervise(python: str, home: Path, *words: str) -> str:
    program = home / ".sojourn" / "box" / "supervisor.py"
    return _call([python, str(program), *words], "the supervisor")


def status_of(python: str, home: Path, job: Path) -> Facts:
    found: Facts = json.loads(supervise(python, home, "status", str(job)))
    return found


def describe_status(bundle: Facts, home: Path, status: Facts) -> str:
    step = " step %s of %s" % (status.get("step"), status.get("total_steps")) if status.get("total_steps") else ""
    message = "; %s" % status["message"] if status.get("message") else ""
    return "%s: %s%s%s (in %s)" % (bundle["run"], status.get("state"), step, message, home / "runs" / bundle["run"])


def follow(python: str, home: Path, job: Path) -> Facts:
    """The logs of all phases as they grow, until the run has ended."""
    offsets: Dict[Path, int] = {}
    while True:
        status = status_of(python, home, job)
        for log in sorted(job.glob("logs/*.log")):
            if log.name == "supervisor.log":
                continue
            with log.open("rb") as file:
                file.seek(offsets.get(log, 0))
                text = file.read(1 << 20)
            offsets[log] = offsets.get(log, 0) + len(text)
            sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
        if status.get("state") in _TERMINAL:
            return status
        time.sleep(1)


def pack(bundle: Facts, home: Path) -> Path:
    """final/ of the run as one file, for a file browser that downloads no folders."""
    final = home / "runs" / bundle["run"] / "final"
    if not final.is_dir():
        raise Problem("%s: not there yet; look with --status" % final)
    target = home / ("%s-final.zip" % bundle["run"])
    stage = target.with_name(".%s.%d" % (target.name, os.getpid()))
    with zipfile.ZipFile(str(stage), "w", zipfile.ZIP_STORED) as archive:
        for file in sorted(final.rglob("*")):
            if file.is_file():
                archive.write(str(file), "%s/%s" % (bundle["run"], file.relative_to(final).as_posix()))
    os.replace(str(stage), str(target))
    return target


def run(arguments: List[str]) -> int:
    parser = argparse.ArgumentParser(prog="python " + os.path.basename(sys.argv[0]))
    parser.add_argument("--home", help="where the run lives; it must survive the session")
    parser.add_argument("--python", help="the Python that has torch")
    parser.add_argument("--minutes", type=float, help="save and stop after so many minutes from now")
    what = parser.add_mutually_exclusive_group()
    for flag in ("foreground", "install", "train", "status", "stop", "pack"):
        what.add_argument("--" + flag, dest="what", action="store_const", const=flag)
    given = parser.parse_args(arguments)
    source = Source(Path(sys.argv[0]).resolve())
    bundle = source.read_json("bundle.json")
    home = (Path(os.path.expanduser(given.home)) if given.home else find_home(bundle["platforms"])).resolve()
    job = home / ".sojourn" / "jobs" / bundle["run"]
    if given.what == "pack":
        print("download %s" % pack(bundle, home))
        return 0
    if given.what in ("status", "stop"):
        if not (job / "spec.json").is_file():
            raise Problem("%s was not started in %s" % (bundle["run"], home))
        if given.what == "stop":
            print(supervise(sys.executable, home, "stop", str(job)).strip())
        print(describe_status(bundle, home, status_of(sys.executable, home, job)))
        return 0
    deadline = None if given.minutes is None else time.time() + 60 * given.minutes
    home.mkdir(parents=True, exist_ok=True)
    unpack(source, bundle["files"], home)
    own = install(find_python(given.python), home / bundle["wheel"], bundle["extras"], home)
    job = write_job(source, bundle, home, own, deadline)
    if given.what == "install":
        return 0
    if given.what == "train":
        os.environ["SOJOURN_HOME"] = str(home)
        os.execv(own, [own, "-m", "sojourn", "train", str(job / "run.yaml")])  # noqa: S606
    return start(bundle, home, job, own, given.what == "foreground")


def start(bundle: Facts, home: Path, job: Path, own: str, foreground: bool) -> int:
    before = status_of(own, home, job).get("state")
    if before == "done":
        print(describe_status(bundle, home, status_of(own, home, job)))
        return 0
    supervise(own, home, "start", str(job), "--again")
    if not foreground:
        line = "python %s" % shlex.quote(sys.argv[0])
        print(describe_status(bundle, home, status_of(own, home, job)))
        print(
            "it runs on when this page is closed. Look: %s --status; stop: %s --stop; continue: %s" % (line, line, line)
        )
        return 0
    status = follow(own, home, job)
    print(describe_status(bundle, home, status))
    return {"done": 0, "stopped": 3}.get(status.get("state", ""), 1)


def main() -> NoReturn:
    try:
        sys.exit(run(sys.argv[1:]))
    except Problem as problem:
        print("sojourn: %s" % problem, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
