"""The board's page for tests: run folders, a real `sojourn board`, and ways to press its buttons."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from webdriver import Browser, chromium

in_browser = pytest.mark.skipif(chromium() is None, reason="no chromium and chromedriver; make packages installs them")
LONG = 180.0  # seconds that a training process may take to start on a busy machine
CURVES = "document.querySelectorAll('.chart .line').length > 2"


def metric(step: int, **more: Any) -> str:
    values = {
        "time": 1.7e9 + 2 * step, "kind": "train", "step": step, "loss": 1 + 3 * math.exp(-step / 200), "lr": 1e-4,
        "grad_norm": 0.5, "tokens": 64 * step, "tokens_per_second": 1000 + step % 7, "memory": 3 << 30,
        "spent": step / 1000,
    }  # fmt: skip
    return json.dumps({**values, **more}) + "\n"


def write_run(home: Path, name: str, steps: int, state: str = "stopped", **more: Any) -> Path:
    """A run folder as a run leaves it."""
    run = home / "runs" / name
    run.mkdir(parents=True)
    (run / "run.yaml").write_text(f"extends: smoke\nname: {name}\ntrain:\n  seed: {len(name)}\n")
    status = {"state": state, "step": steps, "total_steps": 2000, "pid": 1, "started": 0.5, "updated": time.time()}
    (run / "status.json").write_text(json.dumps(status))
    (run / "ledger.json").write_text(json.dumps({"seconds": 60.0, "money": 0.25, "currency": "CNY"}))
    (run / "metrics.jsonl").write_text("".join(metric(step, **more) for step in range(1, steps + 1)))
    events = [{"kind": "saved", "step": 40}, {"kind": "spike", "step": 60, "loss": 9.0}]
    (run / "events.jsonl").write_text("".join(json.dumps({"time": 1.7e9, **one}) + "\n" for one in events))
    return run


@contextmanager
def running_board(home: Path, port: int = 0, env: dict[str, str] | None = None) -> Iterator[str]:
    environment = {**(os.environ if env is None else env), "SOJOURN_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sojourn", "board", "--no-browser", "--port", str(port)]
    board = subprocess.Popen(command, env=environment, cwd=home, stdout=subprocess.PIPE, text=True)
    try:
        assert board.stdout is not None
        yield next(match[1] for line in board.stdout if (match := re.search(r"(http://\S+?)/? ", line)))
    finally:
        board.terminate()
        board.wait(20)


def show(page: Browser, board: str, address: str, ready: str) -> None:
    page.open("about:blank")
    page.open(f"{board}/{address}")
    page.wait(ready)


def last_loss(page: Browser) -> str:
    return str(page.js("return document.querySelector('.chart').getAttribute('aria-label')"))


def change(page: Browser, selector: str, value: str, event: str = "input") -> None:
    script = (
        "const one = document.querySelector(arguments[0]); one.value = arguments[1]; "
        "one.dispatchEvent(new Event(arguments[2], { bubbles: true }))"
    )
    page.js(script, selector, value, event)


def press(page: Browser, text: str, inside: str = "body") -> None:
    """A button or a link by what is written on it."""
    script = (
        "const all = [...document.querySelectorAll(`${arguments[1]} :is(button, a)`)];"
        "const named = all.filter(one => one.checkVisibility() && one.textContent.trim() === arguments[0]);"
        "const one = named.find(one => !one.disabled);"
        "one?.click(); return Boolean(one)"
    )
    ends = time.monotonic() + 30
    while not page.js(script, text, inside):
        assert time.monotonic() < ends, f"no button {text!r}: {page.text('body')[:600]}"
        time.sleep(0.05)


def confirm(page: Browser, line: str) -> None:
    """The dialog shows the line that it will start."""
    page.wait("!document.querySelector('dialog[open] .primary')?.disabled ?? false")
    page.wait("document.getElementById('dialog-line').textContent.includes(arguments[0])", line)
    page.click("#dialog .primary")
    page.wait("!document.querySelector('dialog[open]')")
