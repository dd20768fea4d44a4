"""The runs in a folder at a glance: a few small files of each, however damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed
from sojourn.run.folder import RunFolder
from sojourn.run.ledger import is_amount
from sojourn.storage.files import last_json_lines, read_json_object

_SIGNS = ("run.yaml", "status.json", "metrics.jsonl", "identity.json")  # of a run, perhaps with the others lost


@dataclass(frozen=True)
class RunSummary:
    """`state`: as in status.json, or unknown. `loss`: of the last logged step. `seconds`, `money`: of all calls."""

    name: str
    state: str
    step: int
    total_steps: int
    loss: float | None
    seconds: float
    money: float
    currency: str
    updated: float
    path: str
    message: str = ""


def list_runs(folder: Path) -> list[RunSummary]:
    """Newest first."""
    found = [path for path in folder.iterdir() if is_run(path)] if folder.is_dir() else []
    return sorted((summarize(RunFolder(path)) for path in found), key=lambda run: (-run.updated, run.name))


def is_run(path: Path) -> bool:
    try:
        return path.is_dir() and any((path / sign).exists() for sign in _SIGNS)
    except OSError:
        return False


def summarize(run: RunFolder) -> RunSummary:
    message, status, loss, ledger = "", None, None, {}
    try:
        status = run.status()
        message = status.message if status is not None else "status.json is missing or damaged"
        loss = _last_loss(run)
        ledger = read_json_object(run.ledger)
    except (OSError, RunFailed) as error:
        message = str(error)
    seconds, money, currency = (ledger.get(key) for key in ("seconds", "money", "currency"))
    return RunSummary(
        run.path.name,
        status.state if status is not None else "unknown",
        status.step if status is not None else 0,
        status.total_steps if status is not None else 0,
        loss,
        float(seconds) if is_amount(seconds) else 0.0,
        float(money) if is_amount(money) else 0.0,
        currency if isinstance(currency, str) else "",
        float(status.updated) if status is not None else 0.0,
        str(run.path.absolute()),
        message,
    )


def _last_loss(run: RunFolder) -> float | None:
    for line in last_json_lines(run.metrics):
        loss: Any = line.get("loss")
        if line.get("kind") == "train" and type(loss) in (int, float):
            return float(loss)
    return None
