"""What a from-scratch run will take: memory by component, tokens, hours and money on each GPU of the catalogue.

Memory is the sum of what stays (weights, gradients, optimizer) and the activations of one micro batch. Time is the
run's operations over the share of the card's peak that such models reach; the share is an assumption, and shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sojourn.catalog.facts import Gpu, Price, gpus, prices
from sojourn.config.schema import DataConfig, RunConfig
from sojourn.errors import UserError
from sojourn.plan.shape import Shape, scratch_shape

ASSUMED_SHARE = 0.30
_LOSS_CHUNK = 1024  # tokens whose logits exist at a time
_FIXED_BYTES = int(0.8 * 2**30)  # the CUDA context and the libraries' workspaces
_BYTES_PER_TOKEN = 4.0
_TOKENS_PER_TASK = 30


@dataclass(frozen=True)
class Memory:
    """Bytes, by what they hold."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Offer:
    """One GPU for this run. `micro_batch` is None when not even one row fits; `cost` when no price is known."""

    gpu: Gpu
    micro_batch: int | None
    tokens_per_second: float
    hours: float
    platform: str | None
    cost: float | None
    seen: str


@dataclass(frozen=True)
class Plan:
    shape: Shape
    tokens: int
    steps: int
    memory: Memory
    micro_batch: int
    checkpoint_bytes: int
    offers: tuple[Offer, ...]

    @property
    def best(self) -> Offer | None:
        """The cheapest offer that fits, among those with a price."""
        fitting = [offer for offer in self.offers if offer.micro_batch and offer.cost is not None]
        return min(fitting, key=lambda offer: offer.cost or 0.0, default=None)


def make_plan(config: RunConfig, only: list[Gpu] | None = None) -> Plan:
    if config.model.base is not None:
        raise UserError("plan: this version plans from-scratch runs; a run with model.base cannot be planned yet")
    shape = scratch_shape(config.model, int(config.data.vocab_size))
    steps, tokens = _length(config)
    micro = config.train.micro_batch if isinstance(config.train.micro_batch, int) else 1
    offers = [_offer(gpu, price, shape, config, tokens) for gpu in only or gpus() for price in _prices_of(gpu)]
    offers.sort(key=lambda o: (o.micro_batch is None, o.cost is None, o.cost or 0.0, o.hours))
    return Plan(shape, tokens, steps, memory(shape, config, micro), micro, 12 * shape.parameters, tuple(offers))


def memory(shape: Shape, config: RunConfig, rows: int, wide: bool = True, cut: int = 1) -> Memory:
    """Bytes to train `rows` rows at a time; `wide`: in 32-bit numbers, else in 16-bit ones over 32-bit weights.

    `cut`: over how many GPUs weights, gradients and moments are spread; what is computed with is gathered.
    """
    tokens = rows * config.data.max_length
    unit = 4 if wide else 2
    per_layer = unit * (12 * shape.d_model + 4 * shape.ffn_size)  # what a layer keeps of each token for its backward
    kept = {"full": 1.0, "selective": 0.6 * shape.num_layers}.get(config.train.checkpointing, float(shape.num_layers))
    boundaries = shape.num_layers * unit * shape.d_model
    logits = 10 * shape.vocab_size * (tokens if config.train.loss == "whole" else min(tokens, _LOSS_CHUNK))
    frozen, trained = _held(shape, config, unit)
    moments = 2 if "8bit" in config.train.optimizer else 4 if config.train.optimizer == "muon" else 8
    weights = frozen + (4 + (0 if wide or frozen else 2)) * trained
    ends = shape.vocab_size * shape.d_model * (1 if shape.tied else 2)
    gathered = 0 if cut == 1 else (4 if wide or not frozen else 2) * ends + 2 * (weights - 4 * ends) // shape.num_layers
    return Memory(
        weights=weights // cut + max(0, gathered),
        gradients=4 * trained // cut + (0 if cut == 1 or frozen else 4 * ends),
        optimizer=0 if config.train.offload == "optimizer" else moments * trained // cut,
        activations=int(tokens * (kept * per_layer + boundaries) + logits),
    )


def _held(shape: Shape, config: RunConfig, unit: int) -> tuple[int, int]:
    """Bytes of frozen weights, and how many weights are trained."""
    method, embeddings = config.method, shape.vocab_size * shape.d_model * (1 if shape.tied else 2)
    if method.kind in ("pretrain", "full"):
        return 0, shape.parameters
    each = unit if method.kind == "lora" else 1.0 if method.bits == 8 else 0.53
    frozen = int(each * (shape.parameters - embeddings)) + unit * embeddings
    return frozen, shape.adapter_parameters(method.rank)


def estimate_tokens(data: DataConfig) -> int:
    """Of one epoch; files are weighed, not read."""
    total = 0.0
    for source in data.sources:
        if source.path.startswith("builtin:instructions"):
            total += source.weight * int(source.take or 20_000) * _TOKENS_PER_TASK
        elif source.path.startswith("builtin:text"):
            total += source.weight * int(source.size or 10_000_000) / _BYTES_PER_TOKEN
        else:
            total += source.weight * _bytes_at(Path(source.path).expanduser()) / _BYTES_PER_TOKEN
    return int(total)


def _bytes_at(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if not path.is_file():
        raise UserError(
            f"data.sources: {path}: no such file, so its size is not known; give train.tokens or train.steps"
        )
    return path.stat().st_size


def _length(config: RunConfig) -> tuple[int, int]:
    """Steps and tokens of the whole run."""
    train = config.train
    per_step = train.global_batch * config.data.max_length
    if train.steps is not None:
        return train.steps, train.steps * per_step
    if not config.data.sources and train.tokens is None:
        raise UserError("plan: how long is the run? give data.sources, train.tokens or train.steps")
    tokens = (
        int(train.tokens) if train.tokens is not None else int((train.epochs or 1.0) * estimate_tokens(config.data))
    )
    return max(1, round(tokens / per_step)), tokens


def _prices_of(gpu: Gpu) -> list[Price | None]:
    return [price for price in prices() if price.gpu == gpu.name] or [None]


def _offer(gpu: Gpu, price: Price | None, shape: Shape, config: RunConfig, tokens: int) -> Offer:
    room = gpu.plan_gib * 2**30 - _FIXED_BYTES
    batch = config.train.global_batch
    fitting = [n for n in range(1, batch + 1) if batch % n == 0 and memory(shape, config, n, wide=False).total <= room]
    peak = 1e12 * (gpu.bf16_tflops or gpu.fp16_tflops or 5.0)
    speed = ASSUMED_SHARE * peak / shape.flops_per_token(config.data.max_length)
    hours = tokens / speed / 3600
    own = config.limits.price_per_hour
    per_hour = float(own.amount) if own else price.cny_per_hour / price.count if price else None
    seen = "your price" if own else f"{price.source}, {price.month}" if price else ""
    platform = price.platform if price else None
    return Offer(
        gpu, max(fitting, default=None), speed, hours, platform, None if per_hour is None else per_hour * hours, seen
    )
