"""A plan: for every GPU and platform whether the run fits, with which settings, how long it takes and what it costs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile

from sojourn.catalog.gpus import Gpu, gpus
from sojourn.catalog.models import ModelSpec
from sojourn.catalog.platforms import platforms
from sojourn.catalog.prices import Price
from sojourn.config.quantities import Money
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.estimate.ceilings import has_rate
from sojourn.estimate.memory import memory
from sojourn.estimate.step_time import StepTime, step_time
from sojourn.estimate.uncertainty import MEASURED, range_reason
from sojourn.expand_user import expand_user
from sojourn.plan.calibration import Correction, correction
from sojourn.plan.epoch import timed_workload
from sojourn.plan.money import Bill, bill, with_disk, within
from sojourn.plan.prices import describe_no_price, gpus_named, prices_on
from sojourn.plan.run_length import RunLength, run_length
from sojourn.plan.run_time import RunTime, checkpoint_bytes, preparing_seconds, run_time
from sojourn.resolve.device_spec import DeviceSpec, catalog_device
from sojourn.resolve.ds_config import config_from_file
from sojourn.resolve.micro_batch import Fit, divisors
from sojourn.resolve.model_spec import model_spec_of
from sojourn.resolve.resolve import Resolution, resolve
from sojourn.resolve.resolved import Unsupported, with_value

_OLDEST = (7, 0)  # current torch has no kernels for GPUs of an older compute capability
_IN_ALL_BUILDS = (7, 5)  # pytorch/pytorch issue 172352, pull request 175253: 2.11 dropped Volta but for CUDA 12.6
_FOR_NO_GPU = "H200"  # described where the user names no GPU and the run fits on none
TOO_SMALL = "too small"


@dataclass(frozen=True)
class Offer:
    """`count` GPUs of a kind for this run; without a fit not even one row fits, without a bill no price is known.

    reason_not           why it does not fit, or cannot run
    range_reason         why its time is known as well as it is
    largest_micro_batch  that would fit, whatever is set
    """

    gpu: Gpu
    count: int
    fit: Fit | None
    step: StepTime | None = None
    run_time: RunTime | None = None
    bill: Bill | None = None
    reason_not: str = ""
    largest_micro_batch: int | None = None
    priced: bool = False
    range_reason: str = ""

    @property
    def fits(self) -> bool:
        return self.fit is not None

    @property
    def micro_batch(self) -> int | None:
        return self.fit.workload.micro_batch if self.fit else None


@dataclass(frozen=True)
class Plan:
    """`shown`: the offer whose `fit` the screen shows; None where the run fits nowhere, and `fit` is the smallest."""

    model: ModelSpec
    length: RunLength
    offers: tuple[Offer, ...]
    best: Offer | None
    fastest: Offer | None
    shown: Offer | None
    fit: Fit
    checkpoint_bytes: int
    preparing_seconds: float
    correction: Correction


def make_plan(
    config: RunConfig, only: list[Gpu] | None = None, platform: str | None = None, budget: Money | None = None,
    deadline: float | None = None,
) -> Plan:  # fmt: skip
    model, learned = model_spec_of(config), correction()
    length = run_length(config, model.vocab)
    offers = [
        offer
        for gpu in (only or [gpu for gpu in gpus() if not gpu.refused])
        for offer in _offers_on(gpu, config, model, length, learned, prices_on(gpu, config, platform, only is not None))
    ]
    if platform is not None and not offers:
        raise UserError(describe_no_price(platform, only, gpus_named(config)))
    offers.sort(key=_order)
    meeting = [o for o in offers if o.fits and o.bill is not None and within(o.bill, budget, deadline)]
    meeting = [o for o in meeting if not o.gpu.not_run] or meeting
    best = min(meeting, key=lambda o: (o.bill.high.cny, o.bill.high.elapsed) if o.bill else (0.0, 0.0), default=None)
    fastest = min(meeting, key=lambda o: o.bill.high.elapsed if o.bill else 0.0, default=None)
    shown = best or next((o for o in offers if o.fits), None)
    fit = shown.fit if shown and shown.fit else _smallest_fit(config, model, only[0] if only else None)
    if config.parallel.deepspeed is not None and shown is not None:
        _check_deepspeed_file(config, model, shown)
    one_epoch = length.tokens if config.train.epochs is None else int(length.tokens / config.train.epochs)
    return Plan(
        model, length, tuple(offers), best, fastest, shown, fit, checkpoint_bytes(fit.workload),
        preparing_seconds(one_epoch), learned,
    )  # fmt: skip


def _check_deepspeed_file(config: RunConfig, model: ModelSpec, offer: Offer) -> None:
    """As a run checks it, with the settings that a run there would have."""
    found = resolve_for(config, model, plan_device(config, offer.gpu, offer.count))
    config_from_file(expand_user(str(config.parallel.deepspeed)), found.config, offer.count)


def torch_build(gpu: Gpu) -> str | None:
    """What to install for a GPU that torch's default builds no longer carry."""
    if gpu.capability is None or gpu.capability >= _IN_ALL_BUILDS:
        return None
    return "needs torch's CUDA 12.6 build: from 2.11 on the others have no kernels for Volta"


def plan_device(config: RunConfig, gpu: Gpu, count: int = 1, learned: Correction | None = None) -> DeviceSpec:
    """A rank of the run on `count` GPUs of a kind, with what earlier runs here have shown of memory."""
    return catalog_device(config, gpu, count, (learned or correction()).memory)


def resolve_for(config: RunConfig, model: ModelSpec, device: DeviceSpec) -> Resolution:
    """Plans are for GPUs, even of a run that is set to a CPU."""
    return resolve(_without_cpu(config), model, device)


def fit_on(config: RunConfig, model: ModelSpec, device: DeviceSpec) -> Fit | None:
    """The run as it is resolved for a device; None where not even one row fits, or the device does not support it."""
    with suppress(Unsupported):
        found = resolve_for(config, model, device)
        return Fit(found.workload, found.memory) if found.fits else None
    return None


def _without_cpu(config: RunConfig) -> RunConfig:
    return with_value(config, "train", "device", "auto") if config.train.device == "cpu" else config


def _smallest_fit(config: RunConfig, model: ModelSpec, gpu: Gpu | None) -> Fit:
    """The least memory that the settings allow: for the screen of a run that fits nowhere."""
    usual = next(card for card in gpus() if card.name == _FOR_NO_GPU)

    anywhere = with_value(config, "train", "device", "auto")

    def smallest(card: Gpu) -> Fit:
        full = replace(catalog_device(config, card, gpus_named(config) or 1), free_bytes=0.0)
        workload = resolve_for(anywhere, model, full).workload
        return Fit(workload, memory(workload))

    with suppress(Unsupported):
        return smallest(gpu or usual)
    return smallest(usual)


def timed(config: RunConfig, fit: Fit, gpu: Gpu, length: RunLength, learned: Correction) -> tuple[StepTime, RunTime]:
    """A card on which runs were measured here is as well known as one that we measured."""
    workload = timed_workload(fit.workload, length.lengths, config.data.packing)
    step = step_time(workload, gpu)
    if gpu.name in learned.times:
        step = replace(step, spread=step_time(workload, replace(gpu, rates=MEASURED)).spread)
    step = replace(step, step_seconds=step.step_seconds * learned.time_on(gpu.name))
    return step, run_time(config, fit.workload, gpu, step, length.steps)


def _offers_on(
    gpu: Gpu, config: RunConfig, model: ModelSpec, length: RunLength, learned: Correction,
    prices: list[Price] | list[None],
) -> list[Offer]:  # fmt: skip
    made: dict[int, Offer] = {}
    offers = []
    for price in prices:
        count = price.count if price else gpus_named(config) or 1
        if count not in made:
            made[count] = _unpriced(gpu, count, config, model, length, learned)
        offers.append(_billed(made[count], price, config))
    return offers


def _unpriced(
    gpu: Gpu, count: int, config: RunConfig, model: ModelSpec, length: RunLength, learned: Correction
) -> Offer:
    if reason := unsupported_reason(gpu, count, config):
        return Offer(gpu, count, None, reason_not=reason)
    device = plan_device(config, gpu, count, learned)
    try:
        found = resolve_for(config, model, device)
    except Unsupported as error:
        return Offer(gpu, count, None, reason_not=str(error))
    if not found.fits:
        return Offer(gpu, count, None, reason_not=TOO_SMALL)
    fit = Fit(found.workload, found.memory)
    largest = _largest_micro_batch(fit, config, device)
    if not has_rate(gpu):
        return Offer(gpu, count, fit, largest_micro_batch=largest)
    step, whole = timed(config, fit, gpu, length, learned)
    why = "corrected by runs measured here" if gpu.name in learned.times else range_reason(gpu, count)
    return Offer(gpu, count, fit, step, whole, largest_micro_batch=largest, range_reason=why)


def unsupported_reason(gpu: Gpu, count: int, config: RunConfig) -> str | None:
    """Why this kind of GPU cannot run it, beside what `resolve` refuses."""
    train, qlora = config.train, config.method.kind == "qlora"
    if gpu.refused:
        return gpu.refused
    if count > train.global_batch:
        return f"train.global_batch={train.global_batch} is fewer rows than GPUs"
    if gpu.capability is not None and gpu.capability < _OLDEST:
        return "current torch has no kernels for it"
    if gpu.unified and count > 1:
        return "one to a machine"
    if gpu.unified and (qlora or train.optimizer in ("adamw_8bit", "paged_adamw", "paged_adamw_8bit")):
        return f"no {'qlora' if qlora else train.optimizer} there"
    return None


def _largest_micro_batch(fit: Fit, config: RunConfig, device: DeviceSpec) -> int:
    workload, budget = fit.workload, device.memory_budget or 0.0
    rows = [n for n in divisors(-(-config.train.global_batch // device.ranks)) if n >= workload.micro_batch]
    fitting = takewhile(lambda n: memory(replace(workload, micro_batch=n)).device <= budget, rows)
    return max(fitting, default=workload.micro_batch)


def _billed(offer: Offer, price: Price | None, config: RunConfig) -> Offer:
    own = config.limits.price_per_hour
    offer = replace(offer, priced=price is not None)
    if offer.run_time is None or offer.fit is None or (price is None and own is None):
        return offer
    platform = next((p for p in platforms() if price and p.name == price.platform), None)
    charged = price or Price("generic", offer.gpu.name, 0.0, "your price", "")
    whole = offer.run_time
    found = bill(charged, platform, whole.seconds, whole.again, own, whole.between)
    size = checkpoint_bytes(offer.fit.workload)
    return replace(offer, bill=with_disk(found, platform, 2 * size, (config.save.keep + 2) * size))


def _order(offer: Offer) -> tuple[bool, bool, float, float]:
    """By what it may cost and take at most."""
    cost = offer.bill.high.cny if offer.bill else 0.0
    seconds = offer.run_time.between[1] if offer.run_time else float("inf")
    return not offer.fits, offer.bill is None, cost, seconds
