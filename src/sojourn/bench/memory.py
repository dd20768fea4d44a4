"""Runs a command in a process of its own, and watches the memory of it and of all that it starts."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PAUSE = 0.05
_SEARCH = 0.5  # seconds between looks for new processes, which cost more than looks at known ones
_WATCHING = 20  # looking takes at most one part in so many of one core


@dataclass
class Memory:
    """Peaks in bytes, each of a sum over the processes.

    `pss` counts a page that several of them share once in all, `rss` once for each; both count the pages of mapped
    files. Where the system knows no PSS (all but Linux), `pss` is the RSS, and `kind` says so.
    """

    pss: int = 0
    rss: int = 0
    samples: int = 0
    kind: str = "PSS"

    def look(self, processes: list[Any]) -> None:
        import psutil

        pss = rss = 0
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):  # it has just ended
                facts = process.memory_full_info() if psutil.LINUX else process.memory_info()
                rss += facts.rss
                pss += getattr(facts, "pss", facts.rss)
        self.kind = "PSS" if psutil.LINUX else "RSS"
        self.pss, self.rss, self.samples = max(self.pss, pss), max(self.rss, rss), self.samples + 1


def watched(
    command: list[str], env: dict[str, str], log: Path, enough: Callable[[], bool] = lambda: False, look: bool = True
) -> tuple[int, Memory]:
    """The exit code, and the peak of memory while it ran. What it prints goes to `log`. No process is left behind.

    Once it has done `enough`, it is ended. Looking at the memory of a very large process holds it up a little, so that
    one may want not to.
    """
    import psutil

    memory = Memory()
    with log.open("wb") as said, subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=env) as process:
        tree: list[psutil.Process] = []
        try:
            root = psutil.Process(process.pid)
            pause, searched = 0.0, 0.0
            while _runs_on(process, pause):
                began = time.process_time()
                if time.monotonic() - searched > _SEARCH:
                    with contextlib.suppress(psutil.Error):
                        tree = [root, *root.children(recursive=True)]
                    searched = time.monotonic()
                if look:
                    memory.look(tree)
                if enough():
                    break
                pause = max(_PAUSE, _WATCHING * (time.process_time() - began))
        finally:
            for one in tree:
                with contextlib.suppress(psutil.Error):  # psutil knows a pid that was given to another process
                    one.kill()
            psutil.wait_procs(tree, timeout=30)  # so that their memory is free for what comes next
        return process.wait(), memory


def _runs_on(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False
