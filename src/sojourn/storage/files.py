"""Atomic file writes: a kill or a power cut leaves the old or the new content, never half of one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from sojourn.storage import disk


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replaces `path` atomically and durably."""
    stage = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with stage.open("wb", buffering=0) as file:
            disk.write(file, text.encode())
            disk.sync(file.fileno())
        disk.rename(stage, path)
    except BaseException:
        stage.unlink(missing_ok=True)
        raise
    disk.sync_folder(path.parent)


def remove_temporary_files(folder: Path) -> None:
    """Removes what killed calls of `write_text` left in `folder`. No other process may write there."""
    for path in folder.glob(".*.*"):
        pid = path.name.rpartition(".")[2]
        if pid.isdecimal() and int(pid) != os.getpid() and path.is_file():
            path.unlink(missing_ok=True)


def read_text(path: Path) -> str | None:
    """The content, or None where there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """The content, or None where there is no readable JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def append_json(path: Path, value: dict[str, Any]) -> None:
    """Appends one line. A line that a kill cut short is ended first, so that it damages only itself."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete line; lines cut short by a kill are ignored."""
    lines = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    value = json.loads(line)
                    if isinstance(value, dict):
                        lines.append(value)
    except FileNotFoundError:
        pass
    return lines
