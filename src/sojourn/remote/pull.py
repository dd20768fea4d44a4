"""Brings a run home: into the run folder here, each file verified by SHA-256, so that chat, eval and train open it."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from sojourn.errors import UserError
from sojourn.remote.box_client import Box
from sojourn.remote.gate import copies_at_home, pulled_record
from sojourn.remote.hosts import Host
from sojourn.remote.job import TERMINAL, BoxPaths, Job, find_job
from sojourn.remote.progress import ProgressCallback
from sojourn.run.checkpoints import find_damage, list_checkpoints
from sojourn.run.folder import RunFolder
from sojourn.run.home import prepared_folder
from sojourn.run.identity import parse_identity, read_identity
from sojourn.run.moved_paths import write_moved_paths
from sojourn.storage.files import read_json_object

What = Literal["final", "best", "checkpoint", "all"]
RECORDS = ("identity.json", "run.yaml", "environment.json", "metrics.jsonl", "events.jsonl", "ledger.json",
            "ladder.json", "loss.svg")  # fmt: skip


def pull_run(
    box: Box,
    host: Host,
    run: str,
    folder: Path,
    what: What,
    report: dict[str, Any],
    progress: ProgressCallback | None = None,
) -> list[str]:
    """What came: names of models and checkpoints. The records of the run come always; its status once it is over."""
    there, here = BoxPaths(host, run).run_folder, RunFolder(folder)
    _refuse_other_run(box, host, there, here)
    folder.mkdir(parents=True, exist_ok=True)
    names = _wanted(box, there, what)
    if not names:
        raise UserError(
            f"{run} on {host.name} has no {what} yet; it is at step {report['step']:,} (see: sojourn logs {run})"
        )
    over = report["state"] in TERMINAL or report["state"] == "holding"
    for name in (*RECORDS, *(("status.json",) if over else ())):
        box.pull_file(f"{there}/{name}", folder / name, missing_ok=True)
    job = find_job(run)
    write_moved_paths(folder, job.models if job is not None else {})
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        box.pull(f"{there}/{name}", folder / name, progress)
    _check_checkpoints(here, names)
    return names


def pull_artefact(box: Box, folder: Path, progress: ProgressCallback | None = None) -> None:
    """The prepared data of a run whose checkpoints were brought home: to open one, its tokenizer is needed."""
    there = read_json_object(folder / "environment.json").get("data")
    if not isinstance(there, str):
        return
    here = prepared_folder() / PurePosixPath(there).name
    if not here.exists():
        stage = here.with_name(f".pull-{here.name}")
        box.pull(there, stage, progress)
        stage.rename(here)


def has_checkpoint(box: Box, host: Host, run: str) -> bool:
    return bool(_wanted(box, BoxPaths(host, run).run_folder, "checkpoint"))


def note_copies(box: Box, host: Host, job: Job) -> None:
    """Lets the box know which of its models and checkpoints are at home, byte for byte: it may then be powered off."""
    folder = BoxPaths(host, job.run).job
    items = json.loads(box.read_bytes(f"{folder}/verified.json") or b"{}").get("items", [])
    box.write_bytes(f"{folder}/pulled", pulled_record(copies_at_home(items, Path(job.folder))))


def _refuse_other_run(box: Box, host: Host, there: str, here: RunFolder) -> None:
    ours = read_identity(here.path / "identity.json")
    theirs = parse_identity(json.loads(box.read_bytes(f"{there}/identity.json") or b"null"))
    if ours is not None and theirs is not None and ours.run_id != theirs.run_id:
        raise UserError(
            f"{here.path} holds another run of this name ({ours.created}) than {host.name} ({theirs.created}); "
            "give another place: --to FOLDER"
        )


def _wanted(box: Box, there: str, what: What) -> list[str]:
    """The folders to bring, oldest checkpoint first."""
    found = set(box.list_folder(there))
    models = [name for name in ("final", "best") if name in found]
    steps = sorted(name for name in box.list_folder(f"{there}/checkpoints") if name.startswith("step-"))
    checkpoints = [f"checkpoints/{name}" for name in steps]
    if what == "all":
        return [*models, *checkpoints]
    if what == "checkpoint":
        return checkpoints[-1:]
    return [what] if what in models else []


def _check_checkpoints(here: RunFolder, names: list[str]) -> None:
    for name in names:
        if name.startswith("checkpoints/") and (damage := find_damage(here.path / name)) is not None:
            raise UserError(f"{here.path / name}: {damage} on the box already; it was not damaged on the way")
    newest = list_checkpoints(here.checkpoints)
    if newest:
        (here.checkpoints / "latest").write_text(newest[-1].name + "\n", encoding="utf-8")
