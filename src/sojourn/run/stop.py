"""Stops a run on this machine: it saves and ends, resumable, as after Ctrl-C."""

from __future__ import annotations

import os
import signal
import time

from sojourn.errors import UserError
from sojourn.machine.process import is_alive
from sojourn.run.folder import RunFolder, Status

_LOOK_SECONDS = 0.2


def stop_run(run: RunFolder, wait: float = 0.0) -> Status:
    """Asks its process to stop; waits up to `wait` seconds for its end."""
    status = run.status()
    if status is None or status.state not in ("starting", "running"):
        state = "has no status" if status is None else f"is {status.state}"
        raise UserError(f"{run.path.name}: does not run: it {state}")
    if not is_alive(status.pid, status.started):
        raise UserError(f"{run.path.name}: trained by another machine or container; stop it there")
    try:
        os.kill(status.pid, signal.SIGTERM)
    except OSError as error:
        raise UserError(f"{run.path.name}: process {status.pid} cannot be stopped: {error.strerror}") from None
    until = time.monotonic() + wait
    while time.monotonic() < until and is_alive(status.pid, status.started):
        time.sleep(_LOOK_SECONDS)
    return run.status() or status
