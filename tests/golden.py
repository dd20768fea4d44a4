"""Records or reads the demo's first losses, by machine type. `python tests/golden.py` records this machine's."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 20
FILE = Path(__file__).with_name("golden.json")


def machine_type() -> str:
    import torch

    from sojourn.machine.hardware import cpu

    return f"{platform.machine()} · {cpu().model} · torch {torch.__version__} · {torch.get_num_threads()} threads"


def new_process(args: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "sojourn", *args], env=env, stdout=subprocess.DEVNULL)


def demo_losses(home: Path, start: Callable[[list[str], dict[str, str]], Any] = new_process) -> list[float]:
    """Starts the demo's own training and kills it once the steps are there."""
    # Without the CPU kernels, which a machine has only with gcc.
    args = ["train", "demo", "log.every_steps=1", "log.tensorboard=off", "train.device=cpu", "advanced.cpu_kernels=off"]
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    env |= {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that wait beside other tests use no CPU time
    process = start(args, {**env, "SOJOURN_HOME": str(home)})
    from sojourn.run.folder import RunFolder

    run = RunFolder(home / "runs" / "demo")
    try:
        while len(found := [line["loss"] for line in run.read_metrics()]) < STEPS:
            if process.poll() is not None:
                raise RuntimeError("the demo's training ended early")
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    return found[:STEPS]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        losses = demo_losses(Path(folder))
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    FILE.write_text(
        json.dumps({**known, machine_type(): losses}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    print(f"{machine_type()}: {losses[0]:.4f} … {losses[-1]:.4f}")
