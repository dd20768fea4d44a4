"""What to change so that a run fits, the fastest change first, or so that it is faster where memory is left; and
`--fit`: what a given memory holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from sojourn.catalog.gpus import Gpu, gpus
from sojourn.catalog.models import ModelSpec, models
from sojourn.config.load import with_settings
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.estimate.memory import memory
from sojourn.estimate.model_states import host_bytes
from sojourn.estimate.step_time import step_time
from sojourn.estimate.workload import Workload
from sojourn.plan.calibration import correction
from sojourn.plan.offers import TOO_SMALL, Plan, fit_on, plan_device, resolve_for, unsupported_reason
from sojourn.plan.prices import gpus_named, most_gpus
from sojourn.resolve.activation_offload import least_memory_checkpointing
from sojourn.resolve.device_spec import DeviceSpec, catalog_device
from sojourn.resolve.micro_batch import divisors, sized
from sojourn.resolve.model_spec import model_spec_of
from sojourn.resolve.resolve import WORTH

_MAX_CHANGES, _MIN_FOUND, _MAX_SHOWN = 3, 3, 8
_BF16_CAPABILITY = (8, 6)
_SHORTEST, _LONG = 256, 32_768  # tokens of a row: not halved further, and halved more often


@dataclass(frozen=True)
class Change:
    """`settings` as they are typed, and what they do; `count` GPUs are needed then.

    keeps_result  the model learns the same, but for rounding and for the optimizer's precision
    kind          of which one change is enough; each is of its own unless it is said
    """

    description: str
    settings: dict[str, Any]
    count: int = 1
    keeps_result: bool = True
    kind: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", self.kind or self.description)


@dataclass(frozen=True)
class Advice:
    """Changes that together make the run fit on a GPU, and its throughput then."""

    changes: tuple[Change, ...]
    gpu: Gpu
    tokens_per_second: float
    memory: int
    host_memory: int = 0

    @property
    def keeps_result(self) -> bool:
        return all(change.keeps_result for change in self.changes)

    @property
    def arguments(self) -> str:
        """To be added to the command line."""
        settings = {key: value for change in self.changes for key, value in change.settings.items()}
        given = [f"{key}={value}" for key, value in settings.items()]
        count = max(change.count for change in self.changes)
        return " ".join([*given, *([f"--gpus {','.join(map(str, range(count)))}"] if count > 1 else [])])


def advise(config: RunConfig, gpu: Gpu, most: int | None = None) -> list[Advice]:
    """The fastest first; of combinations only those of which no part suffices alone, of more GPUs the fewest, of
    shorter rows the longest. `most`: GPUs that there are."""
    model, found, enough = model_spec_of(config), list[Advice](), list[frozenset[str]]()
    changes = [change for change in _changes(config) if most is None or change.count <= most]
    for size in range(1, _MAX_CHANGES + 1):
        for group in combinations(changes, size):
            kinds = frozenset(change.kind for change in group)
            if any(less <= kinds for less in enough) or _clash(group):
                continue
            advice = _with_changes(config, model, gpu, group, gpus_named(config) or 1)
            if advice is not None:
                found.append(advice)
                enough.append(kinds)
        if len(found) >= _MIN_FOUND and any(advice.keeps_result for advice in found):
            break
    return _shown(sorted(found, key=lambda advice: -advice.tokens_per_second))


def _shown(ranked: list[Advice]) -> list[Advice]:
    """The first ones; some of them keep the result, if any does."""
    kept = [advice for advice in ranked if advice.keeps_result][:_MIN_FOUND]
    others = [advice for advice in ranked if advice not in kept][: _MAX_SHOWN - len(kept)]
    return [advice for advice in ranked if advice in kept or advice in others]


def advise_for(
    config: RunConfig, plan: Plan, cards: list[Gpu] | None, platform: str | None = None
) -> tuple[Gpu | None, list[Advice]]:
    """Where the run fits on none of the named GPUs, or on none with a price: for the largest of them."""
    offers = [o for o in plan.offers if o.gpu.capability is not None and (o.fits or o.reason_not == TOO_SMALL)]
    if any(o.fits and (o.bill is not None or cards) for o in offers):
        return None, []
    candidates = [o.gpu for o in offers if cards or o.priced] or [o.gpu for o in offers]
    if not candidates:
        return None, []
    target = max(candidates, key=lambda card: card.plan_gib)
    return target, advise(config, target, most_gpus(target, platform))


def faster(config: RunConfig, plan: Plan) -> Advice | None:
    """Settings to leave to `auto` on the GPU that the plan shows: memory that is left makes the run faster."""
    shown, train = plan.shown, config.train
    if shown is None or shown.fit is None or shown.step is None:
        return None
    now = step_time(shown.fit.workload, shown.gpu).tokens_per_second
    recomputes = train.activation_checkpointing in ("full", "selective")
    left = [Change("keep activations that fit", {"train.activation_checkpointing": "auto"})] if recomputes else []
    left += [Change("as many rows as fit", {"train.micro_batch": "auto"})] if train.micro_batch != "auto" else []
    groups = [group for size in range(1, len(left) + 1) for group in combinations(left, size)]
    tried = (_with_changes(config, plan.model, shown.gpu, group, shown.count) for group in groups)
    found = [advice for advice in tried if advice is not None]
    best = max((advice.tokens_per_second for advice in found), default=0.0)
    if best < WORTH * now:
        return None
    least = next(advice for advice in found if advice.tokens_per_second >= best / WORTH)  # with the fewest changes
    return replace(least, tokens_per_second=least.tokens_per_second / now * shown.step.tokens_per_second)


def _changes(config: RunConfig) -> Iterator[Change]:
    """Of each kind the one that costs least time first."""
    train, method, length = config.train, config.method, config.data.max_length
    if train.micro_batch not in (1, "auto"):
        yield Change("as many rows at a time as fit", {"train.micro_batch": "auto"})
    if train.activation_checkpointing in ("off", "selective"):
        yield Change("activation checkpointing as needed", {"train.activation_checkpointing": "auto"})
    if config.advanced.chunked_loss == "off":
        yield Change("logits in chunks", {"advanced.chunked_loss": "on"})
    if method.kind in ("full", "pretrain"):
        yield from _optimizer_changes(config)
    if method.kind == "lora":
        yield Change("base in NF4", {"method.kind": "qlora"}, keeps_result=False)
    if method.kind == "full":
        yield from _bf16_changes(config)
        yield Change("LoRA", {"method.kind": "lora"}, keeps_result=False)
        yield Change("LoRA on a base in NF4", {"method.kind": "qlora"}, keeps_result=False)
    for part in (2, 4) if length < _LONG else (2, 4, 8, 16):
        if length // part >= _SHORTEST:
            shorter = {"data.max_length": length // part}
            yield Change(f"rows of {length // part:,} tokens", shorter, keeps_result=False, kind="rows")
    engine = {"parallel.engine": "auto"} if config.parallel.engine == "single" else {}
    for count in (2, 4, 8):
        if (gpus_named(config) or 1) < count <= train.global_batch:
            yield Change(f"{count} GPUs", {**_plain_adamw(config), **engine}, count, kind="GPUs")


def _optimizer_changes(config: RunConfig) -> Iterator[Change]:
    """Optimizer states that take less memory of the GPU, or none."""
    train, engine = config.train, config.parallel.engine
    if train.offload == "off":
        if train.optimizer in ("adamw", "paged_adamw"):
            yield Change("8-bit optimizer states", {"train.optimizer": "adamw_8bit"})
        if train.optimizer in ("adamw", "adamw_8bit"):
            yield Change("paged 8-bit optimizer states", {"train.optimizer": "paged_adamw_8bit"})
        if engine != "deepspeed":
            yield Change("optimizer states in host memory", {**_plain_adamw(config), "train.offload": "optimizer"})
    if train.offload != "all" and engine != "deepspeed":
        auto = {} if engine in ("auto", "fsdp") else {"parallel.engine": "auto"}
        everything = {**_plain_adamw(config), **auto, "train.offload": "all"}
        yield Change("weights and optimizer states in host memory", everything)


def _bf16_changes(config: RunConfig) -> Iterator[Change]:
    """Without fp32 master weights; and without all gradients at once, where no gradients are accumulated."""
    train = config.train
    if (
        train.master_weights != "fp32"
        or train.offload != "off"
        or config.parallel.engine not in ("auto", "single", "ddp")
    ):
        return
    settings: dict[str, Any] = {"train.master_weights": "bf16", "train.optimizer": "paged_adamw_8bit"}
    what, kind = "bf16 weights with stochastic rounding, a little noisier", "bf16 weights"
    yield Change(what, settings, keeps_result=False, kind=kind)
    if config.parallel.engine == "ddp" or (gpus_named(config) or 1) > 1:
        return
    whole: dict[str, Any] = (
        {"train.micro_batch": "auto"} if train.micro_batch not in ("auto", train.global_batch) else {}
    )
    whole |= {"train.clip": 0} if train.clip else {}
    updates = {**settings, "train.optimizer_in_backward": "on", **whole}
    yield Change(f"{what}, updated in the backward without clipping", updates, keeps_result=False, kind=kind)


def _plain_adamw(config: RunConfig) -> dict[str, Any]:
    """What FSDP and offloading need."""
    return {} if config.train.optimizer == "adamw" else {"train.optimizer": "adamw"}


def _clash(group: tuple[Change, ...]) -> bool:
    """Two values of one setting, two numbers of GPUs, or adapters whose few optimizer states need no other place."""
    pairs = {(key, value) for change in group for key, value in change.settings.items()}
    keys = [key for key, _ in pairs]
    kinds = [change.kind for change in group]
    adapters = "method.kind" in keys and any(key in ("train.optimizer", "train.offload") for key in keys)
    return len(keys) > len(set(keys)) or len(kinds) > len(set(kinds)) or adapters


def _with_changes(
    config: RunConfig, model: ModelSpec, gpu: Gpu, group: tuple[Change, ...], count: int
) -> Advice | None:
    settings = {key: value for change in group for key, value in change.settings.items()}
    count = max(count, *(change.count for change in group))
    try:
        changed = with_settings(config, settings)
    except UserError:
        return None
    if unsupported_reason(gpu, count, changed):
        return None
    fit = fit_on(changed, model, plan_device(changed, gpu, count))  # no change is to the model
    if fit is None:
        return None
    speed = step_time(fit.workload, gpu).tokens_per_second
    return Advice(group, gpu, speed, fit.memory.device, int(host_bytes(fit.workload)))


@dataclass(frozen=True)
class Capacity:
    """What a memory of `size` bytes holds: of this run the largest micro batch and the longest rows, and the largest
    models by method. `checkpointing`: the activation checkpointing of all but `micro_batch`."""

    size: int
    global_batch: int
    given_length: int
    micro_batch: int | None
    checkpointing: str
    micro_batch_checkpointed: int | None
    length: int | None
    models: dict[str, tuple[ModelSpec, int] | None]


def what_fits(config: RunConfig, size: int) -> Capacity:
    """Into one GPU of so many bytes, its CUDA context included, with the margin of every plan. Lengths and models: with
    a micro batch of one row and the activation checkpointing that needs the least memory."""
    model, device = model_spec_of(config), _device_of(config, size)
    batch, length = config.train.global_batch, config.data.max_length
    given = "off" if config.train.activation_checkpointing == "auto" else config.train.activation_checkpointing
    least = least_memory_checkpointing(config)
    smallest = {"train.micro_batch": 1, "train.activation_checkpointing": least}
    learned = max(1.0, correction().memory)
    resolved = resolve_for(with_settings(config, smallest), model, device)

    def fits(workload: Workload) -> bool:
        return learned * memory(workload).enough <= size

    def largest(checkpointing: str) -> int | None:
        workloads = (sized(config, resolved.workload, device, n, checkpointing) for n in divisors(batch))
        return max((workload.micro_batch for workload in workloads if fits(workload)), default=None)

    longest, largest_models = _longest(resolved.workload, fits), _largest_models(resolved.workload, fits)
    return Capacity(size, batch, length, largest(given), least, largest(least), longest, largest_models)


def _longest(workload: Workload, fits: Callable[[Workload], bool]) -> int | None:
    """By bisection, in steps of 256 tokens."""
    low, high = 0, max(1, (workload.model.positions or 1 << 20) // 256)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(replace(workload, sequence_length=256 * middle)) else (low, middle - 1)
    return 256 * low or None


def _largest_models(workload: Workload, fits: Callable[[Workload], bool]) -> dict[str, tuple[ModelSpec, int] | None]:
    found: dict[str, tuple[ModelSpec, int] | None] = {}
    for method in ("full", "lora", "qlora"):
        tried = [replace(workload, model=model, method=method, fused_forwards=True) for model in models()]
        best = max(filter(fits, tried), key=lambda one: one.model.parameters, default=None)
        found[method] = (best.model, memory(best).device) if best else None
    return found


def _device_of(config: RunConfig, size: int) -> DeviceSpec:
    """A GPU of about that size that computes in bf16."""
    gpu = min((g for g in gpus() if g.capability), key=lambda g: (abs(g.plan_gib * 2**30 - size), g.name))
    device = catalog_device(config, gpu)
    if gpu.capability is None or gpu.capability < _BF16_CAPABILITY:
        device = replace(device, compute_capability=_BF16_CAPABILITY, precision="bf16")
    return device
