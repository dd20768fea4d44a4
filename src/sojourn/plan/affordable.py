"""What a budget or a time trains: for each model size and method the most tokens, and the offer where that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sojourn.catalog.gpus import Gpu, gpus
from sojourn.catalog.models import ModelSpec
from sojourn.catalog.platforms import PlatformFacts, platforms
from sojourn.catalog.prices import Price
from sojourn.config.load import load_run
from sojourn.config.quantities import Money
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.estimate.ceilings import has_rate, matmul_rate
from sojourn.plan.calibration import Correction, correction
from sojourn.plan.money import in_cny
from sojourn.plan.offers import fit_on, plan_device, timed, unsupported_reason
from sojourn.plan.prices import prices_on
from sojourn.plan.run_length import RunLength
from sojourn.plan.run_time import run_time
from sojourn.resolve.model_spec import model_spec_of

MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b")
METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
ROW_LENGTH, GLOBAL_BATCH = 2048, 16
USUAL_HOURS = 24.0  # where no time is given
TOKENS_PER_PARAMETER = 20  # of a model from scratch
_NEW_SIZES = ("10M", "20M", "40M", "80M", "160M", "320M", "640M", "1.3B")
_ROWS = {"qwen2.5-0.5b": 4, "qwen2.5-1.5b": 2}  # of a micro batch; larger models are as fast with one
_LEAST_TOKENS = 100_000
_BEST_SHARE = 0.85  # of a step in matmuls at the rate that a GPU sustains; no planned step has more
_LEAST_BYTES = {"full": 12.0, "lora": 2.0, "qlora": 0.5, "pretrain": 12.0}  # of a parameter, on all GPUs together


@dataclass(frozen=True)
class Affordable:
    """The most tokens that one method trains a model on, at the slow end of the estimate."""

    model: ModelSpec
    method: str
    tokens: int
    gpu: Gpu
    price: Price
    platform: PlatformFacts | None
    hours: float

    @property
    def cost(self) -> float:
        each = self.price.per_hour if self.price.per_hour is not None else self.price.cny_per_hour
        return each * self.hours


@dataclass(frozen=True)
class _Candidate:
    gpu: Gpu
    price: Price
    platform: PlatformFacts | None
    hours: float  # that budget and time allow there
    weight: float  # what a token there is worth: 1, or 1 over the cost where the best value is looked for

    @property
    def flops(self) -> float:
        return 3600 * self.hours * self.price.count * matmul_rate("bf16", self.gpu) if has_rate(self.gpu) else 0.0


def affordable(
    budget: Money | None, hours: float | None, cards: list[Gpu] | None = None, platform: str | None = None
) -> tuple[dict[str, dict[str, Affordable | None]], Affordable | None]:
    """By model and method; and the largest model from scratch that gets 20 tokens a parameter."""
    candidates = _candidates(budget, USUAL_HOURS if hours is None else hours, cards, platform)
    table: dict[str, dict[str, Affordable | None]] = {}
    for name in MODELS:
        table[name] = {}
        for method in METHODS:
            rows = _ROWS.get(name, 1)
            words = [f"model.base={name}", f"method.kind={method}", f"data.max_length={ROW_LENGTH}"]
            table[name][method] = _most_tokens(_config([*words, f"train.micro_batch={rows}"]), candidates)
    return table, _largest_from_scratch(candidates)


def _config(words: list[str]) -> RunConfig:
    return load_run([*words, f"train.global_batch={GLOBAL_BATCH}", "train.steps=1000"]).config


def _largest_from_scratch(candidates: Sequence[_Candidate]) -> Affordable | None:
    """By bisection over the sizes."""
    best, low, high = None, 0, len(_NEW_SIZES) - 1
    while low <= high:
        middle = (low + high) // 2
        found = _most_tokens(_config([f"model.params={_NEW_SIZES[middle]}", "method.kind=pretrain"]), candidates)
        if found is not None and found.tokens >= TOKENS_PER_PARAMETER * found.model.parameters:
            best, low = found, middle + 1
        else:
            high = middle - 1
    return best


def _candidates(budget: Money | None, hours: float, cards: list[Gpu] | None, platform: str | None) -> list[_Candidate]:
    """Every priced offer of the catalogue, and how long it may run; those that compute most come first. Without a
    budget those that compute most for the money, of single GPUs that cost something, if there are any."""
    config = _config([f"model.base={MODELS[0]}", "method.kind=lora"])
    places = {row.name: row for row in platforms()}
    found = []
    for gpu in cards or [one for one in gpus() if not (one.refused or one.not_run)]:
        for price in prices_on(gpu, config, platform, cards is not None):
            if price is None and cards is None:
                continue
            if price is None and budget is not None and not gpu.unified:
                raise UserError(
                    f"no price of {gpu.name} is known; add it: sojourn catalog add price PLATFORM {gpu.name!r} ¥2"
                )
            offer = price or Price("generic", gpu.name, 0.0, "no price known", "")
            place = places.get(offer.platform)
            found.append(_Candidate(gpu, offer, place, _gpu_hours(offer, place, budget, hours), 1.0))
    paid = [one for one in found if one.price.cny_per_hour > 0 and one.price.count == 1]
    if budget is None and paid:
        found = [replace(one, weight=1 / (one.hours * one.price.cny_per_hour)) for one in paid if one.hours]
    by_card: dict[tuple[str, int], _Candidate] = {}
    for one in sorted(found, key=lambda one: -one.weight * one.flops):
        by_card.setdefault((one.gpu.name, one.price.count), one)  # of a card the best offer
    return list(by_card.values())


def _gpu_hours(price: Price, platform: PlatformFacts | None, budget: Money | None, hours: float) -> float:
    """Hours on the GPU that budget, time and a weekly quota leave."""
    quota = platform.weekly_gpu_hours if platform else None
    within = hours if quota is None else hours // 168 * quota + min(hours % 168, quota)
    if budget is None or price.cny_per_hour == 0:
        return within
    return min(within, in_cny(float(budget.amount), budget.currency or price.currency) / price.cny_per_hour)


def _most_tokens(config: RunConfig, candidates: Sequence[_Candidate]) -> Affordable | None:
    """Goes on as long as another offer might be better, if it did hardly anything but matmuls."""
    model, best, worth, learned = model_spec_of(config), None, 0.0, correction()
    each = model.flops_per_token(0, frozen=config.method.kind in ("lora", "qlora"))
    for one in candidates:
        if _BEST_SHARE * one.weight * one.flops / each < worth:
            break
        least = _LEAST_BYTES[config.method.kind] * model.parameters / one.price.count
        found = _on(config, model, one, learned) if least < one.gpu.plan_gib * 2**30 else None
        if found is not None and one.weight * found.tokens > worth:
            best, worth = found, one.weight * found.tokens
    return best if best is not None and best.tokens >= _LEAST_TOKENS else None


def _on(config: RunConfig, model: ModelSpec, one: _Candidate, learned: Correction) -> Affordable | None:
    if not one.flops or unsupported_reason(one.gpu, one.price.count, config):
        return None
    fit = fit_on(config, model, plan_device(config, one.gpu, one.price.count, learned))
    if fit is None:
        return None
    step, short = timed(config, fit, one.gpu, RunLength(1000, 0), learned)
    long = run_time(config, fit.workload, one.gpu, step, 2000)
    each = (long.between[1] - short.between[1]) / 1000
    fixed = max(0.0, short.between[1] - 1000 * each)
    session = one.platform.session_hours if one.platform else None
    sessions = math.ceil(one.hours / session) if session else 1
    left = 3600 * one.hours - fixed - max(0, sessions - 1) * short.again
    steps = int(left / each)
    if steps < 1:
        return None
    tokens = steps * config.train.global_batch * config.data.max_length
    return Affordable(model, config.method.kind, tokens, one.gpu, one.price, one.platform, one.hours)
