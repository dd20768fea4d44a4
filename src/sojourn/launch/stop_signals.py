"""The signals at which a run saves and stops: Ctrl-C, a platform's SIGTERM, a closed terminal, Slurm's warning."""

from __future__ import annotations

import signal

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")  # Windows has the first two
STOP_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
