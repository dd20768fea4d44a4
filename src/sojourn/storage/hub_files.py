"""Files of a hub repository as its API lists them, compared with files here. The hub identifies large files by SHA-256,
small ones by git's blob hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sojourn.storage.files import sha256


def find_difference(
    files: Mapping[str, Any], contents: Mapping[str, Path | bytes], digests: Mapping[str, str] | None = None
) -> str | None:
    """The first difference between the hub's files and ours, or None. `digests`: SHA-256 that are known already."""
    digests = digests or {}
    for name, content in contents.items():
        row = files.get(name)
        if row is None:
            return f"{name} is missing"
        if row.lfs is not None:
            ours, theirs = digests.get(name) or _sha256(content), row.lfs.sha256
        else:
            ours, theirs = blob_hash(content), row.blob_id
        if ours != theirs:
            return f"{name} is different"
    return None


def blob_hash(content: Path | bytes) -> str:
    """git's."""
    data = content.read_bytes() if isinstance(content, Path) else content
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _sha256(content: Path | bytes) -> str:
    return sha256(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest()
