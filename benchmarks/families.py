"""Every family with fused forwards beside transformers' own layers: `python -m benchmarks.families [FAMILY…]`.

For each family and method: milliseconds of forward+backward with transformers' layers under our attention, with fused
forwards, with these replayed as a CUDA graph, and the error of loss and gradients against fp32. Weights are random.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sojourn.catalog.fused_families import FUSED_FAMILIES
from sojourn.data.artefact import Batch
from sojourn.model.kernels.fused_forwards import apply_fused_forwards
from sojourn.model.network import Network, wrap_model
from sojourn.train.batcher import Batcher
from sojourn.train.cuda_graphs import CudaGraphs
from sojourn.train.objective.supervised import Supervised

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, LENGTH, DOCUMENTS = (4, 2048, 5) if DEVICE == "cuda" else (2, 64, 3)
LAYERS = 4
PASSES, WARMUP = (10, 6) if DEVICE == "cuda" else (1, 0)
SIZES = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 4096,
} if DEVICE == "cuda" else {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
WINDOW = LENGTH // 8
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "phi3": {"sliding_window": None},
}
IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, num_hidden_layers=LAYERS, **IDS, **CHANGES.get(family, {}))
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def make_batch(seed: int) -> Batch:
    random = np.random.default_rng(seed)
    ids = random.integers(0, SIZES["vocab_size"], (ROWS, LENGTH + 1))
    ends = np.sort(random.choice(np.arange(8, LENGTH - 8), (ROWS, DOCUMENTS - 1)), axis=1)
    documents = (np.arange(LENGTH)[None, :, None] >= ends[:, None, :]).sum(-1).astype(np.int32)
    starts = np.concatenate([np.zeros((ROWS, 1), np.int64), ends], 1)
    positions = np.arange(LENGTH)[None] - np.take_along_axis(starts, documents.astype(np.int64), 1)
    return Batch(ids[:, :-1], ids[:, 1:], positions, documents)


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model.to(torch.bfloat16), LoraConfig(r=16, target_modules="all-linear"))


def milliseconds(run: Callable[[Batch], object]) -> float:
    times = []
    for number in range(WARMUP + PASSES):
        batch = make_batch(number)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run(batch)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            run(batch)
            times.append(0.0)
    return statistics.median(times[WARMUP:])


def loss_and_gradients(network: Network, batcher: Batcher) -> tuple[float, dict[str, torch.Tensor]]:
    with batcher.autocast():
        loss = Supervised().loss_sum(network, batcher.to_device(make_batch(0)))
    loss.backward()
    found = {name: p.grad.float() for name, p in network.model.named_parameters() if p.grad is not None}
    network.model.zero_grad(set_to_none=True)
    return float(loss.detach()), found


def error(found: tuple[float, dict[str, torch.Tensor]], wanted: tuple[float, dict[str, torch.Tensor]]) -> list[float]:
    """Of the loss, and the largest of a gradient."""
    worst = max(float((found[1][n] - g).norm() / (g.norm() + 1e-12)) for n, g in wanted[1].items())
    return [abs(found[0] / wanted[0] - 1), worst]


def measure(family: str, lora: bool) -> dict[str, Any]:
    backend = "varlen" if DEVICE == "cuda" else "sdpa"
    base, row = make_model(family), {"family": family, "method": "lora" if lora else "full"}
    found = {}
    for name in ("fp32", "plain", "fused"):
        model = with_lora(deepcopy(base)) if lora else deepcopy(base)
        model = model.float() if name == "fp32" else model
        network = wrap_model(model, "math" if name == "fp32" else backend, torch.bfloat16 if name == "fused" else None)
        if name == "fused":
            apply_fused_forwards(network.base_model)
        precision = "fp32" if name == "fp32" else "bf16"
        batcher = Batcher(
            ROWS, LENGTH, 0, DEVICE, precision, backend=network.attention_backend, windows=network.sliding_windows
        )
        found[name] = loss_and_gradients(network, batcher)
        if name == "fp32":
            continue
        row[f"{name}_error"] = error(found[name], found["fp32"])
        row[f"{name}_ms"] = milliseconds(lambda batch, n=network, b=batcher: eager(n, b, batch))
        if name == "fused" and DEVICE == "cuda":
            row |= measure_graphs(network, batcher)
    return row


def eager(network: Network, batcher: Batcher, batch: Batch) -> None:
    network.model.zero_grad(set_to_none=True)
    with batcher.autocast():
        loss = Supervised().loss_sum(network, batcher.to_device(batch))
    loss.backward()


def measure_graphs(network: Network, batcher: Batcher) -> dict[str, Any]:
    parameters = [p for p in network.model.parameters() if p.requires_grad]

    def loss_sum(batch: Any) -> torch.Tensor:
        with batcher.autocast():
            return Supervised().loss_sum(network, batch)

    graphs = CudaGraphs(loss_sum, parameters)
    differences = []

    def run(batch: Batch) -> None:
        network.model.zero_grad(set_to_none=True)
        loss, ready = graphs.run(batcher.to_device(batch), 1.0, is_only=True)
        if loss is None:
            loss_sum(ready).backward()
        elif len(differences) < PASSES:
            with torch.no_grad():
                differences.append(abs(float(loss) / float(loss_sum(batcher.to_device(batch))) - 1))

    for number in range(WARMUP + PASSES):
        run(make_batch(number))
    return {"graph_ms": milliseconds(run), "captured": graphs.has_graphs, "graph_error": max(differences, default=None)}


def main() -> None:
    for family in sys.argv[1:] or FUSED_FAMILIES:
        for lora in (False, True):
            row = measure(family, lora)
            shown = {k: [float(f"{x:.2g}") for x in v] if isinstance(v, list) else v for k, v in row.items()}
            print(json.dumps(shown), flush=True)
            if DEVICE == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
