"""What bf16 weights and 8-bit optimizer states cost in quality: a small new Llama trained on bytes of text, once for
each combination and seed, all with the same rows.

    python benchmarks/small_memory_quality.py --text FILE [FILE ...] --size 110m --steps 300 --seeds 4

Prints the loss of held-out rows after the last step, as mean and standard error over the seeds, and the difference to
fp32 weights with fp32 states, seed by seed. `--size tiny --steps 5 --rows 2 --length 64 --eval-rows 2` runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sojourn.config.schema import TrainConfig
from sojourn.data.artefact import Batch
from sojourn.model.kernels.fused_forwards import apply_fused_forwards
from sojourn.model.network import wrap_model
from sojourn.train.batcher import Batcher
from sojourn.train.distributed.engine import Engine
from sojourn.train.objective.supervised import Supervised
from sojourn.train.optim.optimizers import Optimizer, learning_rate
from sojourn.train.step import Stepper

SIZES = {"tiny": (64, 2), "20m": (448, 8), "50m": (640, 10), "110m": (768, 16)}  # width, layers
VARIANTS = [f"{masters},{states}" for masters in ("fp32", "bf16", "bf16_kahan") for states in ("adamw", "adamw_8bit")]
HELD_OUT = 0.05  # of the text, its end
EVAL_BATCH = 2


def main() -> None:
    arguments = parse()
    text = np.concatenate([np.fromfile(file, np.uint8) for file in arguments.text])
    train_text, held_out = np.split(text, [int(len(text) * (1 - HELD_OUT))])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"{len(text):,} bytes; {arguments}; {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}", flush=True
    )
    found: dict[str, list[float]] = {}
    for seed in range(arguments.seeds):
        for masters, states in (variant.split(",") for variant in arguments.variants):
            began = time.monotonic()
            loss, parameters = train(arguments, masters, states, seed, train_text, held_out, device)
            found.setdefault(f"{masters},{states}", []).append(loss)
            seconds = time.monotonic() - began
            print(
                f"seed {seed}: {masters:10} {states:10} {loss:.5f}  ({parameters:,} parameters, {seconds:.0f} s)",
                flush=True,
            )
    show(found)
    if arguments.out:
        arguments.out.write_text(json.dumps({"arguments": vars(arguments), "losses": found}, default=str, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--size", choices=SIZES, default="20m")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--eval-rows", type=int, default=128)
    parser.add_argument("--out", type=Path, help="a JSON file with every loss")
    return parser.parse_args()


def train(
    arguments: argparse.Namespace, masters: str, states: str, seed: int, text: np.ndarray, held_out: np.ndarray,
    device: str,
) -> tuple[float, int]:  # fmt: skip
    """The held-out loss, and the number of parameters."""
    settings = TrainConfig(
        steps=arguments.steps, global_batch=arguments.rows, micro_batch=arguments.rows, optimizer=states,
        master_weights=masters, lr=arguments.lr, precision="bf16", seed=seed,
    )  # fmt: skip
    stepper = make_stepper(settings, arguments.size, arguments.rows, arguments.length, device)
    for step in range(arguments.steps):
        stepper.engine.set_learning_rate(learning_rate(step, arguments.steps, settings))
        stepper.step([rows_of(text, arguments.rows, arguments.length, [seed, step])])
    evaluated = [
        rows_of(held_out, EVAL_BATCH, arguments.length, [1, number])
        for number in range(arguments.eval_rows // EVAL_BATCH)
    ]
    with torch.no_grad():
        losses = [float(loss_of(stepper, batch)) / batch.labels.size for batch in evaluated]
    return statistics.fmean(losses), sum(p.numel() for p in stepper.network.model.parameters())


def make_stepper(settings: TrainConfig, size: str, rows: int, length: int, device: str) -> Stepper:
    width, layers = SIZES[size]
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, intermediate_size=-(-8 * width // 3 // 64) * 64,
        max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model = model.to(device, torch.float32 if settings.master_weights == "fp32" else torch.bfloat16)
    network = wrap_model(model, "varlen" if device == "cuda" else "sdpa", torch.bfloat16)
    apply_fused_forwards(network.base_model)
    model.train()
    batcher = Batcher(rows, length, 0, device, "bf16", backend=network.attention_backend)
    engine = Engine(network, Optimizer(model, settings, device), torch.amp.GradScaler(device, enabled=False))
    return Stepper(engine, batcher, Supervised(), settings.clip)


def rows_of(text: np.ndarray, rows: int, length: int, seed: list[int]) -> Batch:
    """Rows from anywhere in the text, each one document."""
    starts = np.random.default_rng(seed).integers(0, len(text) - length - 1, rows)
    ids = np.stack([text[start : start + length] for start in starts]).astype(np.int64)
    labels = np.stack([text[start + 1 : start + length + 1] for start in starts]).astype(np.int64)
    positions = np.broadcast_to(np.arange(length), ids.shape).copy()
    return Batch(ids, labels, positions, np.zeros(ids.shape, np.int32))


def loss_of(stepper: Stepper, batch: Batch) -> Any:
    with stepper.batcher.autocast():
        return stepper.objective.loss_sum(stepper.network, stepper.batcher.to_device(batch))


def show(found: dict[str, list[float]]) -> None:
    reference = found[VARIANTS[0]]
    print(f"{'weights, states':24} {'loss':>9} {'±':>8}   difference")
    for name, losses in found.items():
        relative = [100 * (loss / best - 1) for loss, best in zip(losses, reference, strict=True)]
        difference = f"{statistics.fmean(relative):+.3f} % ± {error(relative):.3f}"
        print(f"{name:24} {statistics.fmean(losses):9.5f} {error(losses):8.5f}   {difference}")


def error(values: list[float]) -> float:
    """The standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


if __name__ == "__main__":
    main()
