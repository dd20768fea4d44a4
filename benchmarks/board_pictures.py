"""The pictures of docs/board.md: `SOJOURN_REAL_MODEL=FOLDER python benchmarks/board_pictures.py [NAME…]`.

Runs and the GPU are made up; plans and data are real. The folder has the model of the form of a new run.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT / "tests"))
from board_page import CURVES, running_board  # noqa: E402
from webdriver import Browser, browsing  # noqa: E402

_IMAGES = _ROOT / "docs" / "images"
_QWEN = "Qwen/Qwen2.5-7B-Instruct"
_COMPARED = "#/compare/qwen-lora-r16,qwen-lora-r64,qwen-lora-r64-lr3e-4"
_PLANNED = "document.querySelector('.offers tbody tr')"
_PAGES = {
    "runs": ("#/runs", "document.querySelectorAll('.sparkline path').length >= 5"),
    "run": ("#/run/qwen-lora-r64-lr3e-4", CURVES),
    "new-run": ("#/new", "document.querySelector('.upload input')"),
    "plan": ("#/plan", _PLANNED),
    "data": ("#/data", "document.querySelector('.data-table a')"),
    "compare": (_COMPARED, CURVES),
}
PICTURES = {
    "runs": "light en", "run": "light en", "new-run": "light en", "plan": "light en", "compare": "light en",
    "runs-dark-zh": "dark zh", "run-dark-zh": "dark zh", "plan-dark-zh": "dark zh", "data-dark-zh": "dark zh",
    "runs-phone": "light en", "run-phone-dark-zh": "dark zh", "new-run-phone-zh": "light zh", "plan-phone": "light en",
    "data-phone": "light en", "compare-phone-dark-zh": "dark zh",
}  # fmt: skip
_FILL_IN = """
  const set = (input, value) => {
    input.value = value;
    for (const name of ["input", "change"]) input.dispatchEvent(new Event(name, { bubbles: true }));
  };
  set(document.querySelector(".field span > input"), "smollm2");
  set(document.querySelector(".upload input"), "chats.jsonl");
"""
_SMI = """#!/bin/sh
echo "0, NVIDIA GeForce RTX 4090, 96, 17612, 24564, 67, 402.10"
"""


def make_run(home: Path, name: str, steps: int, total: int, state: str, ago: float, **more: Any) -> None:
    """A LoRA run whose losses fall; `spikes`: at a step."""
    draw, run = random.Random(name), home / "runs" / name  # noqa: S311
    run.mkdir(parents=True)
    lr, speed, low = more.get("lr", 2e-4), more.get("speed", 7300), more.get("low", 1.1)
    method = f"method:\n  kind: {more.get('method', 'lora')}\n  rank: {more.get('rank', 16)}\n"
    train = f"train:\n  lr: {lr}\n  steps: {total}\nlimits:\n  budget: ¥30\n"
    (run / "run.yaml").write_text(f"extends: lora-20k\nname: {name}\nmodel:\n  base: {_QWEN}\n{method}{train}")
    lines, ends = [], time.time() - ago
    for step in range(4, steps + 1, 4):
        loss = low + 2.1 * math.exp(-step / 260) + draw.gauss(0, 0.06) + (1.7 if step == more.get("spike") else 0)
        rate = lr * min(1, step / 90) * (0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * step / total)))
        norm = 0.9 + abs(draw.gauss(0, 0.1)) + (5 if step == more.get("spike") else 0)
        values = {"time": ends - (steps - step) * 2.1, "kind": "train", "step": step, "loss": loss, "lr": rate}
        values |= {"grad_norm": norm, "tokens": step * 15_800, "tokens_per_second": speed + draw.gauss(0, 120)}
        values |= {"mfu": speed / 14_600, "memory": 17 * 2**30, "spent": step * 0.00109, "projected": total * 0.00109}
        lines.append({**values, "eta": (total - step) * 2.1})
        if step % 200 == 0:
            lines.append(
                {
                    "time": lines[-1]["time"],
                    "kind": "eval",
                    "step": step,
                    "loss": low + 0.05 + 1.9 * math.exp(-step / 300),
                }
            )
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [{"kind": "saved", "step": step, "seconds": 3.2} for step in range(200, steps, 200)]
    events += [
        {"kind": "out_of_memory", "step": 248, "now": "micro batch 2"},
        {"kind": "spike", "step": more.get("spike", 0), "loss": 2.9},
    ]
    (run / "events.jsonl").write_text(
        "".join(json.dumps({"time": ends, **one}) + "\n" for one in events if one["step"])
    )
    from sojourn.machine.process import start_time

    status = {"state": state, "step": steps, "total_steps": total, "updated": ends, "message": more.get("message", ""),
              "pid": os.getpid(), "started": start_time(os.getpid())}  # fmt: skip
    (run / "status.json").write_text(json.dumps(status))
    (run / "ledger.json").write_text(json.dumps({"seconds": steps * 2.1, "money": steps * 0.00109, "currency": "CNY"}))


def make_home(home: Path) -> None:
    make_run(home, "qwen-lora-r16", 3000, 3000, "done", 61_200, spike=1104)
    make_run(home, "qlora-7b-chats", 900, 2400, "failed", 40_000, method="qlora", speed=6400, low=1.0,
             message="NaN loss in 11 steps in a row; a lower train.lr may help")  # fmt: skip
    make_run(home, "qwen-lora-r64", 1850, 3000, "stopped", 18_000, rank=64, lr=1e-4, low=1.08)
    make_run(home, "qwen-lora-r64-lr3e-4", 1240, 3000, "running", 2, rank=64, lr=3e-4, spike=1104)
    (home / "board").mkdir()
    (home / "board" / "tags.json").write_text(json.dumps({"qwen-lora-r16": ["baseline"]}))
    (home / "bin").mkdir()
    (home / "bin" / "nvidia-smi").write_text(_SMI)
    (home / "bin" / "nvidia-smi").chmod(0o755)
    words = ["train", "smoke", "name=first", "train.steps=60", "train.device=cpu", "log.every_steps=1"]
    environment = {**os.environ, "SOJOURN_HOME": str(home)}
    subprocess.run([sys.executable, "-m", "sojourn", *words], env=environment, check=True, stdout=subprocess.DEVNULL)
    (home / "smollm2").symlink_to(os.environ["SOJOURN_REAL_MODEL"])
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in _chats()]
    (home / "chats.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    words = ["prepare", "smoke", "data.sources=chats.jsonl", "data.max_length=256"]
    subprocess.run(
        [sys.executable, "-m", "sojourn", *words], env=environment, cwd=home, check=True, stdout=subprocess.DEVNULL
    )


def _chats() -> list[tuple[str, str]]:
    pairs = [(f"What is {n} plus {n % 7}?", f"{n} plus {n % 7} is {n + n % 7}.") for n in range(400)]
    pairs += [(f"{n} 加 {n % 5} 等于多少？", f"{n} 加 {n % 5} 等于 {n + n % 5}。") for n in range(300)]
    return pairs + pairs[10:14] + pairs[500:502]


def take(browser: Browser, board: str, name: str, style: str) -> None:
    theme, language = style.split()
    page = next(page for page in sorted(_PAGES, key=len, reverse=True) if name.startswith(page))
    address, ready = _PAGES[page]
    browser.size(*((390, 844) if "phone" in name else (1280, 860)))
    browser.dark(theme == "dark")
    browser.open(f"{board}/page/icon.svg")
    browser.js("localStorage.setItem('sojourn.language', arguments[0])", language)
    browser.open(f"{board}/{address}")
    browser.wait(ready, seconds=60)
    if page == "new-run":
        browser.js(_FILL_IN)
        browser.wait("document.querySelector('.example') && document.querySelector('.memory')", seconds=60)
    if page == "data":
        browser.click(".data-table a")
        browser.wait("document.querySelector('.example mark')")
    time.sleep(2)  # sparklines, charts that fade in
    browser.screenshot(_IMAGES / f"board-{name}.png")
    print(f"board-{name}.png")


def main() -> None:
    wanted = sys.argv[1:] or list(PICTURES)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        make_home(home)
        environment = {**os.environ, "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
        with running_board(home, env=environment) as board, browsing(home) as browser:
            for name in wanted:
                take(browser, board, name, PICTURES[name])


if __name__ == "__main__":
    main()
