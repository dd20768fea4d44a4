"""Runs one command of the board in a process of its own, which outlives the board, and writes down how it ended.

python -m sojourn.board.task_process FOLDER WORD…       (runs: python -m sojourn WORD…)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sojourn.machine.process import start_time


def main() -> None:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    with (folder / "output.txt").open("ab", buffering=0) as output:
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "sojourn", *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            ours = {"pid": os.getpid(), "process_started": start_time(os.getpid())}  # the board may be gone by now
            _write(folder, "process.json", {**ours, "child": child.pid})
            code = child.wait()
        except OSError as error:
            output.write(f"sojourn: {error}\n".encode())
            code = 1
    _write(folder, "end.json", {"code": code, "ended": time.time()})


def _write(folder: Path, name: str, values: dict[str, Any]) -> None:
    made = folder / f".{name}"
    made.write_text(json.dumps(values), encoding="utf-8")
    made.replace(folder / name)


if __name__ == "__main__":
    main()
