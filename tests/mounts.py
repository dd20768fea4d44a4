"""Real filesystems: small, full, read-only, frozen, unmounted. Only root on Linux can mount one. Elsewhere a test that
needs one is skipped, and the list of skipped tests says why: a stand-in would not fail as a disk does."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """`mount ARGUMENTS FOLDER`, until the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        made = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True, check=False)
        reason = made.stderr.strip() if made.returncode else ""
    except FileNotFoundError:
        reason = "there is no mount command"
    if reason:
        pytest.skip(f"a filesystem can be mounted only by root on Linux: {reason}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def mounted_tmpfs(folder: Path, options: str = "size=4m"):
    return mounted(folder, "-t", "tmpfs", "-o", options, "none")
