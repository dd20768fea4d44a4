"""The rows of a workload's table: our own, each with one optimisation more than the row before, and the peers."""

from __future__ import annotations

from sojourn.bench.peers import load_peers
from sojourn.bench.train.bench_row import OURS, BenchRow
from sojourn.bench.train.workloads import Workload
from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import UserError

_MAX_FP32_PARAMETERS = 1_000_000_000

_BASELINE = {
    "train.precision": "fp32", "train.attention": "sdpa", "train.compile": "off", "train.optimizer": "adamw",
    "train.activation_checkpointing": "off", "train.offload": "off", "train.fp8": "off", "train.cuda_graphs": "off",
    "advanced.chunked_loss": "off", "advanced.fused_forwards": "off", "advanced.async_step": "off",
    "advanced.hopper_kernels": "off",
}  # fmt: skip
_SECTION = {key.split(".")[1]: key.split(".")[0] for key in _BASELINE}


def bench_rows(workload: Workload, device: str) -> list[BenchRow]:
    """The reference first, so that every row can be compared with it; then our own, then the other peers.

    Without the repository there are no peers, and our first row is the reference.
    """
    peers = load_peers()
    reference, *others = peers.training_peers(workload, device) if peers else [None]
    return [*([reference] if reference else []), *_our_rows(workload, device), *others]


def _our_rows(workload: Workload, device: str) -> list[BenchRow]:
    on_gpu, settings, rows = device == "cuda", dict(_BASELINE), list[BenchRow]()

    def step(name: str, title: str, **changes: str) -> None:
        settings.update({f"{_SECTION[key]}.{key}": value for key, value in changes.items()})
        rows.append(BenchRow(name, f"{OURS} {title}", OURS, dict(settings)))

    whole = workload.method in ("pretrain", "full")
    if workload.activation_checkpointing and whole:
        settings["train.activation_checkpointing"] = "full"
    if workload.shape.parameters <= _MAX_FP32_PARAMETERS:
        step("fp32", "fp32")
    if on_gpu:
        step("bf16", "bf16", precision="bf16")
        step("varlen", "+ variable-length attention", attention="varlen")
    step("chunked", "+ chunked loss", chunked_loss="on")
    step("fused", "+ fused forwards", fused_forwards="on")
    step("compile", "+ compile", compile="on")
    if on_gpu:
        step("async-step", "+ asynchronous step", async_step="on")
    if on_gpu and workload.method == "pretrain":
        step("graphs", "+ CUDA graphs", cuda_graphs="on")
    if on_gpu and whole:
        title = f"{OURS} + Hopper kernels"
        rows.append(
            BenchRow("hopper", title, OURS, {**settings, "advanced.hopper_kernels": "on"}, ("quack", "flash_attn"))
        )
    if workload.method != "pretrain" and settings["train.activation_checkpointing"] == "off":
        step("selective", "+ selective activation checkpointing", activation_checkpointing="selective")
        step("full", "+ full activation checkpointing", activation_checkpointing="full")
    if workload.method == "full" and on_gpu:
        step("adamw-8bit", "+ 8-bit AdamW", optimizer="adamw_8bit")
        step("offload", "+ offloaded AdamW instead", optimizer="adamw", offload="optimizer")
    if on_gpu and workload.method in ("pretrain", "lora"):
        step("fp8-backward", "+ FP8 in the backward", fp8="backward")
        step("fp8-except-last-layer", "+ FP8 forward, except the last layer", fp8="except_last_layer")
        step("fp8", "+ FP8 in the last layer and LM head", fp8="on")
    return rows


def select_rows(rows: list[BenchRow], names: list[str], peers: bool) -> list[BenchRow]:
    """The rows with these names, or all; without peers only our own."""
    return [row for row in rows if (row.name in names if names else True) and (peers or row.runner == OURS)]


def check_rows(names: list[str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            there = ", ".join(sorted(known))
            raise UserError(f"--rows: “{printable(name)}”: no such row{did_you_mean(name, known)}; there are: {there}")
