"""One process's work as memory and time depend on it: every `auto` of a run decided for a card, without having it.

The decisions are those of train/resolve.py, which takes them on the machine itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sojourn.catalog.fused_families import FUSED_FAMILIES
from sojourn.catalog.gpus import Gpu
from sojourn.catalog.models import ModelSpec
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = ("gate_proj", "up_proj", "down_proj")
_COMPILE_FLOPS = 2e14
_WORTH_COMPILING = 120.0


@dataclass(frozen=True)
class Work:
    """`rows` at a time of `length` tokens, `passes` times for each update; `tokens` of documents attend to each other.

    `kernels`: whether torch can make GPU kernels of its own there. `world` processes on `nodes` machines share the run
    by `engine`.
    """

    shape: ModelSpec
    method: str = "pretrain"
    rows: int = 1
    length: int = 1024
    passes: int = 1
    document: int | None = None  # tokens of a usual document, where rows are packed with several
    device: str = "cuda"
    precision: str = "bf16"
    fused: bool = True
    compiled: bool = True
    kernels: bool = True
    attention: str = "varlen"
    recompute: str = "off"
    whole_loss: bool = False
    fp8: str = "off"
    graphs: str = "off"  # passes from a recording: on, off, or auto, as estimate/kernel_launch.py decides
    optimizer: str = "adamw"
    offload: str = "off"
    rank: int = 16
    targets: tuple[str, ...] = LINEAR
    dropout: float = 0.0
    saved_modules: tuple[str, ...] = ()
    bits: int = 4
    double_quant: bool = True
    engine: str = "single"
    world: int = 1
    nodes: int = 1
    stage: int = 2  # of ZeRO
    reshard: bool = True
    evaluates: bool = True
    looped: bool = True  # as in a run, which reads rows, writes down what happens and watches the clock between steps
    cpu: float = 1.0  # how much longer than usual the machine's takes to launch
    capability: tuple[int, int] = (9, 0)

    @property
    def tokens(self) -> int:
        """Of one pass."""
        return self.rows * self.length

    @property
    def adapters(self) -> bool:
        return self.method in ("lora", "qlora")

    @property
    def numbers(self) -> int:
        """Bytes of what is multiplied."""
        return 4 if self.precision == "fp32" else 2

    @property
    def stream(self) -> int:
        """Bytes of what blocks hand on: narrow where they compute by themselves or the base is narrow; else autocast
        leaves the residual stream as wide as the embedding."""
        if self.precision == "fp32":
            return 4
        return 2 if self.adapters or (self.precision == "bf16" and self.fused) else 4

    @property
    def packed(self) -> bool:
        return self.document is not None and self.document < self.length

    @property
    def sharded(self) -> bool:
        return self.engine in ("fsdp", "deepspeed") and self.world > 1

    def targeted(self, name: str) -> bool:
        """Whether this linear layer has an adapter. Experts are no linear layers."""
        inside = self.shape.experts is None or name not in EXPERTS
        return self.adapters and inside and name in self.targets

    def trained(self, name: str) -> bool:
        """Whether this linear layer's input is needed for a gradient of weights."""
        return not self.adapters or self.targeted(name)


def alike(work: Work, layers: int) -> list[tuple[Work, int]]:
    """Of the first so many blocks those that compute alike, and how many they are: the last may be in 16 bits."""
    if work.fp8 != "except_last_layer" or layers < work.shape.layers:
        return [(work, layers)]
    return [(work, layers - 1), (replace(work, fp8="off"), 1)]


@dataclass(frozen=True)
class Place:
    """What of a machine decides how a run computes."""

    device: str
    capability: tuple[int, int] | None
    precision: str


def place_of(gpu: Gpu | None) -> Place:
    if gpu is None:
        return Place("cpu", None, "fp32")
    return Place("mps" if gpu.unified else "cuda", gpu.capability, usual_precision(gpu))


def work_of(
    config: RunConfig, shape: ModelSpec, place: Place, rows: int = 1, recompute: str | None = None,
    world: int = 1, engine: str | None = None,
) -> Work:  # fmt: skip
    """`recompute` and `engine` where they are being tried."""
    train, method, advanced, capability = config.train, config.method, config.advanced, place.capability
    precision = str(train.precision) if train.precision != "auto" else place.precision
    kernels = capability is not None and capability >= (7, 0)
    targets = tuple(name for name in method.targets if name in LINEAR) or LINEAR  # names of other families: as if all
    chosen = engine or _engine(config, world)
    stage, offload = _zero(config) if chosen == "deepspeed" else (2, train.offload)
    fused = shape.family in FUSED_FAMILIES if advanced.fused_forwards == "auto" else advanced.fused_forwards == "on"
    work = Work(
        shape=shape, method=method.kind, rows=rows, length=config.data.max_length,
        passes=max(1, -(-train.global_batch // (rows * world))), document=usual_document(config),
        device=place.device, precision=precision, fused=fused,
        kernels=kernels, attention=_attention(train.attention, precision, shape, capability),
        recompute=recompute or ("off" if train.activation_checkpointing == "auto" else train.activation_checkpointing),
        whole_loss=advanced.chunked_loss == "off", fp8=train.fp8, graphs=_graphs(config),
        optimizer=train.optimizer, offload=offload,
        rank=method.rank, targets=targets, dropout=method.dropout, saved_modules=tuple(method.modules_to_save),
        bits=method.bits, double_quant=method.double_quant, engine=chosen, world=world,
        nodes=config.parallel.nodes, stage=stage, reshard=advanced.reshard_after_forward,
        capability=capability or (0, 0),
    )  # fmt: skip
    return replace(work, compiled=_compiles(config, work, kernels))


def usual_precision(gpu: Gpu) -> str:
    if gpu.bf16_tflops is not None and (gpu.capability is None or gpu.capability >= (8, 0)):
        return "bf16" if not gpu.unified else "fp32"
    return "fp16" if gpu.capability is not None and gpu.capability >= (7, 0) else "fp32"


def usual_document(config: RunConfig) -> int | None:
    """Tokens of a usual document, where several share a row: chats are about 480 tokens long in usual sets."""
    if config.data.packing == "off" or config.method.kind == "pretrain":
        return None
    return min(480, config.data.max_length)


def _attention(asked: str, precision: str, shape: ModelSpec, capability: tuple[int, int] | None) -> str:
    if asked != "auto":
        return asked
    able = capability is not None and capability >= (8, 0) and precision != "fp32" and shape.head_dim <= 256
    return "varlen" if able else "sdpa"


def _graphs(config: RunConfig) -> str:
    """Rows that are cut to the longest of them are never alike; and what is recorded may be rounded otherwise."""
    asked: str = config.train.cuda_graphs
    exact = config.train.deterministic == "on" and asked == "auto"
    return "off" if config.data.packing == "off" or exact else asked


def _engine(config: RunConfig, world: int) -> str:
    if config.parallel.engine != "auto":
        return config.parallel.engine
    if config.parallel.deepspeed is not None:
        return "deepspeed"
    return "fsdp" if config.train.offload == "all" else "single" if world == 1 else "ddp"


def _zero(config: RunConfig) -> tuple[int, str]:
    """ZeRO's stage and what is in the host's memory: by the DeepSpeed file, or by default."""
    asked: str = config.train.offload
    if config.parallel.deepspeed is None:
        return (3 if asked == "all" else 2), asked
    path = Path(config.parallel.deepspeed).expanduser()
    try:
        given: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        mend = "correct parallel.deepspeed, or remove it for ZeRO-2"
        raise UserError(f"{path}: cannot be read as a DeepSpeed file; {mend}") from None
    zero: Any = given.get("zero_optimization") if isinstance(given, dict) else None
    zero = zero if isinstance(zero, dict) else {}
    stage = zero.get("stage", 0)
    for part, offload in (("offload_param", "all"), ("offload_optimizer", "optimizer")):
        if isinstance(zero.get(part), dict) and zero[part].get("device") == "cpu":
            asked = offload
            break
    return (stage if stage in (0, 1, 2, 3) else 2), asked


def _compiles(config: RunConfig, work: Work, kernels: bool) -> bool:
    train = config.train
    if train.compile != "auto":
        return train.compile == "on"
    steps = train.steps or (int(train.tokens or 0)) / (train.global_batch * config.data.max_length)
    flops = 6.0 * work.shape.active_parameters * steps * train.global_batch * config.data.max_length
    return kernels and not (steps and flops / _COMPILE_FLOPS < _WORTH_COMPILING)
