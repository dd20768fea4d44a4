"""Checkpoints that a kill at any instant cannot spoil.

Written into a stage folder on the same filesystem (safetensors and JSON), made durable, sealed by a manifest of sizes
and SHA-256, renamed into place; only then does `latest` move, and only after that are old ones removed. A checkpoint is
loaded only if every file matches its manifest; otherwise the newest good one is taken, and the user is told.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed, UserError
from sojourn.storage import disk
from sojourn.storage.files import read_json, read_text, remove_temporary_files, sha256, write_json, write_text
from sojourn.storage.stage import staged
from sojourn.train.checkpoint.safetensors_writer import write_tensors

MANIFEST = "manifest.json"
PARTS = ("model", "optimizer", "random")


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on: weights, optimizer, random states, and `state` (step, tokens, seconds…)."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    random: dict[str, Any]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def size(self) -> int:
        """Bytes, but for headers and JSON."""
        return sum(t.numel() * t.element_size() for part in PARTS for t in getattr(self, part).values())


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the last few, that of the best step, and one every `milestones` steps."""

    last: int = 2
    best: int | None = None
    milestones: int | None = None
    busy: int | None = None  # being read by somebody

    def always(self, step: int) -> bool:
        return step in (self.best, self.busy) or (self.milestones is not None and step % self.milestones == 0)


def save(folder: Path, checkpoint: Checkpoint, keep: Retention, min_free: int = 0) -> Path:
    """Writes `checkpoint` under `folder` and returns its place; on failure nothing has changed."""
    target = folder / f"step-{checkpoint.step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stages(folder)
        if target.exists() and find_damage(target) is None:
            tidy(folder, keep)
            return target
        _make_room(folder, checkpoint.size, min_free, keep)
        with staged(target) as stage:
            manifest = {
                f"{part}.safetensors": write_tensors(stage / f"{part}.safetensors", getattr(checkpoint, part))
                for part in PARTS
            }
            write_json(stage / "state.json", checkpoint.state)
            manifest["state.json"] = file_digest(stage / "state.json")
            write_json(stage / MANIFEST, manifest)
        write_text(folder / "latest", target.name + "\n")
    except OSError as error:
        why = error.strerror or error
        raise RunFailed(f"{folder}: the checkpoint of step {checkpoint.step} could not be written: {why}") from error
    _prune(folder, keep)
    return target


def load(folder: Path, say: Any = None) -> tuple[Checkpoint, Path] | None:
    """The newest good checkpoint under `folder`, or None. Damaged ones are passed over, and `say` hears of each."""
    for path in reversed(list_checkpoints(folder)):
        fault = find_damage(path)
        if fault is None:
            return _read(path), path
        if say is not None:
            say(f"{path.name} is damaged ({fault}); going back to the one before")
    return None


def load_path(path: Path) -> Checkpoint:
    """One checkpoint, by its folder."""
    fault = find_damage(path)
    if fault is not None:
        raise UserError(
            f"{path}: not a whole checkpoint ({fault}); leave save.resume at auto to continue from the newest good one"
        )
    return _read(path)


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every byte is as it was written."""
    manifest = read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or not {f"{part}.safetensors" for part in PARTS} <= manifest.keys():
        return "no readable manifest"
    with ThreadPoolExecutor() as threads:  # hashing leaves Python's lock alone
        faults = threads.map(lambda item: _fault_of(path / item[0], item[1]), manifest.items())
        return next((fault for fault in faults if fault is not None), None)


def _fault_of(file: Path, facts: Any) -> str | None:
    try:
        if file.stat().st_size != facts["size"]:
            return f"{file.name} has the wrong size"
        return None if sha256(file) == facts["sha256"] else f"{file.name} has changed"
    except OSError:
        return f"{file.name} is missing or unreadable"
    except (KeyError, TypeError):
        return "no readable manifest"


def _read(path: Path) -> Checkpoint:
    from safetensors.torch import load_file

    parts = {name: load_file(path / f"{name}.safetensors") for name in PARTS}
    return Checkpoint(**parts, state=read_json(path / "state.json"))


def cost_so_far(folder: Path) -> tuple[float, float]:
    """Seconds and money, as the newest checkpoint has them."""
    there = list_checkpoints(folder)
    state = read_json(there[-1] / "state.json") if there else None
    return (float(state["seconds"]), float(state.get("money", 0.0))) if isinstance(state, dict) else (0.0, 0.0)


def file_digest(file: Path) -> dict[str, Any]:
    """What the manifest says of a file."""
    return {"size": file.stat().st_size, "sha256": sha256(file)}


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Oldest first, by step number (not by time: copies reorder times)."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def tidy(folder: Path, keep: Retention) -> None:
    """Makes up for what a kill, or a full disk, left undone after a checkpoint was in place."""
    _remove_stages(folder)
    for path in list_checkpoints(folder):
        if not (path / MANIFEST).exists():  # its removal had begun
            remove(path)
    there = list_checkpoints(folder)
    with contextlib.suppress(OSError):
        if there and read_text(folder / "latest") != f"{there[-1].name}\n":
            write_text(folder / "latest", f"{there[-1].name}\n")
    _prune(folder, keep)


def _prune(folder: Path, keep: Retention) -> None:
    for path in list_checkpoints(folder)[: -keep.last]:
        if not keep.always(step_of(path)):
            remove(path)


def remove(path: Path) -> None:
    """Unseals first, so that a kill half-way leaves something that is plainly no checkpoint."""
    with contextlib.suppress(OSError):
        disk.unlink(path / MANIFEST)
    disk.remove_folder(path)


def _remove_stages(folder: Path) -> None:
    for stage in [*folder.glob(".stage-*"), *folder.glob(".old-*")]:
        disk.remove_folder(stage)
    remove_temporary_files(folder)


def _make_room(folder: Path, needed: int, min_free: int, keep: Retention) -> None:
    """On a disk that is nearly full older checkpoints go early, but never the newest good one."""
    while shutil.disk_usage(folder).free < needed + min_free:
        there = list_checkpoints(folder)
        good = next((path for path in reversed(there) if find_damage(path) is None), None)
        spare = [path for path in there if path != good and not keep.always(step_of(path))]
        if good is None or not spare:
            break
        remove(spare[0])
    check_free_space(folder, needed, min_free)


def check_free_space(folder: Path, needed: int, min_free: int) -> None:
    """Refuses before anything is written, or trained, what the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if free < needed + min_free:
        mib = 2**20
        raise RunFailed(
            f"{folder}: {free / mib:,.0f} MiB free, but a checkpoint takes {needed / mib:,.0f} MiB and save.min_free "
            f"keeps {min_free / mib:,.0f} MiB; make room or set save.folder to another disk"
        )
