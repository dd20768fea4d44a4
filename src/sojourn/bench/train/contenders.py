"""Who runs a workload: the ladder of our own rows, each with one thing more than the row before, and the peers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sojourn.bench.train.workloads import Workload
from sojourn.config.words import closest, shown
from sojourn.errors import UserError

OURS = "sojourn"
REFERENCE = "transformers"  # whose losses the others must have

_LARGEST_IN_FP32 = 1_000_000_000

_PLAIN = {
    "train.precision": "fp32", "train.attention": "sdpa", "train.compile": "off", "train.optimizer": "adamw",
    "train.activation_checkpointing": "off", "train.offload": "off", "train.fp8": "off", "train.cuda_graphs": "off",
    "advanced.chunked_loss": "off", "advanced.fused_forwards": "off", "advanced.async_step": "off",
    "advanced.hopper_kernels": "off",
}  # fmt: skip
_SECTION = {key.split(".")[1]: key.split(".")[0] for key in _PLAIN}


@dataclass(frozen=True)
class Contender:
    """`settings` are keys of our configuration, or what the peer is told."""

    name: str
    title: str
    role: str
    settings: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    another: bool = False  # model of the same size: its losses say nothing


def contenders(workload: Workload, device: str) -> list[Contender]:
    """The reference first, so that every row can be told against it; then the ladder, then the other peers."""
    first, *others = _peers(workload, device)
    return [first, *_ladder(workload, device), *others]


def _ladder(workload: Workload, device: str) -> list[Contender]:
    on_gpu, settings, rows = device == "cuda", dict(_PLAIN), list[Contender]()

    def step(name: str, title: str, **changes: str) -> None:
        settings.update({f"{_SECTION[key]}.{key}": value for key, value in changes.items()})
        rows.append(Contender(name, f"{OURS} {title}", OURS, dict(settings)))

    whole = workload.method in ("pretrain", "full")
    if workload.checkpointed and whole:
        settings["train.activation_checkpointing"] = "full"
    if workload.shape.parameters <= _LARGEST_IN_FP32:
        step("fp32", "fp32")
    if on_gpu:
        step("bf16", "bf16", precision="bf16")
        step("varlen", "+ variable-length attention", attention="varlen")
    step("chunked", "+ chunked loss", chunked_loss="on")
    step("fused", "+ fused forwards", fused_forwards="on")
    step("compile", "+ compile", compile="on")
    if on_gpu:
        step("ahead", "+ never waiting for a step's loss", async_step="on")
    if on_gpu and workload.method == "pretrain":
        step("graphs", "+ passes from a recording", cuda_graphs="on")
    if on_gpu and whole:
        title = f"{OURS} + kernels for Hopper"
        rows.append(
            Contender("hopper", title, OURS, {**settings, "advanced.hopper_kernels": "on"}, ("quack", "flash_attn"))
        )
    if workload.method != "pretrain" and settings["train.activation_checkpointing"] == "off":
        step("selective", "+ selective checkpointing", activation_checkpointing="selective")
        step("full", "+ full checkpointing", activation_checkpointing="full")
    if workload.method == "full" and on_gpu:
        step("adamw-8bit", "+ 8-bit AdamW", optimizer="adamw_8bit")
        step("offload", "+ AdamW on the host instead", optimizer="adamw", offload="optimizer")
    if on_gpu and workload.method in ("pretrain", "lora"):
        step("fp8-backward", "+ 8 bits in the backward", fp8="backward")
        step("fp8-inner", "+ in the forward, but of the last block", fp8="except_last_layer")
        step("fp8", "+ of the last block and the head too", fp8="on")
    return rows


def _peers(workload: Workload, device: str) -> list[Contender]:
    on_gpu, recompute = device == "cuda", {"checkpointing": True}
    if workload.method == "pretrain":
        found = [Contender(REFERENCE, "transformers", "transformers")]
        if on_gpu:
            found += [
                Contender("transformers-compiled", "transformers, compiled", "transformers", {"compile": True}),
                Contender("liger", "Liger", "liger", needs=("liger_kernel",)),
            ]
        found.append(Contender("plain", "a Llama of 70 lines of torch", "plain", {"compile": on_gpu}))
        if workload.documents == "long":
            found.append(Contender("nanogpt", "nanoGPT's GPT-2 of that size", "gpt", {"compile": on_gpu}, another=True))
        return found
    needs = {"lora": ("peft",), "qlora": ("peft", "bitsandbytes")}.get(workload.method, ())
    how, told = (", checkpointed", recompute) if workload.checkpointed else ("", {})
    found = [Contender(REFERENCE, f"transformers, padded{how}", "transformers", {"documents": 8, **told}, needs)]
    if on_gpu:
        liger = ("liger_kernel", *needs)
        found.append(Contender("liger", f"Liger, packed{how}", "liger", told, liger))
        if workload.checkpointed and workload.adapters:
            found.append(Contender("liger-kept", "Liger, packed, nothing recomputed", "liger", {}, liger))
    found.append(Contender("trl", f"trl, packed{how}", "trl", told, ("trl", *needs)))
    if on_gpu:
        found.append(Contender("unsloth", "Unsloth, padded", "unsloth", {"documents": 8}, ("unsloth", *needs)))
    return found


def selected(listed: list[Contender], names: list[str], peers: bool) -> list[Contender]:
    """Those of the list that were asked for by name, or all; without peers only our own."""
    return [one for one in listed if (one.name in names if names else True) and (peers or one.role == OURS)]


def check_rows(names: list[str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            there = ", ".join(sorted(known))
            raise UserError(f"--rows: “{shown(name)}”: no such row{closest(name, known)}; there are: {there}")
