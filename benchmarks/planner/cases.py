"""The runs that plans are held against, and which half of them nothing is ever fitted to."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from sojourn.catalog.models import ModelSpec, find_model
from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import UserError
from sojourn.resolve.new_model import llama_spec

DRAWN = "drawn-"  # how names begin of those that nobody has chosen: see draw.py
METHODS = ("pretrain", "full", "lora", "qlora")


@dataclass(frozen=True)
class Case:
    """`rows` of `length` tokens at a time, `passes` times for each update.

    `document`: tokens of a usual document, of which rows are packed full; None: one document fills a row. With
    `filled` below 1 rows are padded. `shape` is a name in the catalogue, or of NEW.
    """

    name: str
    method: str
    shape: str
    length: int
    rows: int
    compiled: bool
    passes: int = 1
    document: int | None = None
    filled: float = 1.0
    checkpointing: str = "off"
    whole: bool = False
    optimizer: str = "adamw"
    offload: str = "off"
    fused: bool = True
    fp8: bool = False
    graphs: str = "auto"
    rank: int = 16
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all-linear",)
    master_weights: str = "fp32"
    optimizer_in_backward: bool = False

    @property
    def new(self) -> bool:
        return self.shape in NEW


# Width, layers, heads, key/value heads, feed-forward, vocabulary, tied.
NEW = {
    "30k": llama_spec(32, 2, 2, 1, 96, 300, True),
    "11m": llama_spec(256, 4, 4, 4, 704, 32_000, True),
    "26m": llama_spec(384, 8, 6, 6, 1024, 32_000, True),
    "48m": llama_spec(512, 8, 8, 2, 1408, 50_304, True),
    "110m": llama_spec(768, 12, 12, 12, 2048, 32_000, True),
    "201m": llama_spec(768, 16, 12, 4, 2048, 65_536, False),
    "316m": llama_spec(1024, 24, 16, 8, 2816, 32_000, True),
    "725m": llama_spec(1280, 20, 20, 20, 3456, 128_256, False),
    "875m": llama_spec(2048, 16, 16, 16, 5504, 32_000, True),
}


@cache
def shape_of(case: Case) -> ModelSpec:
    if case.new:
        return NEW[case.shape]
    small = {**_TINY, **_THIN}
    return small[case.shape] if case.shape in small else find_model(case.shape)


def sizes(shape: ModelSpec) -> dict[str, Any]:
    """As a config.json has them."""
    found = {
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab, "tie_word_embeddings": shape.tied,
    }  # fmt: skip
    return {**found, "sliding_window": None} if shape.family == "mistral" else found


_P, _F, _L, _Q = METHODS
CASES = (
    Case("pretrain-11m", _P, "11m", 512, 32, True),
    Case("pretrain-11m-eager", _P, "11m", 512, 32, False),
    Case("pretrain-26m-short", _P, "26m", 1024, 16, True, document=200),
    Case("pretrain-26m-unfused", _P, "26m", 1024, 8, False, fused=False),
    Case("pretrain-48m-selective", _P, "48m", 2048, 16, True, checkpointing="selective"),
    Case("pretrain-48m-full", _P, "48m", 2048, 32, False, checkpointing="full"),
    Case("pretrain-110m", _P, "110m", 1024, 32, True),
    Case("pretrain-110m-eager", _P, "110m", 1024, 32, False),
    Case("pretrain-110m-whole", _P, "110m", 1024, 8, False, whole=True),
    Case("pretrain-110m-muon", _P, "110m", 1024, 16, True, optimizer="muon"),
    Case("pretrain-201m-long", _P, "201m", 8192, 2, True),
    Case("pretrain-201m-passes", _P, "201m", 2048, 4, False, passes=4),
    Case("pretrain-316m", _P, "316m", 2048, 8, True, document=700),
    Case("pretrain-316m-8bit", _P, "316m", 2048, 8, False, optimizer="adamw_8bit", checkpointing="selective"),
    Case("pretrain-725m-fp8", _P, "725m", 2048, 8, True, fp8=True),
    Case("pretrain-725m-16k", _P, "725m", 16_384, 1, False, checkpointing="full"),
    Case("pretrain-875m", _P, "875m", 2048, 16, True),
    Case("pretrain-875m-selective", _P, "875m", 4096, 8, False, checkpointing="selective"),
    Case("full-135m", _F, "smollm2-135m", 2048, 16, True, document=480),
    Case("full-135m-eager", _F, "smollm2-135m", 1024, 32, False, document=300),
    Case("full-360m-padded", _F, "smollm2-360m", 1024, 16, False, filled=0.75),
    Case("full-0.5b", _F, "qwen2.5-0.5b", 2048, 8, True, document=480),
    Case("full-0.5b-whole", _F, "qwen2.5-0.5b", 2048, 4, False, document=480, whole=True),
    Case("full-0.6b-selective", _F, "qwen3-0.6b", 4096, 4, True, document=1200, checkpointing="selective"),
    Case("full-1b-full", _F, "llama-3.2-1b", 8192, 4, False, checkpointing="full"),
    Case("full-1b-unfused", _F, "llama-3.2-1b", 2048, 2, False, fused=False, document=480),
    Case("full-1.5b-passes", _F, "qwen2.5-1.5b", 4096, 1, True, passes=4, document=480),
    Case("full-1.5b-8bit", _F, "qwen2.5-1.5b", 2048, 8, False, optimizer="adamw_8bit", checkpointing="full"),
    Case("full-1.7b-fp8", _F, "smollm2-1.7b", 2048, 8, True, fp8=True, document=600),
    Case("full-1.7b-offload", _F, "qwen3-1.7b", 4096, 2, True, offload="optimizer", document=900),
    Case("full-3b", _F, "qwen2.5-3b", 4096, 2, True, document=480, checkpointing="selective"),
    Case("full-3b-16k", _F, "llama-3.2-3b", 16_384, 1, False, checkpointing="full"),
    Case("full-4b-8bit", _F, "qwen3-4b", 4096, 2, True, optimizer="adamw_8bit", checkpointing="full"),
    Case("full-7b-8bit", _F, "qwen2.5-7b", 2048, 2, False, optimizer="adamw_8bit", checkpointing="full", document=480),
    Case("lora-135m", _L, "smollm2-135m", 1024, 32, True, document=300, rank=8),
    Case("lora-360m-dropout", _L, "smollm2-360m", 2048, 8, False, document=480, dropout=0.05),
    Case("lora-0.5b-whole", _L, "qwen2.5-0.5b", 1024, 8, True, document=480, whole=True),
    Case("lora-0.6b-padded", _L, "qwen3-0.6b", 2048, 8, False, filled=0.7, rank=32),
    Case("lora-1b", _L, "llama-3.2-1b", 4096, 4, True, document=480),
    Case("lora-1.5b-eager", _L, "qwen2.5-1.5b", 4096, 4, False, document=480),
    Case("lora-1.7b-selective", _L, "smollm2-1.7b", 2048, 16, True, checkpointing="selective", rank=64),
    Case("lora-1.7b-qv", _L, "qwen3-1.7b", 4096, 4, False, document=800, targets=("q_proj", "v_proj")),
    Case("lora-3b-8k", _L, "qwen2.5-3b", 8192, 2, True, document=1000),
    Case("lora-3b-full", _L, "llama-3.2-3b", 8192, 4, False, checkpointing="full", document=480),
    Case("lora-4b-16k", _L, "qwen3-4b", 16_384, 1, False, checkpointing="selective"),
    Case("lora-4b-dropout", _L, "qwen3-4b", 2048, 4, True, document=480, dropout=0.1, rank=32),
    Case("lora-7b", _L, "qwen2.5-7b", 8192, 1, True, document=480),
    Case("lora-7b-eager", _L, "qwen2.5-7b", 4096, 2, False, document=480, rank=64),
    Case("lora-7b-mha", _L, "llama-2-7b", 2048, 4, False, checkpointing="selective", document=480),
    Case("lora-7b-mistral", _L, "mistral-7b-v0.3", 4096, 2, True, document=600),
    Case("lora-8b-full", _L, "llama-3.1-8b", 8192, 2, True, checkpointing="full", document=480),
    Case("lora-8b-unfused", _L, "qwen3-8b", 2048, 1, False, fused=False, document=480),
    Case("qlora-0.5b", _Q, "qwen2.5-0.5b", 2048, 8, True, document=480),
    Case("qlora-1b-eager", _Q, "llama-3.2-1b", 2048, 8, False, document=480, rank=64),
    Case("qlora-1.5b-8bit", _Q, "qwen2.5-1.5b", 4096, 2, True, document=480, optimizer="adamw_8bit"),
    Case("qlora-1.7b-full", _Q, "qwen3-1.7b", 4096, 8, False, checkpointing="full", document=480),
    Case("qlora-3b", _Q, "qwen2.5-3b", 4096, 2, True, document=480),
    Case("qlora-3b-selective", _Q, "llama-3.2-3b", 4096, 4, False, checkpointing="selective", document=700),
    Case("qlora-4b-paged", _Q, "qwen3-4b", 2048, 4, False, optimizer="paged_adamw_8bit", document=480),
    Case("qlora-7b", _Q, "qwen2.5-7b", 4096, 1, True, document=480),
    Case("qlora-7b-eager", _Q, "qwen2.5-7b", 8192, 1, False, document=480),
    Case("qlora-7b-short", _Q, "mistral-7b-v0.3", 512, 16, False, document=120),
    Case("qlora-7b-mha", _Q, "llama-2-7b", 2048, 2, True, document=480, dropout=0.05),
    Case("qlora-8b-full", _Q, "llama-3.1-8b", 8192, 2, True, checkpointing="full", document=480),
    Case("qlora-8b-16k", _Q, "qwen3-8b", 16_384, 1, False, checkpointing="full"),
    Case("qlora-8b-passes", _Q, "qwen3-8b", 2048, 2, True, passes=2, document=480, checkpointing="selective"),
)  # fmt: skip

# So thin that a step is all kernel launch overhead: measures that overhead, and what is left of it with CUDA graphs.
# Run only by name; all may be used for fitting.
_THIN = {
    "thin": llama_spec(128, 24, 2, 2, 256, 4096, True),
    "thin-8": llama_spec(128, 8, 2, 2, 256, 4096, True),
}
_THIN |= {f"thin-{family}": replace(_THIN["thin"], name=f"thin-{family}", family=family, qkv_bias=family == "qwen2",
                                    qk_norm=family == "qwen3") for family in ("llama", "qwen2", "qwen3")}  # fmt: skip
NEW |= {name: _THIN[name] for name in ("thin", "thin-8")}


def _thin(compiled: bool) -> tuple[Case, ...]:
    def case(name: str, method: str, shape: str, **rest: Any) -> Case:
        name = f"thin-{name}{'' if compiled else '-eager'}"
        return Case(name, method, shape, 128, 1, compiled, graphs="off", **rest)

    again = [
        case(f"{name}-{mode}", method, shape, checkpointing=mode)
        for name, method, shape in (("new", _P, "thin"), ("lora", _L, "thin-llama"), ("qlora", _Q, "thin-llama"))
        for mode in ("off", "selective", "full")
    ]
    return (
        *again,
        case("new-8", _P, "thin-8"), case("new-unfused", _P, "thin", fused=False),
        case("qwen2", _F, "thin-qwen2"), case("qwen3", _F, "thin-qwen3"),
        case("lora-qv", _L, "thin-llama", targets=("q_proj", "v_proj")),
        case("lora-dropout", _L, "thin-llama", dropout=0.05), case("lora-qwen3", _L, "thin-qwen3"),
        case("lora-unfused", _L, "thin-llama", fused=False),
        *([] if compiled else [
            case("new-passes", _P, "thin", passes=4), case("new-8bit", _P, "thin", optimizer="adamw_8bit"),
            case("new-muon", _P, "thin", optimizer="muon"),
            case("lora-8bit", _L, "thin-llama", optimizer="adamw_8bit"),
            case("qwen2-selective", _F, "thin-qwen2", checkpointing="selective"),
            case("lora-qwen2", _L, "thin-qwen2"),
        ]),
    )  # fmt: skip


THIN = (*_thin(compiled=False), *_thin(compiled=True))
PLAYED = tuple(
    replace(case, name=case.name.replace("thin", "played", 1), graphs="on") for case in THIN if not case.dropout
)

# Runs that a CPU has the time for: they show that this works, and prove nothing.
_TINY = {
    "tiny-llama": replace(NEW["30k"], name="tiny-llama"),
    "tiny-qwen2": replace(NEW["30k"], name="tiny-qwen2", family="qwen2", qkv_bias=True),
    "tiny-qwen3": replace(NEW["30k"], name="tiny-qwen3", family="qwen3", qk_norm=True),
}
TINY = (
    Case("tiny-pretrain", _P, "30k", 64, 2, False, document=20),
    Case("tiny-whole", _P, "30k", 64, 2, False, whole=True, checkpointing="selective"),
    Case("tiny-full", _F, "tiny-llama", 64, 2, False, filled=0.5),
    Case("tiny-qwen3", _F, "tiny-qwen3", 64, 2, False, checkpointing="full"),
    Case("tiny-lora", _L, "tiny-qwen2", 64, 2, False, passes=2, document=20, rank=4),
)


@cache
def held_out() -> frozenset[str]:
    """One of each two that are alike, drawn once and for all."""
    draw, found = random.Random(0), set()  # noqa: S311
    for method in METHODS:
        alike = sorted((case.compiled, case.checkpointing, case.name) for case in CASES if case.method == method)
        found |= {draw.choice(pair)[2] for pair in zip(alike[::2], alike[1::2], strict=True)}
    return frozenset(found)


def is_held_out(name: str) -> bool:
    return name in held_out() or name.startswith(DRAWN)


def chosen(words: Iterable[str], limit: int | None, device: str) -> list[Case]:
    """Cases by name, or by a part of it; each word may be several, with commas. By default all that suit the device."""
    known = (*CASES, *THIN, *PLAYED) if device == "cuda" else TINY
    parts = [part.strip() for word in words for part in word.split(",") if part.strip()]
    for part in parts:
        if not any(part in case.name for case in known):
            names = [case.name for case in known]
            why = "" if device == "cuda" else f" for a {device}"
            there = f"there are {names[0]} to {names[-1]}" if device == "cuda" else f"there are {', '.join(names)}"
            raise UserError(f"--cases: “{printable(part)}”: no such case{why}{did_you_mean(part, names)}; {there}")
    exact = {case.name for case in known}

    def wanted(case: Case) -> bool:
        alike = (part == case.name or (part not in exact and part in case.name) for part in parts)
        return any(alike) if parts else case not in (*THIN, *PLAYED)

    found = [case for case in known if wanted(case)]
    return found[:limit]
