"""Kaggle without a browser: the bundle as a private data set, a script kernel for each session, outputs brought home.

A session ends after 12 hours and cannot be cancelled, so it gets a timeout, and inside a deadline before it: the run
saves and stops. The next session reads the previous one's outputs (`kernel_sources`) and continues.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from sojourn.config.load import Loaded
from sojourn.errors import RunFailed, UserError
from sojourn.remote.box import kaggle_boot
from sojourn.remote.bundle import make_bundle
from sojourn.remote.platforms import kaggle_hours
from sojourn.remote.platforms.http_api import ApiError, OutcomeUnknown
from sojourn.remote.platforms.kaggle_api import KaggleApi, find_credentials
from sojourn.remote.platforms.kaggle_outputs import download_outputs, read_result
from sojourn.remote.portability import Say
from sojourn.run.home import home
from sojourn.storage.files import read_json_object, write_json
from sojourn.storage.sizes import format_size

_SHAPES = {"t4": "NvidiaTeslaT4", "t4x2": "NvidiaTeslaT4", "nvidiateslat4": "NvidiaTeslaT4"}
_LEAST_HOURS = 0.25
_SAVE_SECONDS = 600.0  # before the session's end: saving, and listing the files with their hashes
_WATCHDOG_SECONDS = 420.0  # a trainer that has not stopped by then is stopped
_DATASET_SECONDS = 3600.0
_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class KaggleRun:
    """A run on Kaggle as this laptop remembers it. `session` counts from 1; each has a kernel of its own."""

    run: str
    user: str
    base: str
    session: int
    hours: float
    started: float
    shape: str = "NvidiaTeslaT4"

    @property
    def dataset(self) -> str:
        return f"{self.base}-code"

    @property
    def kernel(self) -> str:
        return f"{self.base}-s{self.session}"

    @property
    def url(self) -> str:
        return f"https://www.kaggle.com/code/{self.user}/{self.kernel}"

    def save(self) -> None:
        _file(self.run).parent.mkdir(parents=True, exist_ok=True)
        write_json(_file(self.run), asdict(self))


@dataclass(frozen=True)
class KaggleReport:
    """`state`: queued, running, done, stopped (resumable) or failed."""

    run: str
    state: str
    message: str
    session: int
    url: str
    hours: float


def open_kaggle(base_url: str | None = None, **options: Any) -> KaggleApi:
    return KaggleApi(*find_credentials(), base_url, **options)


def launch_kaggle(
    loaded: Loaded,
    *,
    gpu: str = "T4",
    hours: float | None = None,
    expected_hours: float | None = None,
    allow_secrets: bool = False,
    say: Say = print,
    api: KaggleApi | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> KaggleRun:
    """`hours`: of this session, at most 12. `expected_hours`: of the whole run, as planned."""
    shape = machine_shape(gpu)
    api = api or open_kaggle()
    length = session_length(api, hours, expected_hours, say)
    settings = {"limits.session": f"{int(trainer_seconds(length))}s", "save.mirror": None}
    if loaded.config.save.mirror and not loaded.config.save.mirror.startswith("hub:"):
        say("note: save.mirror is not used: the outputs of a Kaggle session are kept by Kaggle")
    elif loaded.config.save.mirror:
        del settings["save.mirror"]
    with tempfile.TemporaryDirectory() as scratch:
        made = make_bundle(
            loaded, Path(scratch) / "bundle.sojourn", settings=settings, allow_secrets=allow_secrets, platform="kaggle",
            say=say,
        )  # fmt: skip
        for note in made.notes:
            say(f"note: {note}")
        _refuse_unless_ended(api, made.run)
        base = slug_of(made.run)
        say(f"uploading {format_size(made.size)} to the private data set {api.user}/{base}-code")
        api.create_dataset(f"{base}-code", f"{base}-code", [made.path], lambda done, size: None)
    wait_for_dataset(api, f"{base}-code", say, sleep)
    previous = find_kaggle_run(made.run)
    session = previous.session + 1 if previous is not None else 1
    return _push(api, KaggleRun(made.run, api.user, base, session, length, time.time(), shape), previous, say)


def resume_kaggle(run: str, *, hours: float | None = None, say: Say = print, api: KaggleApi | None = None) -> KaggleRun:
    """Another session that continues where the last one stopped."""
    before = get_kaggle_run(run)
    api = api or open_kaggle()
    _refuse_unless_ended(api, run)
    length = session_length(api, hours, None, say)
    return _push(api, replace(before, session=before.session + 1, hours=length, started=time.time()), before, say)


def status_kaggle(run: str, *, api: KaggleApi | None = None) -> KaggleReport:
    known = get_kaggle_run(run)
    api = api or open_kaggle()
    seen = api.kernel_status(known.kernel)
    state, message, spent = seen.state, seen.message, (time.time() - known.started) / 3600
    if state in ("complete", "error", "cancelled"):
        result = read_result(api, known.kernel)
        state = str(result.get("state") or "failed")
        message = str(result.get("message") or message)
        if not result:
            message = message or "the session ended without a result; see its log"
        spent = float(result.get("seconds") or 3600 * min(spent, known.hours)) / 3600
        kaggle_hours.settle(known.kernel, spent)
    return KaggleReport(run, state, message, known.session, known.url, min(spent, known.hours))


def logs_kaggle(run: str, *, follow: bool = False, api: KaggleApi | None = None) -> Iterator[str]:
    """Pieces of text. Only reads: to stop looking changes nothing."""
    known = get_kaggle_run(run)
    api = api or open_kaggle()
    if follow:
        yield from api.follow_log(known.kernel)
    else:
        yield api.log(known.kernel)


def pull_kaggle(run: str, folder: Path | None = None, *, say: Say = print, api: KaggleApi | None = None) -> Path:
    """The run folder, every file verified by the SHA-256 that the session listed."""
    known = get_kaggle_run(run)
    api = api or open_kaggle()
    state = api.kernel_status(known.kernel).state
    if state in ("queued", "running"):
        raise UserError(f"{run}: the session is {state}; Kaggle gives its outputs when it has ended: {known.url}")
    folder = folder or home() / "runs" / run
    download_outputs(api, known.kernel, run, folder, say)
    return folder


def machine_shape(gpu: str) -> str:
    word = gpu.lower().replace(" ", "").replace("×", "x").replace("2x", "") or "t4"
    if "p100" in word:
        raise UserError("kaggle: a P100 cannot be used: current PyTorch has no kernels for it (sm_60); use --gpu T4")
    if word in _SHAPES:
        return _SHAPES[word]
    raise UserError(f"kaggle: no GPU “{gpu[:40]}” there; use --gpu T4, which is two T4")


def session_length(api: KaggleApi, hours: float | None, expected: float | None, say: Say) -> float:
    """Hours of the next session: what is asked for, within the session's limit and what is left of the week."""
    now, most = time.time(), kaggle_hours.session_hours()
    quota = api.quota()
    allowed = quota.allowed if quota else kaggle_hours.weekly_hours()
    used = max(kaggle_hours.used_hours(now), quota.used if quota else 0.0)
    left = allowed - used
    counted = "by Kaggle's count" if quota else "by this machine's count"
    if left < _LEAST_HOURS:
        raise UserError(
            f"kaggle: {used:.1f} of {allowed:g} GPU hours of this week are used ({counted}); the week starts anew on "
            "Saturday, 00:00 UTC"
        )
    if hours is not None and not _LEAST_HOURS <= hours <= most:
        raise UserError(f"kaggle: a session of {hours:g} h; allowed: {_LEAST_HOURS:g} to {most:g} h")
    length = min(hours or most, most, left)
    say(f"kaggle: {left:.1f} of {allowed:g} GPU hours left this week ({counted}); this session: at most {length:.1f} h")
    if expected is not None and expected > left:
        say(f"note: the run needs about {expected:.1f} h, more than is left: it saves, stops, and can go on next week")
    elif expected is not None and expected > length:
        say(f"note: the run needs about {expected:.1f} h: after this session resume it: sojourn launch … --on kaggle")
    return length


def trainer_seconds(hours: float) -> float:
    """`limits.session`, which counts from the start of the session's machine."""
    seconds = 3600 * hours
    return seconds - min(_SAVE_SECONDS, 0.15 * seconds)


def slug_of(run: str) -> str:
    """A–Z become a–z, others `-`. Kaggle wants 6 to 50 letters, of which six are for `-code`."""
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    return f"sojourn-{plain}"[:44].strip("-")


def kernel_metadata(run: KaggleRun, previous: KaggleRun | None) -> dict[str, Any]:
    """kernel-metadata.json, as `kaggle kernels push` reads it, too."""
    return {
        "id": f"{run.user}/{run.kernel}",
        "title": run.kernel,
        "code_file": "boot.py",
        "language": "python",
        "kernel_type": "script",
        "is_private": True,
        "enable_gpu": True,
        "enable_internet": True,
        "machine_shape": run.shape,
        "dataset_sources": [f"{run.user}/{run.dataset}"],
        "kernel_sources": [f"{previous.user}/{previous.kernel}"] if previous is not None else [],
    }


def boot_script(run: KaggleRun) -> str:
    seconds = 3600 * run.hours
    minutes = (seconds - min(_WATCHDOG_SECONDS, 0.1 * seconds)) / 60
    text = Path(kaggle_boot.__file__).read_text(encoding="utf-8")
    return text.replace("@RUN@", run.run).replace("@MINUTES@", f"{minutes:.1f}")


def wait_for_dataset(api: KaggleApi, slug: str, say: Say, sleep: Callable[[float], None]) -> None:
    """Kaggle unpacks and copies an upload before kernels can read it."""
    waited, said = 0.0, ""
    while True:
        state = api.dataset_state(slug) or "not there yet"
        if state == "ready":
            return
        if state in ("failed", "deleted") or waited > _DATASET_SECONDS:
            raise RunFailed(f"Kaggle: the data set {slug} is {state}; see https://www.kaggle.com/{api.user}/datasets")
        if state != said:
            say(f"kaggle: the data set is {state.replace('_', ' ')}")
            said = state
        sleep(_POLL_SECONDS)
        waited += _POLL_SECONDS


def find_kaggle_run(run: str) -> KaggleRun | None:
    values = read_json_object(_file(run))
    known = {each.name: values[each.name] for each in fields(KaggleRun) if each.name in values}
    return KaggleRun(**known) if {"run", "user", "base", "session", "hours", "started"} <= known.keys() else None


def all_kaggle_runs() -> list[KaggleRun]:
    folder = _file("any").parent
    found = [find_kaggle_run(path.stem) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    return [run for run in found if run is not None]


def get_kaggle_run(run: str) -> KaggleRun:
    found = find_kaggle_run(run)
    if found is None:
        raise UserError(f"no run “{run[:60]}” was launched on Kaggle from here")
    return found


def _push(api: KaggleApi, run: KaggleRun, previous: KaggleRun | None, say: Say) -> KaggleRun:
    kaggle_hours.record(run.kernel, run.hours, run.started)  # before: a lost answer must not lose the hours
    try:
        api.push_kernel(kernel_metadata(run, previous), boot_script(run), int(3600 * run.hours))
    except OutcomeUnknown as error:
        if not _exists(api, run.kernel):
            kaggle_hours.settle(run.kernel, 0.0)
            raise error from None
    except UserError:
        kaggle_hours.settle(run.kernel, 0.0)
        raise
    run.save()
    say(f"kaggle: session {run.session} of {run.run} is queued: {run.url}")
    return run


def _exists(api: KaggleApi, kernel: str) -> bool:
    try:
        api.kernel_status(kernel)
    except ApiError as error:
        if error.status in (403, 404):
            return False
        raise
    return True


def _refuse_unless_ended(api: KaggleApi, run: str) -> None:
    if find_kaggle_run(run) is None:
        return
    report = status_kaggle(run, api=api)
    if report.state in ("queued", "running"):
        raise UserError(f"{run} is {report.state} on Kaggle already (session {report.session}): {report.url}")
    if report.state == "done":
        raise UserError(f"{run} is done on Kaggle; bring it home: sojourn pull {run}")


def _file(run: str) -> Path:
    return home() / "remote" / "kaggle" / f"{run}.json"
