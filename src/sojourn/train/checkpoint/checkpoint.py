"""Checkpoints that a kill at any moment cannot damage.

Order of a save: write safetensors and JSON into a stage folder on the same filesystem, fsync, write the manifest (size
and SHA-256 of every file), rename into place, fsync the folder, move `latest`, and only then remove old checkpoints.
Loading verifies every byte against the manifest. A damaged checkpoint is set aside as `damaged-step-N`: it is never
read, counted or removed again. Retention counts only checkpoints that this process has written or verified, so that
the newest good one is never removed. Nothing is removed through a symlink.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import RunFailed, UserError
from sojourn.run.checkpoints import MANIFEST, PARTS, file_damage, find_damage, is_state, list_checkpoints, step_of
from sojourn.storage import disk
from sojourn.storage.files import (
    CannotRead,
    load_json,
    read_json,
    read_json_object,
    read_text,
    remove_temporary_files,
    sha256,
    write_json,
    write_text,
)
from sojourn.storage.stage import staged
from sojourn.train.checkpoint.safetensors_writer import write_tensors

if TYPE_CHECKING:
    from torch import Tensor

_REMOVING = ".removing-"
_verified: set[tuple[str, int]] = set()  # path and mtime of the manifest: written or read whole by this process


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to resume: weights, optimizer states, RNG states, and `state` (step, tokens, seconds …)."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def size(self) -> int:
        """Bytes, without headers and JSON."""
        return sum(t.numel() * t.element_size() for part in PARTS for t in getattr(self, part).values())


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the `last` few, that of the best step, and one every `milestones` steps."""

    last: int = 2
    best: int | None = None
    milestones: int | None = None
    in_use: int | None = None  # being copied to the mirror

    def protects(self, step: int) -> bool:
        return step in (self.best, self.in_use) or (self.milestones is not None and step % self.milestones == 0)


def save(
    folder: Path,
    checkpoint: Checkpoint,
    keep: Retention,
    min_free: int = 0,
    check_ownership: Callable[[], None] = lambda: None,
) -> Path:
    """Writes `checkpoint` under `folder` and returns its path; a failure changes nothing. `check_ownership` raises
    where another process has taken over the run."""
    target = folder / f"step-{checkpoint.step:08d}"
    try:
        check_ownership()
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stages(folder)
        if target.exists():
            if find_damage(target) is None:
                _remember(target)
                recover(folder, keep)
                return target
            set_aside(target)
        _free_space(folder, checkpoint.size, min_free, keep)
        with staged(target) as stage:
            manifest = {
                f"{part}.safetensors": write_tensors(stage / f"{part}.safetensors", getattr(checkpoint, part))
                for part in PARTS
            }
            write_json(stage / "state.json", checkpoint.state)
            manifest["state.json"] = file_digest(stage / "state.json")
            write_json(stage / MANIFEST, manifest)
            check_ownership()
        _remember(target)
        write_text(folder / "latest", target.name + "\n")
    except OSError as error:
        reason = error.strerror or error
        raise RunFailed(f"{folder}: the checkpoint of step {checkpoint.step} could not be written: {reason}") from error
    _prune(folder, keep)
    return target


def load_newest(folder: Path, warn: Callable[[str], None] | None = None) -> tuple[Checkpoint, Path] | None:
    """The newest undamaged checkpoint under `folder`, or None; `warn` gets a line for each damaged one."""
    path = find_newest(folder, warn)
    return None if path is None else (read_verified(path), path)


def find_newest(folder: Path, warn: Callable[[str], None] | None = None) -> Path | None:
    for path in reversed(list_checkpoints(folder)):
        damage = verify(path)
        if damage is None:
            return path
        if warn is not None:
            warn(f"{path.name} is damaged ({damage}); trying the one before it")
    return None


def verify(path: Path) -> str | None:
    """`find_damage`; a good one counts as verified from now on."""
    damage = find_damage(path)
    if damage is None:
        _remember(path)
    return damage


def set_aside(path: Path) -> Path | None:
    """Renames a damaged checkpoint, so that nothing reads or counts it again. None where that is impossible."""
    for number in range(1, 100):
        aside = path.with_name(f"damaged-{path.name}" + (f"-{number}" if number > 1 else ""))
        if not aside.exists():
            with contextlib.suppress(OSError):
                disk.rename(path, aside)
                return aside
            break
    return None


def _remember(path: Path) -> None:
    with contextlib.suppress(OSError):
        _verified.add((str(path), (path / MANIFEST).stat().st_mtime_ns))


def _is_verified(path: Path) -> bool:
    try:
        return (str(path), (path / MANIFEST).stat().st_mtime_ns) in _verified
    except OSError:
        return False


def load_path(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`."""
    refuse_damaged(path)
    return read_verified(path)


def refuse_damaged(path: Path) -> None:
    damage = find_damage(path)
    if damage is not None:
        raise UserError(
            f"{path}: not a complete checkpoint ({damage}); set save.resume=auto to resume from the newest good one"
        )


def read_verified(path: Path) -> Checkpoint:
    """Of a checkpoint that was found undamaged."""
    from safetensors.torch import load_file

    file = path / "state.json"
    try:
        state = load_json(file)
        parts = {}
        for name in PARTS:
            file = path / f"{name}.safetensors"
            parts[name] = load_file(file)
    except OSError as error:  # every byte was right a moment ago
        raise CannotRead(file, error) from error
    return Checkpoint(**parts, state=state)


def cost_so_far(folder: Path) -> tuple[float, float]:
    """Seconds and money, as the newest checkpoint with an undamaged state.json has them."""
    for path in reversed(list_checkpoints(folder)):
        listed, state = read_json_object(path / MANIFEST).get("state.json"), read_json(path / "state.json")
        if is_state(state) and file_damage(path / "state.json", listed) is None:
            return float(state.get("seconds", 0.0)), float(state.get("money", 0.0))
    return 0.0, 0.0


def file_digest(file: Path) -> dict[str, Any]:
    """One file's entry in the manifest."""
    return {"size": file.stat().st_size, "sha256": sha256(file)}


def recover(folder: Path, keep: Retention) -> None:
    """Finishes what a kill or a full disk left undone: removals, `latest`."""
    _remove_stages(folder)
    checkpoints = list_checkpoints(folder)
    if any(not keep.protects(step_of(path)) for path in checkpoints[: -keep.last]):
        for path in checkpoints[-keep.last :]:
            if not _is_verified(path):
                verify(path)  # only then may the older ones go
    good = [path for path in list_checkpoints(folder) if _is_verified(path)]
    with contextlib.suppress(OSError):
        named = read_text(folder / "latest")
        if good and named != f"{good[-1].name}\n":
            write_text(folder / "latest", f"{good[-1].name}\n")
        elif not good and named is not None and not (folder / named.strip()).is_dir():
            disk.unlink(folder / "latest")  # what it names was set aside
    _prune(folder, keep)


def _prune(folder: Path, keep: Retention) -> None:
    """Removes what is older than the last few verified checkpoints."""
    checkpoints = list_checkpoints(folder)
    verified = [path for path in checkpoints if _is_verified(path)]
    if len(verified) < keep.last:
        return
    for path in checkpoints[: checkpoints.index(verified[-keep.last])]:
        if not keep.protects(step_of(path)):
            remove(path)


def remove(path: Path) -> None:
    """Renames first, so that a kill half-way leaves nothing that looks like a checkpoint. Of a symlink only the link is
    removed."""
    with contextlib.suppress(OSError):
        if path.is_symlink():
            disk.unlink(path)
            return
        removing = path.with_name(f"{_REMOVING}{path.name}")
        disk.remove_folder(removing)
        disk.rename(path, removing)
        disk.remove_folder(removing)


def _remove_stages(folder: Path) -> None:
    for pattern in (".stage-*", ".old-*", f"{_REMOVING}*"):
        for stage in folder.glob(pattern):
            disk.remove_folder(stage)
    remove_temporary_files(folder)


def _free_space(folder: Path, needed: int, min_free: int, keep: Retention) -> None:
    """On a nearly full disk older checkpoints are removed early, but never the newest undamaged one."""
    while shutil.disk_usage(folder).free < needed + min_free:
        checkpoints = list_checkpoints(folder)
        good = next((path for path in reversed(checkpoints) if verify(path) is None), None)
        removable = [path for path in checkpoints if path != good and not keep.protects(step_of(path))]
        if good is None or not removable:
            break
        remove(removable[0])
    check_free_space(folder, needed, min_free)


def check_free_space(folder: Path, needed: int, min_free: int) -> None:
    """Raises before anything is written, or trained, where the disk is too small."""
    free = shutil.disk_usage(folder).free
    if free < needed + min_free:
        mib = 2**20
        raise RunFailed(
            f"{folder}: {free / mib:,.0f} MiB free, but a checkpoint takes {needed / mib:,.0f} MiB and save.min_free "
            f"keeps {min_free / mib:,.0f} MiB free; free some space, or set save.folder to another disk"
        )
