"""Other programs that do the same work, for `sojourn bench train` and `sojourn bench prepare`.

`sojourn.bench.peers` imports this package where the repository is at hand. Each peer runs in its own process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sojourn.bench.train.bench_row import REFERENCE, BenchRow
from sojourn.bench.train.workloads import Workload


def training_peers(workload: Workload, device: str) -> list[BenchRow]:
    """The reference first."""
    return _pretraining_peers(workload, device) if workload.method == "pretrain" else _tuning_peers(workload, device)


def _pretraining_peers(workload: Workload, device: str) -> list[BenchRow]:
    on_gpu = device == "cuda"
    rows = [BenchRow(REFERENCE, "transformers", "transformers")]
    if on_gpu:
        rows += [
            BenchRow("transformers-compiled", "transformers, compiled", "transformers", {"compile": True}),
            BenchRow("liger", "Liger", "liger", needs=("liger_kernel",)),
        ]
    rows.append(BenchRow("plain", "a Llama of 70 lines of torch", "plain", {"compile": on_gpu}))
    if workload.documents == "long":
        title = "nanoGPT's GPT-2 of that size"
        rows.append(BenchRow("nanogpt", title, "nanogpt", {"compile": on_gpu}, different_model=True))
    return rows


def _tuning_peers(workload: Workload, device: str) -> list[BenchRow]:
    on_gpu = device == "cuda"
    needs = {"lora": ("peft",), "qlora": ("peft", "bitsandbytes")}.get(workload.method, ())
    suffix, settings = "", {}
    if workload.activation_checkpointing:
        suffix, settings = ", checkpointing", {"gradient_checkpointing": True}
    padded = {"padded_documents": 8}
    rows = [BenchRow(REFERENCE, f"transformers, padded{suffix}", "transformers", {**padded, **settings}, needs)]
    if on_gpu:
        liger = ("liger_kernel", *needs)
        rows.append(BenchRow("liger", f"Liger, packed{suffix}", "liger", settings, liger))
        if workload.activation_checkpointing and workload.has_adapters:
            rows.append(BenchRow("liger-no-checkpointing", "Liger, packed, no checkpointing", "liger", {}, liger))
    rows.append(BenchRow("trl", f"TRL, packed{suffix}", "trl", settings, ("trl", *needs)))
    if on_gpu:
        rows.append(BenchRow("unsloth", "Unsloth, padded", "unsloth", padded, ("unsloth", *needs)))
    return rows


def train_main() -> None:
    """Entry point of one training peer's process: argv[1] is the task as JSON."""
    from benchmarks.peers.harness import PeerTask

    task = PeerTask(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(task.out).write_text(json.dumps(_train(task)), encoding="utf-8")


def _train(task: Any) -> dict[str, Any]:
    from benchmarks.peers import hugging_face, nanogpt, plain_llama, trl_sft

    return {
        "transformers": hugging_face.run_transformers, "liger": hugging_face.run_liger,
        "unsloth": hugging_face.run_unsloth, "trl": trl_sft.run_trl, "plain": plain_llama.run_plain,
        "nanogpt": nanogpt.run_nanogpt,
    }[task.runner](task)  # fmt: skip


def prepare_with_datasets(task: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.peers.datasets_map import prepare_with_datasets as prepare

    return prepare(task)
