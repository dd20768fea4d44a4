"""Checkpoints that a kill at any instant cannot spoil.

Written into a stage folder on the same filesystem (safetensors and JSON), made durable, sealed by a manifest of sizes
and SHA-256, renamed into place; only then does `latest` move, and only after that are old ones removed. A checkpoint is
loaded only if every file matches its manifest; otherwise the newest good one is taken, and the user is told.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed, UserError
from sojourn.run.files import read_json, sha256, sync_file, sync_folder, write_json, write_text

_MANIFEST = "manifest.json"


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
        parts = (self.model, self.optimizer, self.random)
        return sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part.values())


def save(folder: Path, checkpoint: Checkpoint, keep: int, min_free: int = 0) -> Path:
    """Writes `checkpoint` under `folder` and returns its place; on failure nothing has changed."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    _remove_stages(folder)
    target = folder / f"step-{checkpoint.step:08d}"
    if target.exists() and find_fault(target) is None:
        return target
    check_room(folder, checkpoint.size, min_free)
    stage = folder / f".stage-{os.getpid()}-{target.name}"
    try:
        stage.mkdir()
        for name in ("model", "optimizer", "random"):
            tensors = {key: value.detach().to("cpu").contiguous() for key, value in getattr(checkpoint, name).items()}
            save_file(tensors, stage / f"{name}.safetensors")
        write_json(stage / "state.json", checkpoint.state)
        files = sorted(stage.iterdir())
        for file in files:
            sync_file(file)
        write_json(
            stage / _MANIFEST, {file.name: {"size": file.stat().st_size, "sha256": sha256(file)} for file in files}
        )
        sync_folder(stage)
        if target.exists():
            _remove(target)
        stage.rename(target)
        sync_folder(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(stage, ignore_errors=True)
        why = getattr(error, "strerror", None) or error
        raise RunFailed(f"{folder}: the checkpoint of step {checkpoint.step} could not be written: {why}") from error
    write_text(folder / "latest", target.name + "\n")
    _prune(folder, keep)
    return target


def load(folder: Path, say: Any = None) -> tuple[Checkpoint, Path] | None:
    """The newest good checkpoint under `folder`, or None. Damaged ones are passed over, and `say` hears of each."""
    for path in reversed(_all(folder)):
        fault = find_fault(path)
        if fault is None:
            return _read(path), path
        if say is not None:
            say(f"{path.name} is damaged ({fault}); going back to the one before")
    return None


def load_one(path: Path) -> Checkpoint:
    """One checkpoint, by its folder."""
    fault = find_fault(path)
    if fault is not None:
        raise UserError(
            f"{path}: not a whole checkpoint ({fault}); leave save.resume at auto to continue from the newest good one"
        )
    return _read(path)


def find_fault(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every byte is as it was written."""
    manifest = read_json(path / _MANIFEST)
    if not isinstance(manifest, dict) or not manifest:
        return "no readable manifest"
    for name, facts in manifest.items():
        file = path / name
        try:
            if file.stat().st_size != facts["size"]:
                return f"{name} has the wrong size"
            if sha256(file) != facts["sha256"]:
                return f"{name} has changed"
        except OSError:
            return f"{name} is missing or unreadable"
        except (KeyError, TypeError):
            return "no readable manifest"
    return None


def _read(path: Path) -> Checkpoint:
    from safetensors.torch import load_file

    parts = {name: load_file(path / f"{name}.safetensors") for name in ("model", "optimizer", "random")}
    return Checkpoint(**parts, state=read_json(path / "state.json"))


def _all(folder: Path) -> list[Path]:
    """Oldest first, by step number (not by time: copies reorder times)."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _prune(folder: Path, keep: int) -> None:
    for path in _all(folder)[:-keep]:
        _remove(path)


def _remove(path: Path) -> None:
    """Unseals first, so that a kill half-way leaves something that is plainly no checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        (path / _MANIFEST).unlink()
    shutil.rmtree(path, ignore_errors=True)


def _remove_stages(folder: Path) -> None:
    for stage in folder.glob(".stage-*"):
        shutil.rmtree(stage, ignore_errors=True)


def check_room(folder: Path, needed: int, min_free: int) -> None:
    """Refuses before anything is written, or trained, what the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if free < needed + min_free:
        mib = 2**20
        raise RunFailed(
            f"{folder}: {free / mib:,.0f} MiB free, but a checkpoint takes {needed / mib:,.0f} MiB and save.min_free "
            f"keeps {min_free / mib:,.0f} MiB; make room or set save.folder to another disk"
        )
