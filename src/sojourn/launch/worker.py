"""What a worker does at its end: it leaves a verdict, or none where a restart helps, and exits at once.

A worker must not wait for the others when it fails, since they may be blocked in a collective with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sojourn.errors import Stopped, UserError
from sojourn.launch.verdict import (
    VERDICT,
    RelayedError,
    RestartNeeded,
    RunOver,
    printed_marker,
    read_verdict,
    stop_marker,
    write_verdict,
)

_LOST_RANK = ("connection closed by peer", "connection reset", "gloo", "nccl", "socket", "broken pipe", "peer")


def is_worker() -> bool:
    """Whether torchrun, or `launch`, started this process as one of several."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def exit_if_run_over() -> None:
    """A worker restarted after a verdict exits at once. On several nodes it must tell the other nodes first."""
    if read_verdict() and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        os._exit(0)


@contextmanager
def worker_process() -> Iterator[None]:
    """Around what one of several ranks does; ends the process where it fails."""
    if not is_worker() or os.environ["WORLD_SIZE"] == "1":
        yield
        return
    threading.Thread(target=_stop_when_orphaned, args=(os.getppid(),), daemon=True).start()
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        _exit(error)


def _exit(error: BaseException) -> None:
    rank, launched = int(os.environ["RANK"]), VERDICT in os.environ
    code, message = _code_and_message(error)
    lost_rank = _is_lost_rank(error)
    if lost_rank:
        message = f"rank {rank} lost the connection to another rank, which has ended or cannot be reached"
    if isinstance(error, RunOver):
        write_verdict(message)
        os._exit(0)
    if launched and _was_stopped_by_agent(error):  # because another rank failed: all restart
        os._exit(1)
    if isinstance(error, RestartNeeded):  # printed by any rank: rank 0 may only see a signal
        print(f"sojourn: rank {rank}: {message}", file=sys.stderr)
    elif rank == 0 or not (launched or isinstance(error, UserError)):
        print(f"sojourn: {message}", file=sys.stderr)
    if launched and not lost_rank and not isinstance(error, (RestartNeeded, RelayedError)):
        try:
            write_verdict(json.dumps({"rank": rank, "code": code, "message": message}))
            if rank == 0:
                printed_marker(Path(os.environ[VERDICT])).touch()
        except OSError as failure:  # the launcher then knows no more than the exit code
            launched = False
            print(f"sojourn: {failure.filename}: {failure.strerror}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if launched and isinstance(error, Stopped) else code)


def _code_and_message(error: BaseException) -> tuple[int, str]:
    if isinstance(error, UserError):
        return error.code, str(error)
    if isinstance(error, KeyboardInterrupt):  # a second Ctrl-C
        return 130, "interrupted"
    return 1, "".join(traceback.format_exception(error)).rstrip()


def _was_stopped_by_agent(error: BaseException) -> bool:
    """Whether torchrun's agent sent the signal that stopped us, not the user."""
    by_signal = isinstance(error, Stopped) and "stopped by SIGTERM" in str(error)
    return by_signal and not stop_marker(Path(os.environ[VERDICT])).exists()


def _is_lost_rank(error: BaseException) -> bool:
    """Whether it failed because another rank was gone; that rank knows the reason."""
    import torch.distributed as dist

    dist_error = getattr(dist, "DistError", ())
    return isinstance(error, dist_error) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST_RANK)
    )


def _stop_when_orphaned(parent: int) -> None:
    """Without the launcher nobody could stop this worker. torchrun itself dies of SIGUSR1, Slurm's warning."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
