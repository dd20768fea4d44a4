"""The list of runs, always at hand: runs on this machine are looked at every second, hosts every few seconds, each in a
thread of its own. Whoever asks gets what was seen last, at once."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.machine.gpus import gpu_use
from sojourn.run.folder import RunFolder
from sojourn.run.listing import RunSummary, is_run, summarize
from sojourn.storage.files import last_json_lines, read_json_object, write_json

if TYPE_CHECKING:
    from sojourn.remote.hosts import Host
    from sojourn.remote.listing import HostAnswer

_LOCAL_SECONDS = 1.0
_HOST_SECONDS = 15.0
_HOST_PATIENCE = 10.0
_GPU_SECONDS = 3.0
_FIRST_SECONDS = 5.0  # that the first to ask waits for the first look at this machine
_BETWEEN_FACTS = 0.02
_IDLE_SECONDS = 60.0  # without anybody asking, nothing is looked at
_LIVE = ("loss", "tokens_per_second", "memory", "mfu", "eta", "spent", "projected")
_MOST_TAGS, _MOST_TAG_LENGTH = 10, 40
_NO_FACTS: dict[str, Any] = {"method": None, "model": None, "limits": {}}


@dataclass(frozen=True)
class KnownRun:
    """`id`: the name, or HOST:NAME. `folder`: None for runs on a host."""

    id: str
    folder: RunFolder | None
    values: dict[str, Any]


@dataclass
class _Seen:
    stamp: tuple[int, ...]
    summary: RunSummary
    last: dict[str, Any]
    facts: dict[str, Any] | None = None  # of run.yaml, which takes longer to read


class LiveRuns:
    """`folders`: whose subfolders are runs; the first is SOJOURN_HOME's. `tags_file`: what people wrote about runs."""

    def __init__(self, folders: list[Path], tags_file: Path, ask_hosts: bool = True) -> None:
        self._folders, self._tags_file, self._ask_hosts = folders, tags_file, ask_hosts
        self._local: dict[str, KnownRun] = {}
        self._remote: dict[str, KnownRun] = {}
        self._hosts: list[dict[str, Any]] = []
        self._answers: dict[str, HostAnswer | None] = {}  # of each host the last one
        self._asking: set[str] = set()
        self._answered = threading.Lock()
        self._gpus: list[dict[str, Any]] = []  # of this machine
        self._seen: dict[Path, _Seen] = {}
        self._asked, self._stopped = time.monotonic(), threading.Event()
        self._looked, self._seen_once = threading.Lock(), threading.Event()
        self._tags: dict[str, list[str]] = {}
        self._tags_seen, self._tagging = (0, 0), threading.Lock()
        self._read_tags()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="runs", daemon=True).start()
        if which("nvidia-smi") is not None:
            threading.Thread(target=self._watch_gpus, name="gpus", daemon=True).start()
        if self._ask_hosts:
            threading.Thread(target=self._watch_hosts, name="hosts", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    # -- What is asked for --

    def snapshot(self) -> dict[str, Any]:
        was_idle, self._asked = self._is_idle(), time.monotonic()
        self._seen_once.wait(_FIRST_SECONDS)
        if was_idle:
            self.look()
        here = _together(self._gpus)
        local = [{**run.values, "gpu": here} if run.values["state"] == "running" else run.values
                 for run in self._local.values()]  # fmt: skip
        found = [*local, *(run.values for run in self._remote.values())]
        runs = [{**run, "tags": self._tags.get(run["id"], [])} for run in found]
        return {"runs": sorted(runs, key=lambda run: -run["updated"]), "hosts": self._hosts, "gpus": self._gpus,
                "now": time.time()}  # fmt: skip

    def _is_idle(self) -> bool:
        return time.monotonic() - self._asked > _IDLE_SECONDS

    def get(self, run_id: str) -> KnownRun | None:
        found = self._local.get(run_id) or self._remote.get(run_id)
        if found is None:
            self.look()  # it may have started this second
            found = self._local.get(run_id)
        if found is not None and found.folder is not None:
            seen = self._seen.get(found.folder.path)
            if seen is not None:
                seen.facts = seen.facts or _facts(found.folder)  # perhaps read since the last look
                found = replace(found, values=_values(run_id, seen))
        return found

    def tags(self, run_id: str) -> list[str]:
        return self._tags.get(run_id, [])

    def set_tags(self, run_id: str, tags: list[str]) -> list[str]:
        clean = list(dict.fromkeys(tag.strip()[:_MOST_TAG_LENGTH] for tag in tags if tag.strip()))[:_MOST_TAGS]
        with self._tagging:
            self._read_tags()
            kept = {run: found for run, found in {**self._tags, run_id: clean}.items() if found}
            self._tags_file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._tags_file, kept)
            self._read_tags()
        return clean

    def _read_tags(self) -> None:
        """Another board of this home may have written them."""
        try:
            stat = self._tags_file.stat()
        except OSError:
            return
        if (stat.st_mtime_ns, stat.st_ino) != self._tags_seen:
            self._tags_seen, known = (stat.st_mtime_ns, stat.st_ino), read_json_object(self._tags_file)
            self._tags = {str(run): tags for run, tags in known.items() if isinstance(tags, list)}

    # -- This machine --

    def look(self) -> None:
        """At all runs on this machine. Files that have not changed are not read again."""
        with self._looked:
            found: dict[str, KnownRun] = {}
            for folder in self._folders:
                for path in _subfolders(folder):
                    name, number = path.name, 2
                    while name in found:  # in another folder
                        name, number = f"{path.name}~{number}", number + 1
                    found[name] = self._known(name, path)
            self._local = found
            self._seen_once.set()
            self._seen = {
                path: seen for path, seen in self._seen.items() if path in {_path(one) for one in found.values()}
            }

    def _known(self, run_id: str, path: Path) -> KnownRun:
        run, stamp, seen = RunFolder(path), _stamp(path), self._seen.get(path)
        if seen is None or seen.stamp != stamp:
            facts = seen.facts if seen is not None and seen.stamp[0] == stamp[0] else None
            seen = self._seen[path] = _Seen(stamp, summarize(run), _last_train_line(run), facts)
        elif seen.summary.state in ("starting", "running"):  # its process may have been killed
            seen.summary = summarize(run)
        return KnownRun(run_id, run, _values(run_id, seen))

    def _watch(self) -> None:
        while True:
            if not self._is_idle():
                with contextlib.suppress(OSError):
                    self._read_tags()
                    self.look()
                    self._read_facts()
            if self._stopped.wait(_LOCAL_SECONDS):
                return

    def _read_facts(self) -> None:
        """Of runs that are new; those are listed without them until then."""
        for path, seen in list(self._seen.items()):
            if self._stopped.is_set():
                return
            if seen.facts is None:
                seen.facts = _facts(RunFolder(path))
                self._stopped.wait(_BETWEEN_FACTS)  # whoever waits for an answer comes first

    def _watch_gpus(self) -> None:
        while not self._stopped.is_set():
            if not self._is_idle():
                self._gpus = gpu_use()
            self._stopped.wait(_GPU_SECONDS)

    # -- Hosts --

    def _watch_hosts(self) -> None:
        while not self._stopped.is_set():
            if not self._is_idle():
                self.look_at_hosts()
            self._stopped.wait(_HOST_SECONDS)

    def look_at_hosts(self) -> list[threading.Thread]:
        """At each in a thread of its own: one that is slow holds up no other. The threads."""
        from sojourn.remote.hosts import load_hosts

        try:
            hosts = load_hosts()
        except UserError as error:
            self._hosts = [_host("hosts", "unreachable", str(error))]
            return []
        with self._answered:
            self._answers = {name: self._answers.get(name) for name in hosts}
            due = [host for name, host in hosts.items() if name not in self._asking]
            self._asking |= {host.name for host in due}
            self._show_hosts()
        threads = [threading.Thread(target=self._ask_host, args=(host,), name="host", daemon=True) for host in due]
        for thread in threads:
            thread.start()
        return threads

    def _ask_host(self, host: Host) -> None:
        from sojourn.remote.listing import ask_host

        try:
            answer = ask_host(host, _HOST_PATIENCE, gpus=True)
        finally:
            with self._answered:
                self._asking.discard(host.name)
        with self._answered:
            if host.name in self._answers:
                self._answers[host.name] = answer
                self._show_hosts()

    def _show_hosts(self) -> None:
        from sojourn.remote.listing import runs_of

        answers = {name: answer for name, answer in self._answers.items() if answer is not None}
        unasked = frozenset(self._answers.keys() - answers.keys())
        self._hosts = [_host_values(name, answer) for name, answer in self._answers.items()]
        found = {}
        for run in runs_of(list(answers.values()), except_on=unasked):
            run_id, running = f"{run.host}:{run.name}", run.state == "running"
            values = {
                **asdict(run), "id": run_id, "gpu": _together(answers[run.host].gpus) if running else None,
                "resumable": run.state in ("stopped", "failed", "lost"), "limits": {}, "method": None, "model": None,
            }  # fmt: skip
            found[run_id] = KnownRun(run_id, None, values)
        self._remote = found


def _path(run: KnownRun) -> Path:
    return run.folder.path if run.folder is not None else Path()


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if is_run(path))
    except OSError:
        return []


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes when a file changes that the list is made from; the first number is run.yaml's."""
    found: list[int] = []
    for name in ("run.yaml", "status.json", "metrics.jsonl", "ledger.json"):
        try:
            stat = (path / name).stat()
            found += [stat.st_mtime_ns, stat.st_size]
        except OSError:
            found += [0, 0]
    return tuple(found)


def _last_train_line(run: RunFolder) -> dict[str, Any]:
    try:
        return next((line for line in last_json_lines(run.metrics) if line.get("kind") == "train"), {})
    except (OSError, UserError):
        return {}


def _facts(run: RunFolder) -> dict[str, Any]:
    """What does not change while a run goes on."""
    from sojourn.config.load import read_config

    try:
        config = read_config(run.config)
    except (OSError, UserError):
        return _NO_FACTS
    limits, model = config.limits, config.model
    size = model.params or (f"depth {model.depth}" if model.depth else f"{model.d_model}×{model.num_layers}")
    return {
        "method": config.method.kind, "model": model.base or str(size),
        "limits": {name: None if (value := getattr(limits, name)) is None else str(value)
                   for name in ("budget", "time", "session")},
    }  # fmt: skip


def _values(run_id: str, seen: _Seen) -> dict[str, Any]:
    summary, last = seen.summary, {key: seen.last.get(key) for key in _LIVE}
    running = summary.state == "running"
    return {
        **asdict(summary), "id": run_id, "host": None, "phase": "", "at_home": True,
        "tokens_per_second": last["tokens_per_second"], "memory": last["memory"], "mfu": last["mfu"], "gpu": None,
        "left": last["eta"] if running else None, "projected": last["projected"] if running else None,
        "resumable": summary.state in ("stopped", "failed"), **(seen.facts or _NO_FACTS),
    }  # fmt: skip


def _host(name: str, state: str, error: str | None = None, gpus: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"name": name, "state": state, "error": error, "gpus": gpus, "seen": time.time()}


def _host_values(name: str, answer: HostAnswer | None) -> dict[str, Any]:
    if answer is None:
        return _host(name, "asking")
    return _host(name, "ok" if answer.error is None else "unreachable", answer.error, tuple(answer.gpus))


def _together(gpus: list[dict[str, Any]]) -> dict[str, Any] | None:
    """All GPUs of a machine: their mean use, and their memory together; None where nothing is known."""
    use = [one["utilization"] for one in gpus if one["utilization"] is not None]
    memory = [(one["memory_used"], one["memory_total"]) for one in gpus if one["memory_used"] is not None]
    if not use and not memory:
        return None
    return {
        "count": len(gpus), "utilization": sum(use) / len(use) if use else None,
        "memory_used": sum(used for used, _ in memory), "memory_total": sum(total or 0 for _, total in memory),
    }  # fmt: skip
