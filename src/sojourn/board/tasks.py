"""What the board starts: commands of `sojourn`, each in a process of its own that goes on when the board ends, with its
output in a file. The board shows the very line that one could have typed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.machine.process import is_alive, start_time
from sojourn.storage.files import read_json_object, write_json

_KEPT = 100  # tasks; older ones are forgotten when they have ended
_MOST_OUTPUT = 256 << 10  # bytes in one answer


@dataclass(frozen=True)
class Tasks:
    """`folder`: one subfolder a task."""

    folder: Path

    def start(self, words: list[str], run: str | None = None, url: str | None = None) -> dict[str, Any]:
        task_id = f"{int(time.time()):x}-{secrets.token_hex(4)}"
        folder = self.folder / task_id
        folder.mkdir(parents=True)
        facts = {"id": task_id, "words": words, "run": run, "url": url, "started": time.time(), "cwd": str(Path.cwd())}
        write_json(folder / "task.json", facts)
        (folder / "output.txt").touch()
        command = [sys.executable, "-m", "sojourn.board.task_process", str(folder), *words]
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        if sys.platform == "win32":
            quiet["creationflags"] = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.DETACHED_PROCESS
        process = subprocess.Popen(command, start_new_session=True, **quiet)
        threading.Thread(target=process.wait, daemon=True).start()  # so that it leaves no zombie
        write_json(folder / "task.json", {**facts, "pid": process.pid, "process_started": start_time(process.pid)})
        self._forget_old()
        return self.get(task_id) or facts

    def list_all(self) -> list[dict[str, Any]]:
        """Newest first."""
        try:
            names = sorted((path.name for path in self.folder.iterdir()), reverse=True)
        except OSError:
            return []
        return [task for name in names if (task := self.get(name)) is not None]

    def get(self, task_id: str) -> dict[str, Any] | None:
        folder = self._folder(task_id)
        facts = read_json_object(folder / "task.json") if folder is not None else {}
        if folder is None or not facts:
            return None
        end, process = read_json_object(folder / "end.json"), read_json_object(folder / "process.json") or facts
        code = end.get("code")
        if code is None and not is_alive(int(process.get("pid", 0)), float(process.get("process_started", 0.0))):
            code = -1  # killed, with the machine perhaps
        state = "running" if code is None else "done" if code == 0 else "stopped" if code == 3 else "failed"
        return {
            "id": task_id, "line": command_line(facts.get("words", [])), "state": state, "code": code,
            "started": facts.get("started"), "ended": end.get("ended"),
            "run": facts.get("run"), "url": facts.get("url"),
        }  # fmt: skip

    def output(self, task_id: str, start: int, whole_lines: bool = False) -> tuple[str, int]:
        """What came after `start` bytes, and where to go on. A long output is answered from near its end.
        `whole_lines`: a line that is still being written comes with its end."""
        folder = self._folder(task_id)
        if folder is None:
            return "", start
        with contextlib.suppress(OSError), (folder / "output.txt").open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(start, size - _MOST_OUTPUT) if start < size else size)
            first, data = file.tell(), file.read(_MOST_OUTPUT)
            if whole_lines and len(data) < _MOST_OUTPUT:
                data = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
            return data.decode("utf-8", errors="replace"), first + len(data)
        return "", start

    def output_file(self, task_id: str) -> Path:
        return self.folder / task_id / "output.txt"

    def stop(self, task_id: str) -> None:
        """As Ctrl-C."""
        folder, task = self._folder(task_id), self.get(task_id)
        if folder is None or task is None or task["state"] != "running":
            return
        child = read_json_object(folder / "process.json").get("child")
        if isinstance(child, int):
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGTERM)

    def _folder(self, task_id: str) -> Path | None:
        is_plain = task_id.replace("-", "").isalnum() and task_id.isascii() and len(task_id) <= 64
        return self.folder / task_id if is_plain and (self.folder / task_id).is_dir() else None

    def _forget_old(self) -> None:
        for task in self.list_all()[_KEPT:]:
            if task["state"] != "running":
                shutil.rmtree(self.folder / task["id"], ignore_errors=True)


def command_line(words: list[str]) -> str:
    return shlex.join(["sojourn", *map(str, words)])
