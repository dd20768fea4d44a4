"""What to change when a run does not fit, ranked by what it costs in speed, or to be faster where memory is left; and
the other way round, what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from sojourn.catalog.gpus import Gpu, gpus
from sojourn.catalog.models import ModelSpec, models
from sojourn.config.load import with_settings
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.estimate.memory import memory
from sojourn.estimate.step_time import speed
from sojourn.estimate.workload import Place, Work, work_of
from sojourn.plan.calibration import correction
from sojourn.plan.offers import TOO_SMALL, Plan, fit_on
from sojourn.plan.prices import gpus_named, most_gpus
from sojourn.resolve.micro_batch import WORTH, divisors
from sojourn.resolve.model_spec import subject_of

_MOST_CHANGES = 3
_RECOMPUTED = ("full", "selective")
_SHORTEST, _LONG = 256, 32_768  # rows that are not halved further, and rows that are halved more often


@dataclass(frozen=True)
class Change:
    """`settings` as they are typed, `says` what they do; `count` GPUs are needed then."""

    says: str
    settings: dict[str, Any]
    count: int = 1


@dataclass(frozen=True)
class Advice:
    """Changes that together make the run fit on a GPU, and the tokens a second that it then has."""

    changes: tuple[Change, ...]
    gpu: Gpu
    tokens_per_second: float
    memory: int

    @property
    def typed(self) -> str:
        words = [f"{key}={value}" for change in self.changes for key, value in change.settings.items()]
        count = max(change.count for change in self.changes)
        return " ".join([*words, *([f"--gpus {','.join(map(str, range(count)))}"] if count > 1 else [])])


def advise(config: RunConfig, gpu: Gpu, most: int | None = None) -> list[Advice]:
    """The fastest first; of combinations only those of which no part would do alone. There are `most` GPUs, if any."""
    shape, found, enough = subject_of(config), list[Advice](), list[frozenset[str]]()
    changes = [change for change in _changes(config, shape) if most is None or change.count <= most]
    for size in range(1, _MOST_CHANGES + 1):
        for group in combinations(changes, size):
            names = frozenset(change.says for change in group)
            if any(less <= names for less in enough) or _clash(group):
                continue
            one = _tried(config, shape, gpu, group, gpus_named(config) or 1)
            if one is not None:
                found.append(one)
                enough.append(names)
        if len(found) >= 3:
            break
    return sorted(found, key=lambda one: -one.tokens_per_second)[:6]


def advise_for(
    config: RunConfig, plan: Plan, cards: list[Gpu] | None, platform: str | None = None
) -> tuple[Gpu | None, list[Advice]]:
    """Where the run fits on none of the GPUs asked for, or on none with a price: for the largest of them."""
    offers = [o for o in plan.offers if o.gpu.capability is not None and (o.fits or o.why_not == TOO_SMALL)]
    if any(o.fits and (o.bill is not None or cards) for o in offers):
        return None, []
    asked = [o.gpu for o in offers if cards or o.priced] or [o.gpu for o in offers]
    if not asked:
        return None, []
    target = max(asked, key=lambda card: card.plan_gib)
    return target, advise(config, target, most_gpus(target, platform))


def faster(config: RunConfig, plan: Plan) -> Advice | None:
    """What memory that is left buys on the GPU that a plan shows, for the same result: settings to be left to it."""
    shown, train = plan.shown, config.train
    if shown is None or shown.cut is None or shown.speed is None:
        return None
    now = speed(shown.cut.work, shown.gpu).tokens_per_second
    left = (
        [Change("keep what fits", {"train.activation_checkpointing": "auto"})]
        if train.activation_checkpointing in _RECOMPUTED
        else []
    )
    left += [Change("as many rows as fit", {"train.micro_batch": "auto"})] if train.micro_batch != "auto" else []
    groups = [group for size in range(1, len(left) + 1) for group in combinations(left, size)]
    found = [one for group in groups if (one := _tried(config, plan.shape, shown.gpu, group, shown.count)) is not None]
    best = max((one.tokens_per_second for one in found), default=0.0)
    if best < WORTH * now:
        return None
    least = next(one for one in found if one.tokens_per_second >= best / WORTH)  # with the fewest changes
    return replace(least, tokens_per_second=least.tokens_per_second / now * shown.speed.tokens_per_second)


def _changes(config: RunConfig, shape: ModelSpec) -> Iterator[Change]:
    train, method, length = config.train, config.method, config.data.max_length
    if train.micro_batch not in (1, "auto"):
        yield Change("one row at a time", {"train.micro_batch": 1})
    if train.activation_checkpointing in ("off", "selective"):
        yield Change("recompute activations", {"train.activation_checkpointing": "full"})
    if config.advanced.chunked_loss == "off":
        yield Change("logits in chunks", {"advanced.chunked_loss": "on"})
    if method.kind in ("full", "pretrain") and train.optimizer == "adamw" and train.offload == "off":
        yield Change("8-bit moments", {"train.optimizer": "adamw_8bit"})
        yield Change("moments in the host's memory", {"train.offload": "optimizer"})
    if method.kind == "lora":
        yield Change("the base in 4 bits", {"method.kind": "qlora"})
    if method.kind == "full":
        yield Change("train adapters only", {"method.kind": "lora"})
        yield Change("adapters on a base in 4 bits", {"method.kind": "qlora"})
    for part in (2, 4) if length < _LONG else (2, 4, 8, 16):
        if length // part >= _SHORTEST:
            yield Change(f"rows of {length // part:,} tokens", {"data.max_length": length // part})
    other = {} if train.optimizer == "adamw" else {"train.optimizer": "adamw"}  # which FSDP can cut
    if config.parallel.engine == "single":
        other["parallel.engine"] = "auto"
    for count in (2, 4, 8):
        if (gpus_named(config) or 1) < count <= train.global_batch:
            yield Change(f"{count} GPUs", other, count)


def _clash(group: tuple[Change, ...]) -> bool:
    keys = [key for change in group for key in change.settings]
    adapters = any(change.settings.get("method.kind") for change in group)
    moments = any(key in ("train.optimizer", "train.offload") for key in keys)
    both = {"train.optimizer", "train.offload"} <= set(keys)
    return len(keys) > len(set(keys)) or sum(change.count > 1 for change in group) > 1 or (adapters and moments) or both


def _tried(
    config: RunConfig, shape: ModelSpec, gpu: Gpu, group: tuple[Change, ...], count: int
) -> Advice | None:  # fmt: skip
    settings = {key: value for change in group for key, value in change.settings.items()}
    count = max(count, *(change.count for change in group))
    try:
        changed = with_settings(config, settings)
    except UserError:
        return None
    found = fit_on(changed, shape, gpu, count)  # no change is to the model
    if found is None:
        return None
    return Advice(group, gpu, speed(found.work, gpu).tokens_per_second, found.memory.device)


@dataclass(frozen=True)
class Inverse:
    """What so much memory holds: of this run the most rows and the longest rows, and the largest models by method."""

    room: int
    global_batch: int
    given_length: int
    rows: int | None
    rows_recomputed: int | None
    length: int | None
    models: dict[str, tuple[ModelSpec, int] | None]


def what_fits(config: RunConfig, room: int) -> Inverse:
    """`room`: bytes of a card, its context included; "fits" as in a plan, on one GPU. One row at a time and all
    recomputed where it says the most."""
    shape, place = subject_of(config), _place(room)
    batch, length = config.train.global_batch, config.data.max_length
    given = "off" if config.train.activation_checkpointing == "auto" else config.train.activation_checkpointing

    learned = max(1.0, correction().memory)

    def fits(work: Work) -> bool:
        return learned * memory(work).enough <= room

    def rows(how: str) -> int | None:
        return max((n for n in divisors(batch) if fits(work_of(config, shape, place, n, how))), default=None)

    one = work_of(config, shape, place, 1, "full")
    found, longest = (rows(given), rows("full")), _longest(one, shape, fits)
    return Inverse(room, batch, length, *found, longest, _largest(one, fits))


def _longest(one: Work, shape: ModelSpec, fits: Any) -> int | None:
    """By halving, in steps of 256 tokens."""
    low, high = 0, max(1, (shape.positions or 1 << 20) // 256)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(replace(one, length=256 * middle)) else (low, middle - 1)
    return 256 * low or None


def _largest(one: Work, fits: Any) -> dict[str, tuple[ModelSpec, int] | None]:
    """Of the catalogue, with one row of the run's length, all recomputed."""
    found: dict[str, tuple[ModelSpec, int] | None] = {}
    for method in ("full", "lora", "qlora"):
        tried = [replace(one, shape=shape, method=method, fused=True) for shape in models()]
        fitting = [work for work in tried if fits(work)]
        best = max(fitting, key=lambda work: work.shape.parameters, default=None)
        found[method] = (best.shape, memory(best).device) if best else None
    return found


def _place(room: int) -> Place:
    """A card of about that size."""
    card = min((g for g in gpus() if g.capability), key=lambda g: (abs(g.plan_gib * 2**30 - room), g.name))
    able = card.capability is not None and card.capability >= (8, 0)
    return Place("cuda", card.capability if able else (8, 6), "bf16")
