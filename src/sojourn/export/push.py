"""Sends a model to a hub: an export, a model's folder, or the final model of a run. What is sent is checked first: an
export must be as the parity gate saw it, and no file may hold a secret."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import RunFailed, UserError
from sojourn.expand_user import expand_user
from sojourn.export.stage import MANIFEST
from sojourn.export.verify import read_manifest
from sojourn.infer.find import find_model
from sojourn.model.folder_check import PICKLES
from sojourn.storage.files import sha256
from sojourn.storage.hub_mirror import REPOSITORY
from sojourn.storage.hub_upload import upload_folder
from sojourn.storage.modelscope import upload_to_modelscope
from sojourn.storage.secret_scan import scan_files

Say = Callable[[str], None]

HUBS = ("hf", "modelscope")
CARD = "README.md"
_SHOWN = 3


def push(name: str, repo: str, hub: str, private: bool, revision: str | None, say: Say) -> dict[str, Any]:
    """Where it went, and what was sent."""
    if hub not in HUBS:
        raise UserError(f"--hub: “{printable(hub)}” given{did_you_mean(hub, list(HUBS))}; allowed: {', '.join(HUBS)}")
    if not REPOSITORY.fullmatch(repo):
        raise UserError(f"{printable(repo)}: not a repository's name; write ORG/NAME, as in me/my-model")
    if revision is not None and not re.fullmatch(r"[A-Za-z0-9][\w./-]{0,100}", revision, re.ASCII):
        raise UserError(f"--revision: {printable(revision)}: not a branch's name")
    folder = _folder(name)
    files = _files(folder, say)
    record = _read_record(folder)
    _refuse_secrets(folder, files)
    digests = _digests(folder, files, record, say)
    if CARD not in files:
        say(f"note: no {CARD} in {folder}, so the repository gets no model card; sojourn export writes one")
    if hub == "modelscope":
        done = upload_to_modelscope(repo, folder, files, digests, private, revision, say)
    else:
        done = upload_folder(repo, files, digests, private, revision, say)
    size = sum(path.stat().st_size for path in files.values())
    return {
        "repository": repo, "hub": hub, "url": done.url, "commit": done.commit, "private": done.private,
        "files": len(files), "bytes": size, "sent": list(done.sent),
    }  # fmt: skip


def _folder(name: str) -> Path:
    path = expand_user(name)
    if (path / MANIFEST).exists():
        if path.name.startswith(".partial-"):
            raise UserError(f"{path}: an export that is not finished; run the same export again")
        return path.resolve()
    if path.is_file():
        raise UserError(f"{path}: push sends a folder; name the one that the file is in")
    found = find_model(name)
    if found.is_checkpoint:
        raise UserError(
            f"{name}: a checkpoint is no model that others can open; export it first: sojourn export {name}"
        )
    return found.path.resolve()


def _files(folder: Path, say: Say) -> dict[str, Path]:
    """By their path in the repository. Hidden files and pickles stay here."""
    found: dict[str, Path] = {}
    left: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(folder):
            raise UserError(f"{path}: a link to a file outside of the folder; copy that file there, or remove the link")
        if path.is_dir():
            continue
        if not path.is_file():
            raise UserError(f"{path}: not a file; remove it")
        hidden = any(part.startswith(".") for part in Path(name).parts)
        if hidden or "__pycache__" in name or any(path.match(pattern) for pattern in PICKLES):
            left.append(name)
        else:
            found[name] = path
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        say(f"note: not sent (hidden, or a pickle): {', '.join(left[:_SHOWN])}{more}")
    if not found:
        raise UserError(f"{folder}: no files there")
    return found


def _read_record(folder: Path) -> dict[str, Any]:
    """Of an export whose gate passed; empty for other folders."""
    if not (folder / MANIFEST).exists():
        return {}
    record = read_manifest(folder)
    gate = record.get("gate")
    if not isinstance(gate, dict) or gate.get("passed") is not True:
        raise RunFailed(f"{folder}: the parity gate found drift in this export, so it is not sent; export it anew")
    return record


def _refuse_secrets(folder: Path, files: dict[str, Path]) -> None:
    scan = scan_files(files.values())
    if scan.findings:
        more = f" (and {len(scan.findings) - 1} more)" if len(scan.findings) > 1 else ""
        raise UserError(f"{scan.findings[0]}{more}; it would be published: remove it from {folder}, then push again")


def _digests(folder: Path, files: dict[str, Path], record: dict[str, Any], say: Say) -> dict[str, str]:
    """SHA-256 of each file; those of an export must be as it was written. The card may be edited."""
    written: dict[str, dict[str, Any]] = record.get("files", {})
    missing = next((name for name in written if name not in files), None)
    if missing is not None:
        raise RunFailed(f"{folder / missing}: gone since the export; copy the folder again, or export anew")
    digests = {}
    for name, path in files.items():
        digests[name] = sha256(path)
        if name in written and name != CARD and digests[name] != written[name]["sha256"]:
            raise RunFailed(f"{path}: changed since the export; copy the folder again, or export anew")
    extra = [name for name in files if written and name not in (*written, MANIFEST)]
    if extra:
        say(f"note: sent too, though the export did not write it: {', '.join(extra[:_SHOWN])}")
    return digests
