"""A path as a person types it: `~` is their home."""

from __future__ import annotations

import os
from pathlib import Path


def expand_user(path: str | os.PathLike[str]) -> Path:
    """`~name` of a user that there is not stays as it is, as in a shell; `Path.expanduser` raises RuntimeError."""
    return Path(os.path.expanduser(path))  # noqa: PTH111
