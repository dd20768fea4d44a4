"""Everything about one run, from the files in its folder."""

from __future__ import annotations

import os
import shlex
from collections import deque
from pathlib import Path
from typing import Any

from sojourn.errors import UserError
from sojourn.run.checkpoints import list_checkpoints, step_of
from sojourn.run.folder import RunFolder
from sojourn.storage.files import NotValid, open_regular, parse_json, read_json_object

_MOST_EVENTS, _MOST_SAMPLES = 2000, 500
_MOST_LINES_BYTES = 64 << 20
_LOG_NAMES = (".log", ".txt", ".out")


def details(run: RunFolder) -> dict[str, Any]:
    environment = read_json_object(run.environment)
    auto = environment.pop("auto", None)
    command = environment.pop("command", None)
    data = environment.get("data")
    return {
        "config": _config(run),
        "auto": {key: _reason(text) for key, text in auto.items()} if isinstance(auto, dict) else {},
        "environment": environment,
        "command": shlex.join(["sojourn", *map(str, command[1:])]) if isinstance(command, list) else "",
        "checkpoints": checkpoints(run),
        "data": Path(data).name if isinstance(data, str) else None,
        "has_final": run.has_final(), "ladder": read_json_object(run.ladder),
    }  # fmt: skip


def _config(run: RunFolder) -> dict[str, Any]:
    from sojourn.config.load import dump, read_config

    try:
        return dump(read_config(run.config))
    except (OSError, UserError) as error:
        return {"error": str(error)}


def _reason(text: Any) -> dict[str, str]:
    value, _, reason = str(text).partition(": ")
    return {"value": value, "reason": reason}


def checkpoints(run: RunFolder) -> list[dict[str, Any]]:
    """Newest first; then `best` and `final`."""
    best = read_json_object(run.best / "sojourn.json").get("step")
    found = []
    for path in reversed(list_checkpoints(run.checkpoints)):
        found.append({"step": step_of(path), "bytes": _size(path), "path": str(path), "name": path.name,
                      "best": step_of(path) == best})  # fmt: skip
    for name, path in (("best", run.best), ("final", run.final)):
        if path.is_dir():
            found.append({"step": None, "bytes": _size(path), "path": str(path), "name": name, "best": name == "best"})
    return found


def _size(folder: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
    except OSError:
        return 0


def events(run: RunFolder) -> list[dict[str, Any]]:
    return _last_lines(run.events, lambda line: True, _MOST_EVENTS)


def samples(run: RunFolder) -> list[dict[str, Any]]:
    """The texts written while training; the last of each step and prompt."""
    lines = _last_lines(run.metrics, lambda line: line.get("kind") == "sample", _MOST_SAMPLES)
    last = {(line.get("step"), line.get("prompt")): line for line in lines}
    return [{key: line.get(key) for key in ("step", "prompt", "text")} for line in last.values()]


def _last_lines(path: Path, wanted: Any, most: int) -> list[dict[str, Any]]:
    found: deque[dict[str, Any]] = deque(maxlen=most)
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_LINES_BYTES))
            for line in file:
                if b'"kind"' not in line or (most == _MOST_SAMPLES and b'"sample"' not in line):
                    continue
                try:
                    value = parse_json(line)
                except NotValid:
                    continue
                if isinstance(value, dict) and wanted(value):
                    found.append(value)
    except (OSError, NotValid):
        pass
    return list(found)


def logs(run: RunFolder, outputs: dict[str, Path], file: str | None, tail: int) -> dict[str, Any]:
    """The end of a text: `outputs` of the board's own commands, or files of the run."""
    files = dict(outputs)
    for folder in (run.path, run.logs):
        if folder.is_dir():
            files |= {path.name: path for path in sorted(folder.iterdir()) if path.suffix in _LOG_NAMES}
    chosen = file if file in files else next(iter(files), None)
    if chosen is None:
        return {"files": [], "file": None, "text": ""}
    try:
        with open_regular(files[chosen]) as opened:
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - tail))
            text = opened.read(tail).decode("utf-8", errors="replace")
    except (OSError, NotValid) as error:
        text = str(error)
    return {"files": list(files), "file": chosen, "text": text}
