"""The board with many long runs: what a browser asks for first, live updates, and the memory of an hour.

    python benchmarks/board.py [--runs 200] [--points 100000] [--minutes 1] [--browsers 5]

The runs share one metrics.jsonl (hard links), so that the disk needs little; the board reads each as a file of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil

_KEYS = "loss,eval/loss,lr,grad_norm,tokens_per_second,mfu,memory,spent"


def make_runs(home: Path, runs: int, points: int) -> None:
    draw, first = random.Random(0), home / "metrics.jsonl"  # noqa: S311
    with first.open("w") as file:
        for step in range(1, points + 1):
            values = {"time": 1.8e9 + step * 0.3, "kind": "train", "step": step, "loss": 2 + 8 / step + draw.random()}
            values |= {"lr": 1e-4, "grad_norm": 1 + draw.random(), "epoch": step / points, "tokens": step * 8192}
            values |= {"tokens_per_second": 14000 + draw.random() * 500, "mfu": 0.4, "data_wait": 0.0}
            file.write(json.dumps({**values, "memory": 2**34, "spent": step * 1e-4, "eta": points - step}) + "\n")
    for number in range(runs):
        folder = home / "runs" / f"run-{number:03d}"
        folder.mkdir(parents=True)
        os.link(first, folder / "metrics.jsonl")
        (folder / "run.yaml").write_text(f"extends: smoke\nname: run-{number:03d}\n")
        status = {"state": "done", "step": points, "total_steps": points, "updated": 1.8e9 + number}
        (folder / "status.json").write_text(json.dumps(status))


class Browser(threading.Thread):
    """Looks at one run for ten seconds, then at another; asks as the page does."""

    def __init__(self, address: str, runs: int, number: int) -> None:
        super().__init__(daemon=True)
        self._address, self._runs, self._draw, self.seconds, self.failed = address, runs, random.Random(number), [], 0  # noqa: S311

    def run(self) -> None:
        with httpx.Client(base_url=self._address, timeout=60) as client:
            while True:
                run, version = f"run-{self._draw.randrange(self._runs):03d}", -1
                for _ in range(5):
                    began = time.monotonic()
                    try:
                        client.get("/api/runs").raise_for_status()
                        found = client.get(f"/api/runs/{run}/series", params={"keys": _KEYS, "version": version}).json()
                        version = found["version"]
                        self.seconds.append(time.monotonic() - began)
                    except (httpx.HTTPError, KeyError, ValueError):
                        self.failed += 1
                    time.sleep(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("runs", 200), ("points", 100_000), ("browsers", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--minutes", type=float, default=1.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        make_runs(home, args.runs, args.points)
        command = [sys.executable, "-m", "sojourn", "board", "--no-browser", "--port", "0"]
        began = time.monotonic()
        board = subprocess.Popen(command, env={**os.environ, "SOJOURN_HOME": name}, stdout=subprocess.PIPE, text=True)
        try:
            address = (board.stdout or sys.stdin).readline().split()[1]
            print(json.dumps(measure(address, board.pid, began, args)))
        finally:
            board.terminate()
            board.wait(30)


def measure(address: str, pid: int, began: float, args: argparse.Namespace) -> dict[str, object]:
    client, process = httpx.Client(base_url=address, timeout=120), psutil.Process(pid)
    figures: dict[str, object] = {"runs": args.runs, "points": args.points}

    def timed(label: str, path: str) -> httpx.Response:
        start = time.monotonic()
        answer = client.get(path)
        figures[label] = round(time.monotonic() - start, 3)
        return answer.raise_for_status()

    client.get("/").raise_for_status()
    figures["start to first page, s"] = round(time.monotonic() - began, 2)
    timed("list of runs, s", "/api/runs")
    ids = ",".join(f"run-{number:03d}" for number in range(min(args.runs, 50)))
    timed("50 sparklines, s", f"/api/sparklines?ids={ids}")
    timed("curves of a run, first time, s", f"/api/runs/run-000/series?keys={_KEYS}")
    size = len(timed("curves of a run again, s", f"/api/runs/run-000/series?keys={_KEYS}").content)
    figures["bytes of its curves"] = size
    browsers = [Browser(address, args.runs, number) for number in range(args.browsers)]
    for browser in browsers:
        browser.start()
    memory = []
    for _ in range(max(3, round(args.minutes * 6))):
        time.sleep(args.minutes * 60 / max(3, round(args.minutes * 6)))
        memory.append(round(process.memory_info().rss / 2**20))
    seconds = sorted(one for browser in browsers for one in browser.seconds)
    figures |= {
        f"MiB over {args.minutes:g} minutes, {args.browsers} browsers": [memory[0], max(memory), memory[-1]],
        "updates": len(seconds), "update p50, s": round(statistics.median(seconds), 3),
        "update p99, s": round(seconds[int(0.99 * (len(seconds) - 1))], 3),
        "failed": sum(one.failed for one in browsers),
    }  # fmt: skip
    return figures


if __name__ == "__main__":
    main()
