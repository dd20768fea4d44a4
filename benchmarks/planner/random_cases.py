"""Runs that nobody has chosen: nothing can have been fitted to them, by whatever way."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice

from benchmarks.planner.cases import DRAWN, METHODS, NEW, TINY, Case

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
_TOKENS = 32_768  # of a pass
_NEW = tuple(name for name in NEW if name != "30k" and not name.startswith("thin"))
_SMALL = ("smollm2-135m", "smollm2-360m", "qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b", "qwen2.5-1.5b", "qwen3-1.7b")
_LARGE = ("qwen2.5-3b", "llama-3.2-3b", "qwen3-4b", "qwen2.5-7b", "mistral-7b-v0.3", "llama-3.1-8b", "qwen3-8b")
_LITTLE_MEMORY = {"pretrain": ("offload", "backward"), "full": ("offload", "bf16", "bf16_kahan", "backward", "both"),
                  "lora": ("offload",), "qlora": ("offload",)}  # fmt: skip
_SHAPES = {"pretrain": _NEW, "full": _SMALL + _LARGE[:3], "lora": _SMALL + _LARGE, "qlora": _SMALL + _LARGE}


def drawn(wanted: int, seed: int, device: str, fits: Callable[[Case], bool]) -> list[Case]:
    """So many, the same for the same seed; those that do not fit the device are passed over."""
    return list(islice((case for case in _cases(seed, device) if fits(case)), wanted))


def _cases(seed: int, device: str) -> Iterator[Case]:
    draw = random.Random(seed)  # noqa: S311
    for number in count(1):
        name = f"{DRAWN}{seed}-{number}"
        yield _in_little_memory(_case(name, draw)) if device == "cuda" else _tiny(name, draw)


def _case(name: str, draw: random.Random) -> Case:
    def chance(share: float) -> bool:
        return draw.random() < share

    method = draw.choice(METHODS)
    length, compiled = draw.choice(_LENGTHS), chance(0.5)
    rows = min(draw.choice((1, 2, 4, 8, 16, 32)), _TOKENS // length)
    adapters, fused = method in ("lora", "qlora"), not chance(0.1)
    optimizer = draw.choice(("adamw_8bit", "paged_adamw_8bit") if adapters else ("adamw_8bit", "muon"))
    usual = chance(0.8)
    return Case(
        name, method, draw.choice(_SHAPES[method]), length, rows, compiled, passes=draw.choice((1, 1, 1, 2, 4)),
        document=draw.randrange(100, 2000) if chance(0.7) else None,
        filled=1.0, checkpointing=draw.choice(("off", "off", "selective", "full")), whole=chance(0.15),
        optimizer="adamw" if usual else optimizer,
        offload="optimizer" if usual and method == "full" and chance(0.15) else "off", fused=fused,
        fp8=method in ("pretrain", "full") and fused and compiled and chance(0.25),
        rank=draw.choice((8, 16, 32, 64)), dropout=0.05 if adapters and chance(0.2) else 0.0,
    )  # fmt: skip


def _in_little_memory(case: Case) -> Case:
    """Half of the cases with one of the ways to train in less memory; drawn apart, so that the rest of a seed's runs is
    what it was before there were these."""
    draw = random.Random(case.name)  # noqa: S311
    way, optimizer = draw.choice(_LITTLE_MEMORY[case.method]), draw.choice(("adamw", "adamw_8bit", "paged_adamw_8bit"))
    if draw.random() < 0.5 or case.optimizer == "muon":
        return case
    if way == "offload":
        return replace(case, checkpointing="offload", compiled=False, fp8=False)
    case = replace(case, optimizer=optimizer, offload="off")
    if way in ("backward", "both"):
        case = replace(case, optimizer_in_backward=True, passes=1)
    return case if way == "backward" else replace(case, master_weights="bf16" if way == "both" else way, fp8=False)


def _tiny(name: str, draw: random.Random) -> Case:
    like = draw.choice(TINY)
    return Case(name, like.method, like.shape, like.length, draw.choice((1, 2)), False, document=draw.randrange(8, 64))
