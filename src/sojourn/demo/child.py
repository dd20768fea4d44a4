"""The training process of the demo: started, watched through its run folder, and killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from sojourn.demo.screen import Show
from sojourn.errors import RunFailed
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json_lines


class Child:
    def __init__(self, args: list[str], run: RunFolder) -> None:
        self._run = run
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (lives as long as the child)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sojourn", "train", *args],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def kill_half_way(self, show: Show) -> int:
        """Waits for half of the steps and a checkpoint, then sends SIGKILL; returns the step."""
        while True:
            step, total = self._show_progress(show)
            saved = any(event["kind"] == "saved" for event in read_json_lines(self._run.events))
            if total and saved and step >= total / 2:
                self._process.kill()
                self._process.wait()
                return step
            if self._process.poll() is not None:
                self._fail()

    def wait(self, show: Show) -> int:
        """Shows progress until the process ends; returns the number of steps."""
        while self._process.poll() is None:
            self._show_progress(show)
        if self._process.returncode != 0:
            self._fail()
        step, _ = self._show_progress(show)
        return step

    def resumed_from(self) -> int:
        starts = [event["step"] for event in read_json_lines(self._run.events) if event["kind"] == "start"]
        return int(starts[-1])

    def _show_progress(self, show: Show) -> tuple[int, int]:
        try:
            time.sleep(0.2)
        except KeyboardInterrupt:
            self._process.terminate()
            self._process.wait()
            raise
        status = self._run.status()
        total = status.total_steps if status else 0
        lines = [line for line in self._run.read_metrics() if line.get("kind") == "train"]
        if not lines:
            return 0, total
        last = lines[-1]
        show(last["step"], total, f"loss {last['loss']:.3f} · {last['tokens_per_second']:,.0f} tok/s")
        return int(last["step"]), total

    def _fail(self) -> None:
        self._log.seek(0)
        tail = self._log.read().strip().splitlines()[-5:]
        raise RunFailed("the training process failed: " + " / ".join(tail))
