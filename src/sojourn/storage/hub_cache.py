"""Finds a hub model's files in the local cache, without the hub's library and without the network."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sojourn.expand_user import expand_user

_COMMIT = re.compile(r"[0-9a-f]{6,64}")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def cached_snapshot(model: str, revision: str | None = None) -> Path | None:
    """The folder of ORG/NAME as it was last downloaded; some of its files may be missing."""
    name = model.removeprefix("hub:")
    if not _NAME.fullmatch(name):
        return None
    folder = _cache() / f"models--{name.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    try:
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision or ""
    except (OSError, UnicodeDecodeError):
        return None
    found = folder / "snapshots" / commit
    return found if _COMMIT.fullmatch(commit) and found.is_dir() else None


def _cache() -> Path:
    if given := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return expand_user(given)
    return expand_user(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
