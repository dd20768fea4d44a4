"""The checkpoints in a run folder: which there are, and whether they are whole. `train/checkpoint/` writes them."""

from __future__ import annotations

import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sojourn.run.ledger import is_amount
from sojourn.storage.files import NotValid, file_size, is_plain_name, read_json, sha256

MANIFEST = "manifest.json"
PARTS = ("model", "optimizer", "random")
_FILES = {"state.json", *(f"{part}.safetensors" for part in PARTS)}


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Oldest first, by step (copies have other times)."""
    paths = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()]
    return sorted(paths, key=step_of)


def find_damage(path: Path, parts: Collection[str] = PARTS) -> str | None:
    """What is wrong with a checkpoint, or None if every byte of these parts matches its manifest. Raises `CannotRead`,
    which is no damage, where the machine fails."""
    manifest = read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or not manifest.keys() >= _FILES:
        return "no readable manifest"
    if not all(is_plain_name(name) for name in manifest):
        return "the manifest lists files outside this folder"
    skipped = {f"{part}.safetensors" for part in PARTS if part not in parts}
    with ThreadPoolExecutor() as threads:  # hashing releases the GIL
        read = [item for item in manifest.items() if item[0] not in skipped]
        damages = threads.map(lambda item: file_damage(path / item[0], item[1]), read)
        damage = next((damage for damage in damages if damage is not None), None)
    return damage or (None if is_state(read_json(path / "state.json")) else "state.json is not a state")


def is_state(state: Any) -> bool:
    """Whether state.json has what resuming needs."""
    if not isinstance(state, dict) or not isinstance(state.get("scaler") or {}, dict):
        return False
    step, costs = state.get("step"), (state.get("seconds", 0.0), state.get("money", 0.0))
    return type(step) is int and step >= 0 and all(map(is_amount, costs))


def file_damage(file: Path, listed: Any) -> str | None:
    if not isinstance(listed, dict) or not {"size", "sha256"} <= listed.keys():
        return "no readable manifest"
    try:
        if file_size(file) != listed["size"]:
            return f"{file.name} has the wrong size"
        return None if sha256(file) == listed["sha256"] else f"{file.name} has changed"
    except FileNotFoundError:
        return f"{file.name} is missing"
    except NotValid as error:
        return f"{file.name} is {error}"


def checkpoint_path(path: Path) -> Path:
    """`RUN/checkpoint-80`, as other trainers name it, is our `RUN/checkpoints/step-00000080`."""
    match = re.fullmatch(r"checkpoint-(\d{1,8})", path.name)
    if match is None or path.exists():
        return path
    ours = path.parent / "checkpoints" / f"step-{int(match[1]):08d}"
    return ours if ours.exists() else path
