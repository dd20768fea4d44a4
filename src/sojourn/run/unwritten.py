"""What a run could not write to its logs: counted, said the first time it happens, and once more at the end.

Logging never stops training. A full disk, a closed pipe or a folder that is gone costs lines of a log, not steps.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

STDOUT, STDERR = "standard output", "standard error"

_counts: Counter[str] = Counter()
_reasons: dict[str, str] = {}
_lock = threading.RLock()


def count(what: str, error: BaseException, times: int = 1) -> None:
    """`what`: a path, or a name such as STDOUT."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    with _lock:
        is_first = what not in _counts
        _counts[what] += times
        _reasons[what] = reason.strip().split("\n")[0]
    if is_first and what != STDERR:
        _say(f"warning: {what}: {_reasons[what]}; not written, training continues")


@contextmanager
def reported(record: Callable[[dict[str, int]], None]) -> Iterator[None]:
    """Around a run: at its end, one line says what was not written. `record` puts the counts into the run's events."""
    for what in _counts.keys() - {STDOUT, STDERR}:  # of another run in this process
        del _counts[what]
    try:
        yield
    finally:
        if _counts:
            record(dict(_counts))
            parts = (f"{what} {times} times ({_reasons[what]})" for what, times in list(_counts.items()))
            _say(f"warning: not written while training went on: {', '.join(parts)}")


def _say(line: str) -> None:
    """On the stream that still works, if any."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr if STDOUT in _counts else sys.stdout, flush=True)
