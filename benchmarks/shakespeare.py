"""`sojourn train` beside nanoGPT's own train.py at nanoGPT's published CPU setting, a character model of
tinyshakespeare: `python benchmarks/shakespeare.py TEXT NANOGPT`, with a text file and a clone of nanoGPT.

Both train at once, but only one of them runs at any moment: they take turns of a few seconds, the other is stopped
(SIGSTOP). So both see the same machine. A program's clock stands still while it is stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

LAYERS, WIDTH, HEADS, CONTEXT, ROWS, STEPS = 4, 128, 4, 64, 12, 2000
WARM_UP = 10  # steps before throughput is counted


class Program:
    """A training program in a process of its own. `steps`: its running time at the end of each step, in seconds."""

    def __init__(self, name: str, command: list[str], folder: Path, step: str) -> None:
        self.name, self.steps, self._pattern = name, dict[int, float](), re.compile(step)
        self._ran, self._resumed, self.last_line = 0.0, None, ""
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "SOJOURN_HOME": str(folder / "home")}
        self._process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.pause()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def _clock(self) -> float:
        return self._ran + (0.0 if self._resumed is None else time.monotonic() - self._resumed)

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.last_line = line
            if found := self._pattern.match(line):
                self.steps[int(found[1])] = self._clock()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self._ran, self._resumed = self._clock(), None

    def run(self, seconds: float) -> None:
        self._resumed = time.monotonic()
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.pause()

    def figures(self) -> dict[str, float]:
        if self._process.returncode or not self.steps:
            sys.exit(f"{self.name} failed: {self.last_line}")
        first, last = min(step for step in self.steps if step >= WARM_UP), max(self.steps)
        seconds = self.steps[last] - self.steps[first]
        return {
            "tokens_per_second": round((last - first) * ROWS * CONTEXT / seconds),
            "milliseconds_per_step": round(1000 * seconds / (last - first), 2),
            "seconds_until_first_step": round(self.steps[min(self.steps)], 1),
        }


def nanogpt(clone: Path, text: str, folder: Path, steps: int) -> Program:
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    (folder / "configurator.py").symlink_to(clone / "configurator.py")  # read from the working folder
    symbols = sorted(set(text))
    numbers = np.array([symbols.index(symbol) for symbol in text], np.uint16)
    cut = int(0.9 * len(text))
    numbers[:cut].tofile(data / "train.bin")
    numbers[cut:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(symbols)}))
    settings = {
        "device": "cpu", "compile": False, "eval_iters": 20, "eval_interval": 10**6, "log_interval": 1,
        "block_size": CONTEXT, "batch_size": ROWS, "n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH,
        "max_iters": steps, "lr_decay_iters": steps, "dropout": 0.0,
    }  # fmt: skip
    script = [str(clone / "train.py"), str(clone / "config" / "train_shakespeare_char.py")]
    command = [sys.executable, *script, *(f"--{key}={value}" for key, value in settings.items())]
    return Program("nanoGPT", command, folder, r"iter (\d+):")


def sojourn(text: str, folder: Path, steps: int, extra: list[str]) -> Program:
    cut = int(0.9 * len(text))
    (folder / "train.txt").write_text(text[:cut], encoding="utf-8")
    (folder / "val.txt").write_text(text[cut:], encoding="utf-8")
    settings = {
        "data.sources": "train.txt", "data.eval_sources": "val.txt", "data.tokenizer": "char",
        "data.max_length": CONTEXT, "model.num_layers": LAYERS, "model.d_model": WIDTH, "model.num_heads": HEADS,
        "train.global_batch": ROWS, "train.steps": steps, "train.lr": 1e-3, "train.warmup": 100, "train.beta2": 0.99,
        "train.weight_decay": 0.1, "train.device": "cpu",
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "sojourn", "train", "smoke", *words, *extra]
    return Program("Sojourn", command, folder, r"step (\d+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("nanogpt", type=Path, help="a clone of nanoGPT")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--turn", type=float, default=3.0, help="seconds that a program runs at a time")
    parser.add_argument("settings", nargs="*", help="further settings of Sojourn: key=value")
    args = parser.parse_intermixed_args()
    text = args.text.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / "nanogpt", Path(name) / "sojourn"]
        for folder in folders:
            folder.mkdir()
        programs = [
            nanogpt(args.nanogpt.absolute(), text, folders[0], args.steps),
            sojourn(text, folders[1], args.steps, args.settings),
        ]
        while not all(program.is_over for program in programs):
            for program in programs:
                if not program.is_over:
                    program.run(args.turn)
        found = {program.name: program.figures() for program in programs}
    ratio = found["Sojourn"]["tokens_per_second"] / found["nanoGPT"]["tokens_per_second"]
    print(json.dumps({**found, "steps": args.steps, "times nanoGPT": round(ratio, 3)}, indent=1))


if __name__ == "__main__":
    main()
