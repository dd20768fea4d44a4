"""A plan: for every GPU and platform whether the run fits, how it is cut up, how long it takes and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from sojourn.catalog.gpus import Gpu, gpus
from sojourn.catalog.models import ModelSpec
from sojourn.catalog.platforms import platforms
from sojourn.catalog.prices import Price
from sojourn.config.quantities import Money
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.estimate.memory import memory, room_in
from sojourn.estimate.step_time import Speed, has_rate, speed
from sojourn.estimate.workload import Work, place_of, work_of
from sojourn.plan.calibration import Correction, correction
from sojourn.plan.money import Bill, bill, with_disk, within
from sojourn.plan.prices import gpus_named, nothing_there, prices_on
from sojourn.plan.run_length import length_of
from sojourn.plan.run_time import Whole, checkpoint_bytes, preparing_seconds, whole_run
from sojourn.resolve.micro_batch import Cut, cut, divisors, ways_of
from sojourn.resolve.model_spec import subject_of

_GIB = 2**30
_TOO_OLD = (7, 0)  # current torch has no kernels for GPUs before it
TOO_SMALL = "too small"


@dataclass(frozen=True)
class Offer:
    """`count` GPUs of a kind for this run; without a cut not even one row fits, without a bill no price is known.

    `most_rows`: the largest micro batch that would fit, whatever is set.
    """

    gpu: Gpu
    count: int
    cut: Cut | None
    speed: Speed | None = None
    whole: Whole | None = None
    bill: Bill | None = None
    why_not: str = ""
    most_rows: int | None = None
    priced: bool = False

    @property
    def fits(self) -> bool:
        return self.cut is not None

    @property
    def micro_batch(self) -> int | None:
        return self.cut.work.rows if self.cut else None


@dataclass(frozen=True)
class Plan:
    shape: ModelSpec
    steps: int
    tokens: int
    assumed: str | None
    offers: tuple[Offer, ...]
    best: Offer | None
    fastest: Offer | None
    shown: Offer | None
    smallest: Cut
    checkpoint_bytes: int
    preparing_seconds: float
    correction: Correction


def make_plan(
    config: RunConfig, only: list[Gpu] | None = None, platform: str | None = None, budget: Money | None = None,
    deadline: float | None = None,
) -> Plan:  # fmt: skip
    shape = subject_of(config)
    steps, tokens, assumed = length_of(config)
    learned = correction()
    offers = [
        one
        for gpu in (only or gpus())
        for one in _offers_on(gpu, config, shape, steps, learned, prices_on(gpu, config, platform, only is not None))
    ]
    if platform is not None and not offers:
        raise UserError(nothing_there(platform, only, gpus_named(config)))
    offers.sort(key=_order)
    meeting = [o for o in offers if o.fits and o.bill is not None and within(o.bill, budget, deadline)]
    best = min(meeting, key=lambda o: (o.bill.cny, o.bill.elapsed) if o.bill else (0.0, 0.0), default=None)
    fastest = min(meeting, key=lambda o: o.bill.elapsed if o.bill else 0.0, default=None)
    shown = best or next((o for o in offers if o.cut), None)
    smallest = shown.cut if shown and shown.cut else least(config, shape, only[0] if only else None)
    return Plan(
        shape, steps, tokens, assumed, tuple(offers), best, fastest, shown, smallest, checkpoint_bytes(smallest.work),
        preparing_seconds(tokens if config.train.epochs is None else int(tokens / config.train.epochs)), learned,
    )  # fmt: skip


def least(config: RunConfig, shape: ModelSpec, gpu: Gpu | None = None) -> Cut:
    """One row at a time, as little kept as the settings allow: what there is to say of a run that fits nowhere."""
    place = place_of(gpu or next(card for card in gpus() if card.name == "H200"))
    rows = config.train.micro_batch if isinstance(config.train.micro_batch, int) else 1
    count = gpus_named(config) or 1
    engine = _engines(config, count)[-1]
    work = work_of(config, shape, place, rows, ways_of(config.train.activation_checkpointing)[-1], count, engine)
    return Cut(work, memory(work))


def room_of(gpu: Gpu, learned: Correction, count: int = 1) -> float:
    return room_in(gpu.plan_gib * _GIB, count) / max(1.0, learned.memory)  # never more than the model leaves


def fit_on(config: RunConfig, shape: ModelSpec, gpu: Gpu, count: int = 1, room: float | None = None) -> Cut | None:
    """How the run is cut up for so many GPUs of a kind: whole weights on each where they fit, else cut."""
    train = config.train
    asked = train.micro_batch if isinstance(train.micro_batch, int) else None
    batch = -(-train.global_batch // count)
    space = room if room is not None else room_of(gpu, correction(), count)
    for engine in _engines(config, count):
        make = partial(_work, config, shape, gpu, count, engine)
        found = cut(make, batch, config.data.max_length, space, ways_of(train.activation_checkpointing), asked, gpu)
        if found is not None:
            return found
    return None


def _engines(config: RunConfig, count: int) -> tuple[str | None, ...]:
    """Those to try where several GPUs share the run, the fastest first; None: what the settings say."""
    train, method, parallel = config.train, config.method, config.parallel
    if count == 1 or parallel.engine != "auto" or parallel.deepspeed is not None or train.offload == "all":
        return (None,)
    cannot_cut = train.optimizer != "adamw" or (method.kind == "qlora" and method.bits == 8)
    return ("ddp",) if cannot_cut else ("ddp", "fsdp")


def _work(
    config: RunConfig, shape: ModelSpec, gpu: Gpu, world: int, engine: str | None, rows: int, how: str
) -> Work:  # fmt: skip
    return work_of(config, shape, place_of(gpu), rows, how, world, engine)


def timed(config: RunConfig, found: Cut, gpu: Gpu, steps: int, learned: Correction) -> tuple[Speed, Whole]:
    fast = speed(found.work, gpu)
    fast = replace(fast, step_seconds=fast.step_seconds * learned.time_on(gpu.name))
    return fast, whole_run(config, found.work, gpu, fast, steps)


def _offers_on(
    gpu: Gpu, config: RunConfig, shape: ModelSpec, steps: int, learned: Correction, prices: list[Price] | list[None]
) -> list[Offer]:
    made: dict[int, Offer] = {}
    offers = []
    for price in prices:
        count = price.count if price else gpus_named(config) or 1
        if count not in made:
            made[count] = _bare(gpu, count, config, shape, steps, learned)
        offers.append(_billed(made[count], price, config))
    return offers


def _bare(gpu: Gpu, count: int, config: RunConfig, shape: ModelSpec, steps: int, learned: Correction) -> Offer:
    if why_not := _cannot_run(gpu, count, config, shape):
        return Offer(gpu, count, None, why_not=why_not)
    room = room_of(gpu, learned, count)
    found = fit_on(config, shape, gpu, count, room)
    if found is None:
        return Offer(gpu, count, None, why_not=TOO_SMALL)
    most = _most_rows(found, config, room)
    if not has_rate(gpu):
        return Offer(gpu, count, found, most_rows=most)
    fast, whole = timed(config, found, gpu, steps, learned)
    return Offer(gpu, count, found, fast, whole, most_rows=most)


def _cannot_run(gpu: Gpu, count: int, config: RunConfig, shape: ModelSpec) -> str | None:
    """What of the settings this kind of GPU refuses, as the training machine would."""
    train, qlora = config.train, config.method.kind == "qlora"
    if count > train.global_batch:
        return f"train.global_batch={train.global_batch} is fewer rows than GPUs"
    if gpu.capability is not None and gpu.capability < _TOO_OLD:
        return "current torch has no kernels for it"
    if train.device in ("cuda", "mps") and (train.device == "mps") != gpu.unified:
        return f"train.device is {train.device}"
    if gpu.unified and count > 1:
        return "one to a machine"
    if gpu.unified and (qlora or train.optimizer in ("adamw_8bit", "paged_adamw", "paged_adamw_8bit")):
        return f"no {'qlora' if qlora else train.optimizer} there"
    work = work_of(config, shape, place_of(gpu))
    if gpu.unified and work.precision == "fp16":
        return "no fp16 there"
    if work.fp8 != "off" and not (work.capability >= (8, 9) and work.precision == "bf16" and work.fused):
        return "no train.fp8 there"
    if work.attention in ("varlen", "flash_attention_2") and (work.capability < (8, 0) or work.precision == "fp32"):
        return f"no {work.attention} attention there"
    return None


def _most_rows(found: Cut, config: RunConfig, room: float) -> int:
    rows = [n for n in divisors(-(-config.train.global_batch // found.work.world)) if n >= found.work.rows]
    fitting = takewhile(lambda n: memory(replace(found.work, rows=n)).device <= room, rows)
    return max(fitting, default=found.work.rows)


def _billed(offer: Offer, price: Price | None, config: RunConfig) -> Offer:
    own = config.limits.price_per_hour
    offer = replace(offer, priced=price is not None)
    if offer.whole is None or offer.cut is None or (price is None and own is None):
        return offer
    place = next((p for p in platforms() if price and p.name == price.platform), None)
    charged = price or Price("generic", offer.gpu.name, 0.0, "your price", "")
    found = bill(charged, place, offer.whole.seconds, offer.whole.again, own)
    size = checkpoint_bytes(offer.cut.work)
    return replace(offer, bill=with_disk(found, place, 2 * size, (config.save.keep + 2) * size))


def _order(offer: Offer) -> tuple[bool, bool, float, float]:
    cost = offer.bill.cny if offer.bill else 0.0
    hours = offer.whole.seconds if offer.whole else float("inf")
    return not offer.fits, offer.bill is None, cost, hours
