"""Runs a command in a subprocess and samples the memory of its whole process tree."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PAUSE = 0.05  # seconds between samples
_SEARCH = 0.5  # seconds between searches for new child processes, which cost more than a sample
_MAX_OVERHEAD = 20  # sampling takes at most 1/20 of one core


@dataclass
class Memory:
    """Peak bytes, summed over the process tree; pages of mapped files are included.

    `pss` counts a shared page once, `rss` once per process. Only Linux has PSS; elsewhere `pss` is the RSS and `kind`
    is "RSS".
    """

    pss: int = 0
    rss: int = 0
    samples: int = 0
    kind: str = "PSS"

    def sample(self, processes: list[Any]) -> None:
        import psutil

        pss = rss = 0
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):  # it has just ended
                info = process.memory_full_info() if psutil.LINUX else process.memory_info()
                rss += info.rss
                pss += getattr(info, "pss", info.rss)
        self.kind = "PSS" if psutil.LINUX else "RSS"
        self.pss, self.rss, self.samples = max(self.pss, pss), max(self.rss, rss), self.samples + 1


def run_sampled(
    command: list[str],
    env: dict[str, str],
    log: Path,
    is_done: Callable[[], bool] = lambda: False,
    sample_memory: bool = True,
) -> tuple[int, Memory]:
    """Returns the exit code and the peak memory. Output goes to `log`. No process is left behind.

    The process tree is killed once `is_done()`. Sampling slows a very large process a little: `sample_memory=False`.
    """
    import psutil

    memory = Memory()
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env) as process,
    ):
        tree: list[psutil.Process] = []
        try:
            root = psutil.Process(process.pid)
            pause, searched = 0.0, 0.0
            while _still_runs(process, pause):
                began = time.process_time()
                if time.monotonic() - searched > _SEARCH:
                    with contextlib.suppress(psutil.Error):
                        tree = [root, *root.children(recursive=True)]
                    searched = time.monotonic()
                if sample_memory:
                    memory.sample(tree)
                if is_done():
                    break
                pause = max(_PAUSE, _MAX_OVERHEAD * (time.process_time() - began))
        finally:
            for child in tree:
                with contextlib.suppress(psutil.Error):  # psutil never kills a process that reuses the pid
                    child.kill()
            psutil.wait_procs(tree, timeout=30)  # their memory is free afterwards
        return process.wait(), memory


def _still_runs(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False
