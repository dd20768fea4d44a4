"""Launching, looking at and fetching runs where there is no SSH: Kaggle, and SkyPilot's clouds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sojourn.config.load import Loaded
from sojourn.errors import RunFailed, UserError
from sojourn.remote.listing import RemoteRun
from sojourn.remote.platforms import kaggle
from sojourn.remote.platforms.skypilot import SkyOptions, launch_sky, make_sky_task
from sojourn.remote.start import Options

Say = Callable[[str], None]
PLACES = ("kaggle", "sky")


def launch_without_ssh(place: str, loaded: Loaded, options: Options, say: Say) -> dict[str, Any]:
    terms = options.terms
    unused = [name for name, given in (("--budget", terms.budget), ("--stop-when-done", terms.stop_when_done),
                                       ("--notify", terms.notify)) if given]  # fmt: skip
    if unused:
        say(f"note: {', '.join(unused)} is not used on {place}")
    if place == "kaggle":
        hours = None if terms.deadline is None else terms.deadline / 3600
        run = kaggle.launch_kaggle(
            loaded, gpu=options.gpu or "T4", hours=hours, allow_secrets=options.allow_secrets, say=say
        )
        say(f"{run.run} is on Kaggle: {run.url} (sojourn logs {run.run} -f; then: sojourn pull {run.run})")
        return asdict(run)
    made = SkyOptions(gpu=options.gpu or "A100", count=max(1, options.gpu_count))
    bundle, path = make_sky_task(loaded, made, options.to_yaml, allow_secrets=options.allow_secrets, say=say)
    say(f"{path}: the task; {bundle.path}: what it runs")
    if options.to_yaml is None and launch_sky(path, say=say) != 0:
        raise RunFailed(f"sky: the job was not started; start it yourself: sky jobs launch {path}")
    return {"run": bundle.run, "task": str(path), "bundle": str(bundle.path)}


def show_kaggle_logs(run: str, follow: bool, show: Callable[[bytes], None]) -> dict[str, Any]:
    for text in kaggle.logs_kaggle(run, follow=follow):
        show(text.encode())
    return asdict(kaggle.status_kaggle(run))


def pull_from_kaggle(run: str, what: str, to: Path | None, say: Say) -> dict[str, Any]:
    if what not in ("final", "all"):
        raise UserError(f"--what {what}: Kaggle gives the outputs of a session as a whole; leave it out")
    folder = kaggle.pull_kaggle(run, to, say=say)
    say(f"{folder}: verified")
    return {"folder": str(folder), "pulled": ["final"]}


def list_kaggle_runs(patience: float) -> list[RemoteRun]:
    """As Kaggle answers in time, else as last known here."""
    found: dict[str, kaggle.KaggleReport] = {}

    def ask(run: str) -> None:
        try:
            found[run] = kaggle.status_kaggle(run)
        except UserError:
            return

    runs = kaggle.all_kaggle_runs()
    threads = [threading.Thread(target=ask, args=(run.run,), daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience)
    return [_as_remote_run(run, found.get(run.run)) for run in runs]


def _as_remote_run(run: kaggle.KaggleRun, report: kaggle.KaggleReport | None) -> RemoteRun:
    state, message = (report.state, report.message) if report is not None else ("unreachable", "Kaggle does not answer")
    seconds = (report.hours if report is not None else 0.0) * 3600
    return RemoteRun(
        run.run, "kaggle", state, f"session {run.session}", 0, 0, None, seconds, 0.0, "", None, None, run.started,
        run.url, message,
    )  # fmt: skip
