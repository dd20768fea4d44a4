"""A plan as text: one screen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from textwrap import wrap
from unicodedata import east_asian_width

from sojourn.config.schema import RunConfig
from sojourn.estimate.model_states import host_bytes
from sojourn.plan.advice import Advice, Capacity
from sojourn.plan.calibration import Correction
from sojourn.plan.epoch import Epoch
from sojourn.plan.money import Bill, money_text
from sojourn.plan.offers import TOO_SMALL, Offer, Plan, plan_device, resolve_for, torch_build
from sojourn.plan.prices import describe_rates
from sojourn.plan.ranges import cost_range, count_text, rate_text, time_range, time_text
from sojourn.plan.run_length import RunLength
from sojourn.plan.vocabulary import assumed_vocabulary
from sojourn.resolve.families import describe_stored
from sojourn.resolve.micro_batch import Fit

_GIB = 2**30
_UNSURE = 0.25  # share of a step in kernel launch overhead, and of the run in steps, from which on a plan warns
_BAR = 56
_MOST_ROWS = 14  # of the table where neither a GPU nor a platform is named
_MOST_NAMES = 12  # of GPUs without a price that fit
_OUTSIDE = "CUDA context and fragmentation"  # memory that torch does not count as allocated
_COLUMNS = {"mb": 4, "max mb": 8, "GiB": 6, "tok/s": 10, "time": 10, "cost": 14}
_MARKS = {"weights": "█", "adapters": "▪", "gradients": "▓", "optimizer states": "▒", "activations": "▚",
          "logits": "▞", "temporary buffers": "░", _OUTSIDE: "·"}  # fmt: skip


def screen_width() -> int:
    return max(60, min(120, shutil.get_terminal_size((120, 40)).columns))


def folded(lines: list[str], width: int) -> Iterator[str]:
    """Wraps long lines, with an indent. No-break spaces hold together what must stay on one line."""
    for line in lines:
        wide = _cells(line) - len(line)
        indent = " " * (2 + len(line) - len(line.lstrip()))
        for part in wrap(line, width - wide, subsequent_indent=indent, break_on_hyphens=False) or [""]:
            yield part.replace("\u00a0", " ").rstrip()


def _cells(text: str) -> int:
    """Columns in a terminal: wide characters take two."""
    return len(text) + sum(east_asian_width(letter) in "WF" for letter in text)


def _unbroken(text: str) -> str:
    return text.replace(" ", "\u00a0")


def length_text(length: RunLength) -> str:
    steps = f"{'' if length.exact else 'about '}{length.steps:,} step{'' if length.steps == 1 else 's'}"
    return f"{steps}, about {count_text(length.tokens)} tokens"


def summary_lines(config: RunConfig, plan: Plan, named: bool) -> list[str]:
    model, method = plan.model, config.method
    size = count_text(model.parameters)
    active = f" ({count_text(model.active_parameters)} active, without the embedding)" if model.experts else ""
    how = {"pretrain": "from scratch", "full": "all weights"}.get(method.kind, f"{method.kind}, rank {method.rank}")
    name = f"{config.name}: {model.name}" if config.name else model.name
    length = plan.length
    lines = [f"{name}, {size} parameters{active}, {how}; {length_text(length)}"]
    if model.note and not model.hub:
        lines.append(f"note: {model.note}")
    if model.caveat:
        lines.append(f"note: {model.caveat}")
    if 0 < model.positions < config.data.max_length:
        lines.append(
            f"note: data.max_length is {config.data.max_length:,}, but this model holds {model.positions:,} tokens"
        )
    if config.train.device == "cpu":
        lines.append("note: train.device is cpu, whose speed is not estimated; what follows is for GPUs")
    if config.limits.price_per_hour is not None and not named:
        lines.append("note: limits.price_per_hour is used for every GPU below; name yours with --gpu")
    stored = describe_stored(model.stored, method.kind)
    assumed = (stored, assumed_vocabulary(config), length.assumed, *length.notes)
    return [*lines, *_documents(config, length.epoch), *(f"note: {text}" for text in assumed if text)]


def _documents(config: RunConfig, epoch: Epoch | None) -> list[str]:
    """How long the documents are, and what of a row they fill."""
    if epoch is None or epoch.assumed:
        return []
    row, packing, about = config.data.max_length, config.data.packing, "" if epoch.exact else "about "
    mean = sum(epoch.lengths) / len(epoch.lengths)
    how = {"off": "one document each, no wider than the longest of a micro batch", "padded": "one document each"}
    rows = f"{about}{round(epoch.rows):,} rows of {row:,}, {how.get(packing, packing)}"
    filled = f"{100 * epoch.tokens / epoch.rows / row:.0f} % filled"
    return [f"data: {about}{count_text(epoch.tokens)} tokens in documents of {mean:,.0f} on average; {rows}, {filled}"]


def memory_lines(fit: Fit, where: str = "") -> list[str]:
    workload, needed, offloaded = fit.workload, fit.memory, host_bytes(fit.workload)
    kinds = {**needed.peak.by_kind(), _OUTSIDE: needed.device - needed.allocated}
    kinds = {kind: size for kind, size in kinds.items() if size >= 0.005 * _GIB or kind == "weights"}
    bar = "".join(_MARKS[kind] * max(1, round(_BAR * size / needed.device)) for kind, size in kinds.items())
    legend = "  ".join(_unbroken(f"{_MARKS[kind]} {kind} {size / _GIB:.2f}") for kind, size in kinds.items())
    checkpointing = workload.activation_checkpointing
    rows = f"{workload.micro_batch} × {workload.sequence_length:,} tokens"
    return [
        f"memory{where}: {needed.device / _GIB:.1f} GiB of the GPU, {needed.allocated / _GIB:.1f} of it allocated by "
        f"torch; micro batch {rows}, {workload.precision}, activation checkpointing {checkpointing}",
        f"  {bar}",
        f"  GiB: {legend}",
        f"  peak: {needed.peak.name}",
        *([f"  and {offloaded / _GIB:.1f} GiB of host memory, for what is offloaded"] if offloaded else []),
    ]


def table_lines(
    plan: Plan, everything: bool, width: int, platform: str | None = None, currency: str | None = None
) -> list[str]:
    """Offers with a price, one a line; the others in one line each for those that fit and those that do not. Without a
    GPU or a platform named, the cheapest offer of each card. `currency`: of the budget."""
    asked = [o for o in plan.offers if everything or o.bill is not None]
    refused = {_card(o): o for o in asked if not o.fits}  # once, wherever it might be rented
    fitting = [o for o in asked if o.fits]
    shown = fitting if everything or platform else _shortened(fitting)
    left = len(fitting) - len(shown)
    listed = [*shown, *refused.values()]
    first = 1 + max((len(_card(o)) for o in listed), default=0)
    title = f"{'GPU':<{first}}" + "".join(f"{name:>{size}}" for name, size in _COLUMNS.items()) + "  where"
    lines = [title] if listed else []
    explained = "mb: micro batch of the plan; max mb: largest micro batch that fits"
    for offer in listed:
        row, notes = _row(offer, first), "; ".join(_notes(offer))
        if notes and _cells(row) + len(notes) + 3 > width:
            lines += [row, f"    {notes}"]
        else:
            lines.append(f"{row} ({notes})" if notes else row)
    lines += [explained] if any(o.fits for o in listed) else []
    lines += _sources([o.bill for o in listed if o.bill], currency)
    if left:
        lines.append(f"{left} more offers: --gpu NAME lists those of a GPU, --platform NAME those of a platform")
    if not everything:
        lines += _rest(plan, [o for o in plan.offers if o.bill is None])
    return lines


def _shortened(offers: list[Offer]) -> list[Offer]:
    """Of each card the cheapest, and of those the cheapest that a screen has room for."""
    by_card: dict[str, Offer] = {}
    for offer in offers:  # the cheapest first
        by_card.setdefault(_card(offer), offer)
    return list(by_card.values())[:_MOST_ROWS]


def _sources(bills: list[Bill], currency: str | None) -> list[str]:
    """Where prices and exchange rates are from, and their dates; `currency`: of the budget."""
    seen = dict.fromkeys(bill.seen for bill in bills)
    lines = [f"prices: {'; '.join(map(_unbroken, seen))}"] if seen else []
    rates = describe_rates({bill.currency for bill in bills if bill.amount} | ({currency} if currency else set()))
    lines += [rates] if rates else []
    if any("stale:" in text for text in (*seen, rates or "")):
        lines.append("stale ones: sojourn catalog refresh, or sojourn cloud offers --save")
    return lines


def _rest(plan: Plan, offers: list[Offer]) -> list[str]:
    """GPUs without a price: which fit, which do not, and why."""
    same_count = len({o.count for o in plan.offers}) == 1 < len(plan.offers)
    apples = [o for o in plan.offers if o.gpu.unified]

    def listed(title: str, some: list[Offer]) -> list[str]:
        muon_groups = bool(apples) and all(o in some and not o.fits for o in apples)  # none needs a word of its own
        single = [o for o in some if not (muon_groups and o.gpu.unified)]
        names = [_unbroken((o.gpu.name if same_count else _card(o)) + _if_known(o)) for o in single]
        names += [_unbroken("every Apple chip")] if muon_groups else []
        return [f"{title}: {', '.join(dict.fromkeys(names))}"] if names else []

    fitting = [o for o in offers if o.fits]
    lines = listed("fits, no price known", fitting[:_MOST_NAMES])
    if len(fitting) > _MOST_NAMES:
        lines[0] += f", and {len(fitting) - _MOST_NAMES} slower ones"
    for why in dict.fromkeys(o.reason_not for o in offers if not o.fits):
        title = "does not fit" if why == TOO_SMALL else f"cannot run it ({why})"
        lines += listed(title, [o for o in offers if o.reason_not == why])
    return lines


def _if_known(offer: Offer) -> str:
    return f" ({_hours(offer)})" if offer.run_time else ""


def _hours(offer: Offer) -> str:
    """How long it may take, with every start of a further session."""
    if offer.run_time is None:
        return "?"
    low, high = (
        (offer.bill.low.hours, offer.bill.high.hours)
        if offer.bill
        else (seconds / 3600 for seconds in offer.run_time.between)
    )
    return time_range(low, high)


def _card(offer: Offer) -> str:
    return f"{offer.count} × {offer.gpu.name}" if offer.count > 1 else offer.gpu.name


def _row(offer: Offer, first: int) -> str:
    name, where = f"{_card(offer):<{first}}", offer.bill.title if offer.bill else ""
    if offer.fit is None:
        return f"{name} {'does not fit' if offer.reason_not == TOO_SMALL else f'cannot run it: {offer.reason_not}'}"
    bill, fast = offer.bill, offer.step
    cells = {
        "mb": f"{offer.fit.workload.micro_batch:,}", "max mb": f"{offer.largest_micro_batch:,}",
        "GiB": f"{offer.fit.memory.device / _GIB:.1f}",
        "tok/s": rate_text(fast.tokens_per_second, offer.gpu, offer.count) if fast else "?", "time": _hours(offer),
        "cost": cost_range(bill) if bill else "",
    }  # fmt: skip
    return (name + "".join(f"{cells[key]:>{size}}" for key, size in _COLUMNS.items()) + f"  {where}").rstrip()


def _notes(offer: Offer) -> list[str]:
    if offer.fit is None:
        return []
    how = [f"--gpus all, by {offer.fit.workload.engine}"] if offer.count > 1 else []
    unknown = ["its speed is not known"] if offer.step is None else []
    untried = ["planned only: Sojourn was never run on one"] if offer.gpu.not_run else []
    build = [note] if (note := torch_build(offer.gpu)) else []
    return [*how, *unknown, *untried, *build, *(offer.bill.notes if offer.bill else ())]


def best_lines(plan: Plan, limits: str, helped: bool) -> list[str]:
    """The choice and why; `limits`: what was asked for, in words; `helped`: advice follows."""
    best = plan.best
    if best is None or best.bill is None:
        return [_no_choice(plan, limits, helped)]
    met = f" and meets the {limits}" if limits else ""
    lines = [f"cheapest that fits{met}: {_named(best)}: {_billed(best)}"]
    fastest = plan.fastest
    if fastest is not None and fastest is not best:
        lines.append(f"fastest that fits{met}: {_named(fastest)}: {_billed(fastest)}")
    paid = [o for o in plan.offers if o.fits and o.bill is not None and o.bill.amount > 0 and o.bill.disk_suffices]
    if best.bill.amount == 0 and paid and not limits and paid[0] is not fastest:
        lines.append(f"cheapest of those that cost: {_named(paid[0])}: {_billed(paid[0])}")
    if best.run_time is not None:
        parts = {name: took for name, took in best.run_time.parts.items() if took >= 0.01 * best.run_time.seconds}
        lines.append("time goes to: " + ", ".join(f"{name} {time_text(took / 3600)}" for name, took in parts.items()))
    if build := torch_build(best.gpu):
        lines.append(f"{best.gpu.name} {build}")
    lines += _unsure(best)
    took, size = time_text(plan.preparing_seconds / 3600), plan.checkpoint_bytes / _GIB
    lines.append(
        f"prepare the data first, where no GPU is paid for ({_without_gpu(best)}): about {took} on two cores; "
        f"a checkpoint takes {size:.2f} GiB"
    )
    return lines


def _unsure(offer: Offer) -> list[str]:
    """A warning where the CPU of the machine, which no plan knows, decides."""
    if offer.step is None or offer.run_time is None or offer.step.launch_share < _UNSURE:
        return []
    if offer.run_time.parts.get("steps", 0.0) < _UNSURE * offer.run_time.seconds:
        return []
    share = f"{100 * offer.step.launch_share:.0f} %"
    return [f"kernel launch overhead is {share} of a step, and CPUs differ: steps may take a third more or less"]


def _no_choice(plan: Plan, limits: str, helped: bool) -> str:
    fitting = [o for o in plan.offers if o.fits]
    billed = [(o.bill, o) for o in fitting if o.bill]
    enough_disk = [(bill, o) for bill, o in billed if bill.disk_suffices]
    if enough_disk and limits:
        cheap = min(enough_disk, key=lambda one: (one[0].high.cny, one[0].high.elapsed))[1]
        quick = min(enough_disk, key=lambda one: one[0].high.elapsed)[1]
        least = "" if quick is cheap else f"; the fastest is {_named(quick)}: {_billed(quick)}"
        return f"nothing meets the {limits}; the cheapest is {_named(cheap)}: {_billed(cheap)}{least}"
    if billed:
        return "where it fits, the disk is too small for two checkpoints; the table shows their size"
    if fitting and all(o.gpu.unified for o in fitting):
        return "nobody rents these out: on a machine of your own it costs nothing"
    if fitting:
        own = "add yours to catalog.toml (see docs/catalogue.md)"
        return f"no price is known for the GPUs that fit; set limits.price_per_hour, or {own}"
    if not any(o.reason_not == TOO_SMALL for o in plan.offers):
        return "none of these GPUs can run it as it is set; the reasons are above"
    return "it fits on none of these GPUs" + ("; what helps is below" if helped else "")


def _without_gpu(offer: Offer) -> str:
    bill = offer.bill
    if bill is None or bill.no_gpu_per_hour is None:
        return "on your own machine"
    price = "free" if bill.no_gpu_per_hour == 0 else f"{money_text(bill.no_gpu_per_hour, bill.currency)} an hour"
    return f"on your own machine, or {bill.title} without its GPU, {price}"


def _named(offer: Offer) -> str:
    return f"{_card(offer)} on {offer.bill.title}" if offer.bill and offer.bill.title else _card(offer)


def _billed(offer: Offer) -> str:
    if offer.bill is None:
        return ""
    parts = [cost_range(offer.bill), _hours(offer), *offer.bill.notes]
    if offer.bill.high.weeks > 1:
        parts.append(f"done after at most {offer.bill.high.elapsed / 24:.1f} days")
    return f"{', '.join(parts)}; {offer.range_reason}"


def advice_lines(advice: list[Advice], gpu: str) -> list[str]:
    if not advice:
        return [f"nothing we know makes it fit on {gpu}; take a larger GPU or a smaller model"]
    lines = [f"to fit on {gpu}, fastest first:"]
    for one in advice:
        changes = ", ".join(change.description for change in one.changes)
        speed = f"{rate_text(one.tokens_per_second, one.gpu)} tok/s"
        host = f" and {one.host_memory / _GIB:.0f} GiB of host memory" if one.host_memory else ""
        lines.append(f"  {changes}: {speed}, {one.memory / _GIB:.1f} GiB{host}   ({one.arguments})")
    return lines


def faster_line(one: Advice) -> str:
    gained = f"{rate_text(one.tokens_per_second, one.gpu)} tok/s, {one.memory / _GIB:.1f} GiB"
    return f"the same result sooner on {one.gpu.name}, in the memory that is left: {gained}   ({one.arguments})"


def corrected_line(learned: Correction) -> str:
    by_card = ", ".join(_unbroken(f"{time:.2f} on {card}") for card, time in learned.times.items())
    return (
        f"corrected by {learned.records} runs measured here (sojourn plan --calibrate): steps take {learned.time:.2f} "
        f"times as long{f' ({by_card})' if by_card else ''}, memory is {learned.memory:.2f} times as much; whether a "
        "run fits allows for that, the GiB above do not"
    )


def capacity_lines(found: Capacity, room: str) -> list[str]:
    """`room`: the memory in words."""
    titles = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}
    rows, most, batch = found.micro_batch or "none", found.micro_batch_checkpointed or "none", found.global_batch
    least = f"train.activation_checkpointing={found.checkpointing}"
    lines = [
        f"into {room} fit, of this run:",
        f"  a micro batch of {rows} of the {batch:,} rows of a step as it is set, {most} with {least}",
        f"  a sequence length of {f'up to {found.length:,}' if found.length else 'not even 256'} tokens, with a micro "
        f"batch of 1 and {least}",
        f"and of the catalogue, with a micro batch of 1 × {found.given_length:,} tokens and {least}:",
    ]
    for method, largest in found.models.items():
        if largest is None:
            lines.append(f"  {titles[method]}: no model")
        else:
            model, size = largest
            lines.append(
                f"  {titles[method]}: up to {model.name} ({count_text(model.parameters)}), {size / _GIB:.1f} GiB"
            )
    return [*lines, "as in every plan, 3 % of the memory is left free"]


def explain_lines(config: RunConfig, plan: Plan) -> list[str]:
    """Every term of every phase, and every part of a step, with its formula; what `auto` becomes, with its reason."""
    lines = [
        "P parameters, N trainable parameters, T tokens of a micro batch, D hidden size, F feed-forward size, "
        "V vocabulary, e bytes of an element in matmuls, r bytes of an element of the residual stream"
    ]
    for phase in plan.fit.memory.phases:
        mark = " (the peak)" if phase is plan.fit.memory.peak else ""
        lines.append(f"{phase.name}: {phase.bytes / _GIB:.3f} GiB{mark}")
        lines += [f"  {t.bytes / _GIB:>9.3f}  {t.kind}: {t.name} = {t.formula}" for t in phase.terms if t.bytes]
    shown = next((o for o in (plan.best, *plan.offers) if o is not None and o.step is not None), None)
    if shown is not None and shown.step is not None:
        lines.append(f"a step on {shown.gpu.name}: {1e3 * shown.step.step_seconds:.1f} ms")
        lines += [f"  {1e3 * p.seconds:>9.2f} ms  {p.name} = {p.formula}" for p in shown.step.parts]
    if shown is not None and shown.run_time is not None:
        lines.append(f"the whole run there: {time_text(shown.run_time.seconds / 3600)}")
        lines += [f"  {took:>9.1f} s  {name}" for name, took in shown.run_time.parts.items()]
    if shown is not None:
        found = resolve_for(config, plan.model, plan_device(config, shown.gpu, shown.count))
        lines.append(f"settings that are auto, as a run on {shown.gpu.name} would decide them:")
        lines += [f"  {key} = {reason}" for key, reason in found.reasons.items()]
    return lines
