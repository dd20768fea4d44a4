"""`make bench`: start-up time of the command, preparation, training speed and the demo, on this machine.

Training speed is measured in one run with a plain transformers loop on the same batches.
Writes benchmarks/results/foundation-MACHINE-DATE.json.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def timed_command(*args: str, repeat: int = 7) -> float:
    """Median seconds of a whole `sojourn` call."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run([str(Path(sys.executable).with_name("sojourn")), *args], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return round(statistics.median(times), 3)


def prepare_speed() -> dict[str, Any]:
    from sojourn.config.load import load_run
    from sojourn.data.prepare import prepare

    data = load_run(["demo"]).config.data
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        report = prepare(data, Path(folder)).report["train"]
        seconds = time.perf_counter() - start
    return {"tokens": report["tokens"], "seconds": round(seconds, 2), "fill": report["fill"]}


def train_speed(args: Sequence[str] = ("demo",), rounds: int = 5, steps: int = 10) -> dict[str, Any]:
    """Tokens per second of our step and of a plain transformers loop, in turns on the same batches."""
    import torch

    from sojourn.config.load import load_run
    from sojourn.data.order import step_rows
    from sojourn.data.prepare import prepare
    from sojourn.model.scratch import build_model
    from sojourn.train.batcher import Batcher
    from sojourn.train.build import build_network
    from sojourn.train.distributed.engine import Engine
    from sojourn.train.objective.supervised import Supervised
    from sojourn.train.optim.optimizers import Optimizer
    from sojourn.train.resolve import resolve_here
    from sojourn.train.step import Stepper

    config = resolve_here(load_run([*args, "train.lr=1e-3", "train.device=cpu"]).config).config
    with tempfile.TemporaryDirectory() as folder:
        artefact = prepare(config.data, Path(folder))
        width, pad = artefact.max_length, artefact.pad_id
        network = build_network(config, artefact, "cpu")
        optimizer = Optimizer(network.model, config.train, "cpu")
        optimizer.set_learning_rate(1e-3)
        batcher = Batcher(
            int(config.train.micro_batch),
            width,
            pad,
            "cpu",
            backend=network.attention_backend,
            unpad=network.last_layer_pruned,
        )
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        stepper = Stepper(Engine(network, optimizer, scaler), batcher, Supervised(), config.train.clip)
        plain_batcher = Batcher(config.train.global_batch, width, pad, "cpu")
        plain = build_model(config.model, artefact.vocab_size, width, pad, [0], 0).train()
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

        def our_step(rows: Any) -> int:
            batches = list(batcher.batches(artefact.train, rows))
            stepper.step(batches)
            return sum(batch.real_tokens for batch in batches)

        def plain_step(rows: Any) -> int:
            batch = next(plain_batcher.batches(artefact.train, rows))
            labels = torch.from_numpy(batch.ids).masked_fill(torch.from_numpy(batch.documents) < 0, -100)
            plain(input_ids=torch.from_numpy(batch.ids), labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            return batch.real_tokens

        speeds: dict[str, list[float]] = {"sojourn": [], "transformers": []}
        for turn in range(rounds + 1):
            for name, step in (("sojourn", our_step), ("transformers", plain_step)):
                start, tokens = time.perf_counter(), 0
                for number in range(steps):
                    tokens += step(step_rows(turn * steps + number, len(artefact.train), config.train.global_batch, 0))
                if turn:  # the first round warms up
                    speeds[name].append(tokens / (time.perf_counter() - start))
    medians = {name: round(statistics.median(values)) for name, values in speeds.items()}
    return {"tokens_per_second": medians, "ratio": round(medians["sojourn"] / medians["transformers"], 2)}


def demo(*flags: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "SOJOURN_HOME": folder}
        command = [sys.executable, "-m", "sojourn", "demo", "--json", *flags]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
    return dict(json.loads(done.stdout))


def main() -> None:
    from sojourn.machine.hardware import cpu
    from sojourn.train.metrics.environment import describe_environment

    rows: dict[str, Any] = {}
    for name, measure in (
        ("sojourn --help, seconds", lambda: timed_command("--help")),
        ("sojourn config check small, seconds", lambda: timed_command("config", "check", "small")),
        ("sojourn plan medium, seconds", lambda: timed_command("plan", "medium")),
        ("prepare the demo's data", prepare_speed),
        ("train the demo's model", train_speed),
        ("sojourn demo --fast", lambda: demo("--fast")),
        ("sojourn demo", demo),
    ):
        rows[name] = measure()
        print(f"{name}: {rows[name]}", flush=True)
    facts = {key: value for key, value in describe_environment("cpu").items() if key not in ("command", "device")}
    machine = cpu()
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    result = {
        "command": "make bench",
        "date": date,
        "cpu": machine.model,
        "cores": machine.usable,
        **facts,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"foundation-{machine.model.replace(' ', '_')}-{platform.machine()}-{date}.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
