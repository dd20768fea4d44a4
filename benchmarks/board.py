"""The board with many long runs, as browsers see it: first paint, curves, live updates, and memory over an hour.

    python benchmarks/board.py [--runs 200] [--points 100000] [--minutes 1] [--browsers 5]

Writes benchmarks/results/board-CPU-DATE.json. The runs share one metrics.jsonl (hard links), so that the disk needs
little; the board reads each as a file of its own. A few more runs go on while it is measured: a line a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
import psutil

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT / "tests"))
from webdriver import Browser, browsing  # noqa: E402

_KEYS = "loss,eval/loss,lr,grad_norm,tokens_per_second,mfu,memory,spent"
_LIVE = 3  # runs that go on
_LOOK_SECONDS = 12.0  # that a browser stays at a page
_SAMPLE_SECONDS = 10.0
_MARK_TABLE = """
  new MutationObserver((_, observer) => {
    if (!document.querySelector(".run-name")) return;
    observer.disconnect();
    requestAnimationFrame(() => setTimeout(() => performance.mark("table")));
  }).observe(document, { childList: true, subtree: true });
"""
_PAINTS = "return ['first-contentful-paint', 'table'].map((one) => performance.getEntriesByName(one)[0].startTime)"


# -- Runs --


def metric(step: int, points: int, draw: random.Random) -> str:
    values = {"time": 1.8e9 + step * 0.3, "kind": "train", "step": step, "loss": 2 + 8 / step + draw.random()}
    values |= {"lr": 1e-4, "grad_norm": 1 + draw.random(), "epoch": step / points, "tokens": step * 8192}
    values |= {"tokens_per_second": 14000 + draw.random() * 500, "mfu": 0.4, "data_wait": 0.0}
    return json.dumps({**values, "memory": 2**34, "spent": step * 1e-4, "eta": points - step}) + "\n"


def make_runs(home: Path, runs: int, points: int) -> None:
    draw, first = random.Random(0), home / "metrics.jsonl"  # noqa: S311
    with first.open("w") as file:
        file.writelines(metric(step, points, draw) for step in range(1, points + 1))
    for number in range(runs):
        folder = _make_run(
            home, f"run-{number:03d}", {"state": "done", "step": points, "updated": 1.8e9 + number}, points
        )
        os.link(first, folder / "metrics.jsonl")


def _make_run(home: Path, name: str, status: dict[str, Any], points: int) -> Path:
    folder = home / "runs" / name
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(f"extends: smoke\nname: {name}\n")
    (folder / "status.json").write_text(json.dumps({"total_steps": points, **status}))
    return folder


class Training(threading.Thread):
    """Runs that go on: each gets a line a second."""

    def __init__(self, home: Path, points: int) -> None:
        super().__init__(daemon=True)
        from sojourn.machine.process import start_time

        self._points, self._ended, self._draw = points, threading.Event(), random.Random(1)  # noqa: S311
        self._status = {"state": "running", "pid": os.getpid(), "started": start_time(os.getpid())}
        self._folders = [_make_run(home, f"live-{number}", self._status, points) for number in range(_LIVE)]

    def run(self) -> None:
        step = 0
        while not self._ended.wait(1.0):
            step += 1
            for folder in self._folders:
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(metric(step, self._points, self._draw))
                status = {**self._status, "step": step, "total_steps": self._points, "updated": time.time()}
                (folder / ".status.json").write_text(json.dumps(status))
                (folder / ".status.json").replace(folder / "status.json")

    def end(self) -> None:
        self._ended.set()
        self.join()


# -- A board and browsers --


@contextlib.contextmanager
def running_board(home: Path) -> Iterator[tuple[str, int, float]]:
    """Its address, its pid, and the seconds until it listened."""
    command = [sys.executable, "-m", "sojourn", "board", "--no-browser", "--port", "0"]
    began = time.monotonic()
    board = subprocess.Popen(command, env={**os.environ, "SOJOURN_HOME": str(home)}, stdout=subprocess.PIPE, text=True)
    try:
        yield (board.stdout or sys.stdin).readline().split()[1].rstrip("/"), board.pid, time.monotonic() - began
    finally:
        board.terminate()
        board.wait(30)


def first_paint(home: Path) -> dict[str, float]:
    """Of a board that has just started, in a browser that has never seen it; then of the same page again."""
    with browsing(home) as browser, running_board(home) as (address, _, listening):
        httpx.get(f"{address}/health", timeout=60)  # its imports are not the page's
        browser.cdp("Page.addScriptToEvaluateOnNewDocument", source=_MARK_TABLE)
        figures = {"sojourn board until it listens, s": round(listening, 2)}
        for label in ("", " again"):
            browser.open("about:blank")
            browser.open(f"{address}/#/runs")
            browser.wait("performance.getEntriesByName('table').length", seconds=60)
            paint, table = browser.js(_PAINTS)
            figures[f"first paint{label}, s"] = round(paint / 1000, 2)
            figures[f"table of all runs shown{label}, s"] = round(table / 1000, 2)
        return figures


class Visitor(threading.Thread):
    """A browser of its own that looks at one page after another. `heaps`: MiB of its JavaScript."""

    def __init__(self, address: str, home: Path, runs: int, number: int, until: float) -> None:
        super().__init__(daemon=True)
        self._address, self._home, self._until = address, home, until
        self._draw, self._runs = random.Random(number), runs  # noqa: S311
        self.pages, self.heaps, self.errors = 0, list[float](), list[str]()

    def run(self) -> None:
        try:
            with browsing(self._home) as browser:
                while time.monotonic() < self._until:
                    self._look(browser)
        except Exception as error:  # the figures name it
            self.errors.append(f"{type(error).__name__}: {error}"[:300])

    def _look(self, browser: Browser) -> None:
        names = [f"run-{self._draw.randrange(self._runs):03d}" for _ in range(3)]
        drawn = "document.querySelectorAll('.chart .line').length > 2"
        address, ready = self._draw.choice((
            ("#/runs", "document.querySelector('.run-name')"), (f"#/run/{names[0]}", drawn),
            (f"#/run/live-{self._draw.randrange(_LIVE)}", drawn), (f"#/compare/{','.join(names)}", drawn),
            ("#/plan", "document.querySelector('.offers tbody tr')"),
            ("#/data", "document.querySelector('.page-head')"),
        ))  # fmt: skip
        if self.pages == 0:
            browser.open(f"{self._address}/{address}")
        else:
            browser.js("location.hash = arguments[0]", address)
        browser.wait(ready, seconds=60)
        self.pages += 1
        time.sleep(min(_LOOK_SECONDS, max(0.0, self._until - time.monotonic())))
        self.errors += browser.log()
        self.heaps.append(browser.js("return performance.memory.usedJSHeapSize") / 2**20)


def visit(address: str, pid: int, home: Path, runs: int, browsers: int, minutes: float) -> dict[str, Any]:
    """`browsers` of them for `minutes`: the board's memory, how fast it answers meanwhile, and what failed."""
    process, until = psutil.Process(pid), time.monotonic() + minutes * 60
    visitors = [Visitor(address, home, runs, number, until) for number in range(browsers)]
    for visitor in visitors:
        visitor.start()
    memory, seconds, threads = list[int](), list[float](), list[int]()
    with httpx.Client(base_url=address, timeout=60) as client:
        while time.monotonic() < until:
            began = time.monotonic()
            client.get("/api/runs").raise_for_status()
            client.get("/api/runs/live-0/series", params={"keys": _KEYS}).raise_for_status()
            seconds.append(time.monotonic() - began)
            memory.append(round(process.memory_info().rss / 2**20))
            threads.append(process.num_threads())
            time.sleep(max(0.0, min(_SAMPLE_SECONDS, until - time.monotonic())))
    for visitor in visitors:
        visitor.join(120)
    seconds.sort()
    every = max(1, len(memory) // 12)
    return {
        "minutes": minutes, "browsers": browsers, "pages looked at": sum(one.pages for one in visitors),
        "board, MiB": memory[::every], "board, MiB, largest": max(memory), "board, threads, most": max(threads),
        "growth in the last third, MiB": growth(memory),
        "pages, MiB of JavaScript, largest": round(max(heap for one in visitors for heap in one.heaps), 1),
        "pages, MiB of JavaScript, at the end": [round(one.heaps[-1], 1) for one in visitors if one.heaps],
        "update p50, s": round(statistics.median(seconds), 3),
        "update p99, s": round(seconds[math.ceil(0.99 * len(seconds)) - 1], 3),
        "errors": [error for one in visitors for error in one.errors],
    }  # fmt: skip


def growth(memory: list[int]) -> int:
    """MiB by which the last third is larger than the second."""
    third = max(1, len(memory) // 3)
    return max(memory[-third:]) - max(memory[third : 2 * third] or memory)


def ask(address: str, runs: int) -> dict[str, float]:
    """Single requests."""
    figures: dict[str, float] = {}
    with httpx.Client(base_url=address, timeout=120) as client:

        def timed(label: str, path: str) -> httpx.Response:
            start = time.monotonic()
            answer = client.get(path)
            figures[label] = round(time.monotonic() - start, 3)
            return answer.raise_for_status()

        client.get("/health")  # its imports
        timed("list of runs, s", "/api/runs")
        ids = "&".join(f"id=run-{number:03d}" for number in range(min(runs, 50)))
        timed("50 sparklines, s", f"/api/sparklines?{ids}")
        timed("curves of a run, first time, s", f"/api/runs/run-000/series?keys={_KEYS}")
        figures["bytes of its curves"] = len(
            timed("curves of a run again, s", f"/api/runs/run-000/series?keys={_KEYS}").content
        )
    return figures


def measure(home: Path, runs: int, points: int, minutes: float, browsers: int) -> dict[str, Any]:
    make_runs(home, runs, points)
    figures: dict[str, Any] = {
        "runs": runs,
        "points": points,
        "load before": round(os.getloadavg()[0], 1),
        **first_paint(home),
    }
    training = Training(home, points)
    training.start()
    try:
        with running_board(home) as (address, pid, _):
            figures |= ask(address, runs)
            figures |= visit(address, pid, home, runs, browsers, minutes)
    finally:
        training.end()
    return {**figures, "load after": round(os.getloadavg()[0], 1)}


def save(figures: dict[str, Any]) -> Path:
    now = datetime.now(timezone.utc)
    path = _ROOT / "benchmarks/results" / f"board-CPU-{now:%Y-%m-%d}.json"
    known = (
        json.loads(path.read_text())
        if path.exists()
        else {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "runs": []}
    )
    known["runs"].append({"time": f"{now:%Y-%m-%d %H:%M} UTC", **figures})
    path.write_text(json.dumps(known, indent=1) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("runs", 200), ("points", 100_000), ("browsers", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--minutes", type=float, default=1.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = measure(Path(name), args.runs, args.points, args.minutes, args.browsers)
    print(json.dumps(figures, indent=1))
    print(f"{save(figures)} written")


if __name__ == "__main__":
    main()
