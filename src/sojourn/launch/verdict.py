"""How workers tell the process that launched them how the run ended: the verdict file and the errors that decide it."""

from __future__ import annotations

from sojourn.errors import RunFailed, UserError

VERDICT = "SOJOURN_VERDICT"  # environment variable: path of the verdict file


class RunOver(UserError):
    """The run has ended for good on another node; the message is that node's verdict, as JSON."""


class RelayedError(UserError):
    """An error of rank 0, as the other ranks receive it."""


class RestartNeeded(RunFailed):
    """Ranks block each other inside a pass: all must restart from the last checkpoint."""
