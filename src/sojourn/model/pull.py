"""Brings a model from a hub: its safetensors, settings and tokenizer, each file verified by its hash. Code and pickles
stay there unless they are asked for; they are never opened here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import RunFailed, UserError
from sojourn.model.adapter_check import ADAPTER_FILE, check_adapter
from sojourn.model.folder_check import check_model
from sojourn.run.home import home
from sojourn.storage.files import is_plain_name
from sojourn.storage.hub_access import hub_errors_as_user_errors, offline_reason, silence_logging
from sojourn.storage.hub_download import MODEL_FILES
from sojourn.storage.hub_files import find_difference
from sojourn.storage.hub_mirror import REPOSITORY
from sojourn.storage.modelscope import download_from_modelscope
from sojourn.storage.sizes import format_size

Say = Callable[[str], None]

HUBS = ("hf", "modelscope")
_SHOWN = 3


def pull_model(
    name: str, hub: str, revision: str | None, to: Path | None, include: Sequence[str], say: Say
) -> dict[str, Any]:
    """`to`: a folder; default: the hub's own cache, where `model.base=NAME` finds it. `include`: patterns of files to
    bring too."""
    if hub not in HUBS:
        raise UserError(f"--hub: “{printable(hub)}” given{did_you_mean(hub, list(HUBS))}; allowed: {', '.join(HUBS)}")
    if not REPOSITORY.fullmatch(name):
        raise UserError(f"{printable(name)}: not a model's name on a hub, which is ORG/NAME; a run has no slash")
    if hub == "modelscope":
        folder = to or home() / "models" / name.replace("/", "--")
        download_from_modelscope(name, revision, [*MODEL_FILES, *include], folder)
        return _finish(name, folder, sorted(path.name for path in folder.iterdir() if path.is_file()), say)
    offline = offline_reason(None)
    if offline:
        raise UserError(f"{name}: {offline}; what is in the cache already needs no pull: model.base={name}")
    with hub_errors_as_user_errors(name, name, revision):
        return _pull(name, revision, to, include, say)


def _pull(name: str, revision: str | None, to: Path | None, include: Sequence[str], say: Say) -> dict[str, Any]:
    from huggingface_hub import HfApi, hf_hub_download, utils

    silence_logging(utils)
    api = HfApi()
    commit = str(api.repo_info(name, revision=revision).sha)
    listed = api.list_repo_tree(name, recursive=True, revision=commit)
    rows: dict[str, Any] = {row.path: row for row in listed if hasattr(row, "blob_id")}
    chosen = _choose(name, rows, include, say)
    _check_space(to, sum(rows[file].size for file in chosen))
    folder = to
    for file in chosen:
        if rows[file].size > 10**8:
            say(f"{file} ({format_size(rows[file].size)})")
        path = Path(hf_hub_download(name, file, revision=revision, local_dir=to))
        difference = find_difference(rows, {file: path})
        if difference is not None:
            Path(os.path.realpath(path)).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise RunFailed(f"{name}: {difference} after the download, and was removed; run the same command again")
        folder = to or Path(str(path).removesuffix(file))
    assert folder is not None  # noqa: S101
    return _finish(name, folder, chosen, say)


def _choose(name: str, rows: dict[str, Any], include: Sequence[str], say: Say) -> list[str]:
    asked = [file for file in rows if any(fnmatchcase(file, pattern) for pattern in include)]
    ours = [file for file in rows if "/" not in file and any(fnmatchcase(file, one) for one in MODEL_FILES)]
    chosen = sorted({*ours, *asked})
    for file in chosen:
        if not all(map(is_plain_name, PurePosixPath(file).parts)):
            raise UserError(f"{name}: it has a file called {printable(file, 60)!r}, so nothing of it is brought here")
    left = sorted((file for file in rows if file not in chosen), key=lambda file: -rows[file].size)
    if not asked and not any(file.endswith(".safetensors") for file in chosen):
        some = next((file for file in left if file.endswith(".gguf")), None)
        hint = f"bring one of its GGUF files: --include {some}" if some else "take a copy with model.safetensors"
        raise UserError(f"{name}: it has no safetensors in its top folder, only {_some(left)}; {hint}")
    if left:
        size = format_size(sum(rows[file].size for file in left))
        say(f"left out: {_some(left)} ({size} in {len(left)} files); to bring some: --include PATTERN")
    return chosen


def _some(files: list[str]) -> str:
    shown = ", ".join(printable(file, 60) for file in files[:_SHOWN])
    return (shown or "nothing") + (", …" if len(files) > _SHOWN else "")


def _check_space(to: Path | None, size: int) -> None:
    from huggingface_hub import constants

    place = to or Path(constants.HF_HUB_CACHE)
    there = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if to is not None and size > free + sum(path.stat().st_size for path in to.rglob("*") if path.is_file()):
        raise UserError(f"{to}: {format_size(size)} needed, {format_size(free)} free; choose another disk: --to FOLDER")


def _finish(name: str, folder: Path, files: list[str], say: Say) -> dict[str, Any]:
    if (folder / ADAPTER_FILE).exists():
        check_adapter(folder)
    elif (folder / "config.json").exists() and "config.json" in files:
        check_model(folder, weights=any(file.endswith(".safetensors") for file in files))
    say(f"{folder}: {len(files)} files, verified")
    return {"model": name, "folder": str(folder), "files": files}
