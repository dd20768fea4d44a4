"""Where every job on this box stands, as one JSON line: `python report.py HOME [RUN]`. Reads small files only."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

MARK = "sojourn-report "
_LAST = 65536  # bytes at the end of metrics.jsonl


def main(argv: list[str]) -> None:
    home, wanted = argv[1], argv[2] if len(argv) > 2 else None
    jobs = os.path.join(home, ".sojourn", "jobs")
    names = [wanted] if wanted else sorted(os.listdir(jobs)) if os.path.isdir(jobs) else []
    found = [report(home, name) for name in names if os.path.isdir(os.path.join(jobs, name))]
    print(MARK + json.dumps({"time": time.time(), "jobs": found}))


def report(home: str, name: str) -> dict[str, Any]:
    job, run = os.path.join(home, ".sojourn", "jobs", name), os.path.join(home, "runs", name)
    status = supervisor_status(job)
    train = read(os.path.join(run, "status.json"))
    ledger = read(os.path.join(run, "ledger.json"))
    metrics = last_lines(os.path.join(run, "metrics.jsonl"))
    losses = [line for line in metrics if line.get("kind") == "train" and isinstance(line.get("loss"), (int, float))]
    return {
        "run": name,
        "state": status.get("state", "unknown"),
        "phase": status.get("phase", ""),
        "message": status.get("message", ""),
        "reason": status.get("reason", ""),
        "resumable": status.get("resumable", True),
        "exit_code": status.get("exit_code"),
        "stop_action": status.get("stop_action", "none"),
        "verified": status.get("verified", False),
        "restarts": status.get("restarts", 0),
        "updated": status.get("updated", 0.0),
        "seconds": status.get("seconds") or 0.0,
        "money": status.get("money") or 0.0,
        "currency": status.get("currency", ""),
        "step": train.get("step", 0),
        "total_steps": train.get("total_steps", 0),
        "train_message": train.get("message", ""),
        "train_seconds": ledger.get("seconds", 0.0),
        "run_id": read(os.path.join(run, "identity.json")).get("run_id", ""),
        "loss": losses[-1]["loss"] if losses else None,
        "tokens_per_second": losses[-1].get("tokens_per_second") if losses else None,
        "memory": losses[-1].get("memory") if losses else None,
        "mfu": losses[-1].get("mfu") if losses else None,
        "seconds_a_step": seconds_a_step(losses),
        "final": os.path.isdir(os.path.join(run, "final")),
    }


def seconds_a_step(losses: list[dict[str, Any]]) -> float | None:
    """Over the lines at the end of metrics.jsonl, without pauses between two calls of train."""
    pairs = [(b["time"] - a["time"], b["step"] - a["step"]) for a, b in zip(losses, losses[1:])]
    times = sorted(seconds / steps for seconds, steps in pairs if steps > 0 and seconds >= 0)
    return times[len(times) // 2] if times else None


def read(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(1 << 20).decode("utf-8", "replace"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def last_lines(path: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LAST))
            for line in file.read(_LAST).splitlines():
                try:
                    value = json.loads(line)
                except ValueError:
                    continue
                if isinstance(value, dict):
                    lines.append(value)
    except OSError:
        pass
    return lines


def supervisor_status(job: str) -> dict[str, Any]:
    """`lost` where it is not over, but nobody runs it any more."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import supervisor  # type: ignore[import-not-found]

    found: dict[str, Any] = supervisor.read_status(Path(job))
    return found


if __name__ == "__main__":
    main(sys.argv)
