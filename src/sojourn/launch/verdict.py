"""How workers tell the process that launched them how the run ended: the verdict file, and the errors that decide it.

The first worker that ends the run for good writes the file; later ones leave it. A worker that was killed, or that lost
another rank, writes none, and then all workers are restarted. On several nodes the ranks exchange verdicts when they
meet again after a restart.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from sojourn.errors import RunFailed, UserError

VERDICT = "SOJOURN_VERDICT"  # environment variable: path of the verdict file


class RunOver(UserError):
    """The run has ended for good on another node; the message is that node's verdict, as JSON."""


class RelayedError(UserError):
    """An error of rank 0, as the other ranks receive it."""


class RestartNeeded(RunFailed):
    """Ranks block each other inside a pass: all must restart from the last checkpoint."""


def read_verdict() -> str:
    """Why this node's workers have ended for good, as JSON; empty where they have not."""
    path = Path(os.environ.get(VERDICT, ""))
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def write_verdict(text: str) -> None:
    """Keeps the verdict that is there already."""
    path = Path(os.environ[VERDICT])
    complete = path.with_suffix(f".{os.getpid()}")
    complete.write_text(text, encoding="utf-8")
    with suppress(FileExistsError):
        os.link(complete, path)


def printed_marker(verdict: Path) -> Path:
    """Exists where the worker has printed its verdict itself."""
    return verdict.with_suffix(".printed")


def stop_marker(verdict: Path) -> Path:
    """Exists if the launcher received a signal to stop."""
    return verdict.with_suffix(".stop")
