"""`sojourn plan`: memory, time and cost of a run, before renting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from sojourn.cli.run_args import RunArgs

if TYPE_CHECKING:
    from sojourn.catalog.gpus import Gpu
    from sojourn.config.load import Loaded
    from sojourn.config.quantities import Money
    from sojourn.config.schema import RunConfig


def plan(
    args: RunArgs = [],  # noqa: B006 (typer makes a new list)
    gpu: list[str] | None = typer.Option(
        None, "--gpu", help="Only this GPU (RTX 4090, A100 80GB, 2xT4, …). Repeatable."
    ),
    platform: str | None = typer.Option(None, "--platform", help="Only offers of this platform (autodl, kaggle, …)."),
    budget: str | None = typer.Option(None, "--budget", help="Maximum cost: 30, ¥30, $5. Default: limits.budget."),
    deadline: str | None = typer.Option(
        None, "--deadline", "--time", help="Maximum time: 12h, 3d. Default: limits.time."
    ),
    fit: str | None = typer.Option(
        None, "--fit", metavar="SIZE", help="Show what fits into this much GPU memory: 24GB is a card of 24 GB."
    ),
    compare: bool = typer.Option(
        False, "--compare", help="Full fine-tuning, LoRA and QLoRA side by side; RUN is a model or a run."
    ),
    explain: bool = typer.Option(
        False, "--explain", help="Show every memory and time term with its formula, and what each auto becomes."
    ),
    calibrate: bool = typer.Option(
        False, "--calibrate", help="Correct estimates by the runs measured on this machine."
    ),
    serve: bool = typer.Option(
        False, "--serve", help="How many users a GPU holds instead: RUN is a model (qwen2.5-7b, a folder) or a run."
    ),
    context: int | None = typer.Option(
        None, "--context", min=16, help="With --serve: tokens of a prompt and its answer; default: 4096."
    ),
    share: bool = typer.Option(
        False, "--share", help="Print what `sojourn doctor --measure` measured here, to send to us."
    ),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Estimate memory, time and cost of a run on each GPU. RUN may also be a model. Needs no torch and no GPU, and the
    network only for the config.json of a model of the hub that the catalogue does not have.

    Exit codes: 0 something fits and meets the budget and the deadline; 4 nothing does; 2 wrong input. So
    `sojourn plan RUN --budget ¥30 && sojourn train RUN` trains only what the budget allows.
    """
    from sojourn.errors import UserError
    from sojourn.plan.arguments import alone, named_gpus, with_gpu_count
    from sojourn.plan.run_argument import load_planned

    if context is not None and not serve:
        raise UserError("--context: for --serve; a run's is data.max_length")
    if share:
        from sojourn.plan.share import share_lines

        print("\n".join(share_lines()))
        return
    if calibrate:
        _calibrate(json, json and bool(args))
        if not args:
            return
    if not args and (budget is not None or deadline is not None):
        alone("--budget and --time without a run", True, {"--fit": fit, "--serve": serve, "--explain": explain})
        _affordable(gpu, platform, budget, deadline, json)
        return
    if not args:
        raise UserError(
            "plan: name a run: a preset (sojourn presets list), a YAML file or a model, such as: sojourn plan medium; "
            "or ask what a budget trains: sojourn plan --budget ¥20"
        )
    others = {"--gpu": gpu, "--platform": platform, "--budget": budget, "--deadline": deadline, "--explain": explain}
    if serve:
        _serve(args, gpu, context, {"--fit": fit, **{k: v for k, v in others.items() if k != "--gpu"}}, json)
        return
    alone("--fit", fit, others)
    cards, count = named_gpus(gpu)
    args, notes = with_gpu_count(args, count)
    loaded = load_planned(args)
    if fit is not None:
        _inverse(loaded.config, fit, json)
        return
    if compare:
        alone("--compare", True, {"--explain": explain})
        _compare(loaded.config, cards, platform, budget, deadline, json)
        return
    _plan(loaded, [*loaded.notes, *notes], cards, platform, budget, deadline, explain, json)


def _affordable(gpu: list[str] | None, platform: str | None, budget: str | None, time: str | None, json: bool) -> None:
    from sojourn.plan.affordable import affordable
    from sojourn.plan.arguments import known_platform, named_gpus, to_budget, to_seconds
    from sojourn.plan.show import folded, screen_width
    from sojourn.plan.show_affordable import affordable_lines, affordable_values
    from sojourn.plan.verdict import NOTHING_MEETS

    money, seconds = to_budget(budget), to_seconds(time, "--time")
    hours = None if seconds is None else seconds / 3600
    table, new = affordable(money, hours, named_gpus(gpu)[0], known_platform(platform))
    if json:
        _print_json(affordable_values(table, new))
    else:
        print("\n".join(folded(affordable_lines(table, new, money, hours), screen_width())))
    if new is None and not any(one for row in table.values() for one in row.values()):
        raise typer.Exit(NOTHING_MEETS)


def _serve(args: list[str], gpu: list[str] | None, context: int | None, others: dict[str, object], json: bool) -> None:
    from sojourn.catalog.gpus import gpus
    from sojourn.plan.arguments import alone, named_gpus
    from sojourn.plan.serving import default_context, model_to_serve, serving_lines, serving_values
    from sojourn.plan.show import folded, screen_width

    alone("--serve", True, others)
    model = model_to_serve(args)
    context = context or default_context(model)
    cards = named_gpus(gpu)[0] or [one for one in gpus() if not one.unified and not one.refused]
    if json:
        _print_json(serving_values(model, cards, context))
        return
    print("\n".join(folded(serving_lines(model, cards, context, bool(gpu)), screen_width())))


def _plan(
    loaded: Loaded, notes: list[str], cards: list[Gpu] | None, platform: str | None, budget: str | None,
    deadline: str | None, explain: bool, json: bool,
) -> None:  # fmt: skip
    from sojourn.plan.advice import advise_for, faster
    from sojourn.plan.arguments import known_platform
    from sojourn.plan.as_json import plan_values
    from sojourn.plan.offers import make_plan
    from sojourn.plan.show import (
        advice_lines,
        best_lines,
        corrected_line,
        explain_lines,
        faster_line,
        folded,
        memory_lines,
        screen_width,
        summary_lines,
        table_lines,
    )
    from sojourn.plan.verdict import exit_code

    config = loaded.config
    money, seconds = _limits(config, budget, deadline)
    place = known_platform(platform)
    found = make_plan(config, cards, place, money, seconds)
    target, advice = advise_for(config, found, cards, place)
    sooner = faster(config, found)
    if json:
        _print_json({**plan_values(config, found, advice, sooner), "notes": notes})
        raise typer.Exit(exit_code(found, money, seconds))
    width, shown = screen_width(), found.shown
    card = shown.gpu if shown else cards[0] if cards else None
    where = f" on {'each ' if shown and shown.count > 1 else ''}{card.name}" if card else ""
    asked = _asked(money, seconds)
    answer, *reasons = best_lines(found, asked, bool(advice))
    lines = [answer, "", *summary_lines(config, found, cards is not None), *(f"note: {note}" for note in notes)]
    lines += [*memory_lines(found.fit, where), ""]
    currency = money.currency if money else None
    lines += [*table_lines(found, cards is not None, width, place, currency), "", *reasons]
    if sooner is not None:
        lines.append(faster_line(sooner))
    if target is not None:
        lines += advice_lines(advice, target.name)
    if found.correction.records:
        lines.append(corrected_line(found.correction))
    if explain:
        lines += ["", *explain_lines(config, found)]
    print("\n".join(folded(lines, width)))
    raise typer.Exit(exit_code(found, money, seconds))


def _compare(
    config: RunConfig, cards: list[Gpu] | None, platform: str | None, budget: str | None, deadline: str | None,
    json: bool,
) -> None:  # fmt: skip
    from sojourn.plan.arguments import known_platform
    from sojourn.plan.as_json import plan_values
    from sojourn.plan.compare import compare, compare_lines
    from sojourn.plan.show import folded, screen_width
    from sojourn.plan.verdict import exit_code

    money, seconds = _limits(config, budget, deadline)
    found = compare(config, cards, known_platform(platform), money, seconds)
    if json:
        _print_json({one.method: one.plan and plan_values(config, one.plan, [], None) for one in found})
    else:
        print("\n".join(folded(compare_lines(found, _asked(money, seconds)), screen_width())))
    raise typer.Exit(min(exit_code(one.plan, money, seconds) for one in found if one.plan is not None))


def _limits(config: RunConfig, budget: str | None, deadline: str | None) -> tuple[Money | None, float | None]:
    from sojourn.plan.arguments import to_budget, to_seconds

    money = to_budget(budget) if budget is not None else config.limits.budget
    return money, to_seconds(deadline) if deadline is not None else config.limits.time


def _asked(budget: Money | None, deadline: float | None) -> str:
    return " and the ".join(word for word, given in (("deadline", deadline), ("budget", budget)) if given is not None)


def _inverse(config: RunConfig, size: str, json: bool) -> None:
    from sojourn.plan.advice import what_fits
    from sojourn.plan.arguments import to_memory
    from sojourn.plan.as_json import capacity_values
    from sojourn.plan.show import capacity_lines, folded, screen_width

    memory, words = to_memory(size)
    found = what_fits(config, memory)
    if json:
        _print_json(capacity_values(found))
        return
    print("\n".join(folded(capacity_lines(found, words), screen_width())))


def _calibrate(json: bool, silent: bool) -> None:
    """Prints nothing where a plan in JSON follows, which includes the correction."""
    from dataclasses import asdict

    from sojourn.plan.calibration import calibrate, folder

    found = calibrate()
    if silent:
        return
    if json:
        _print_json(asdict(found))
    elif not found.records:
        print(f"nothing measured yet in {folder()}: a rehearsal or a finished run on a GPU leaves a record there")
    else:
        ratios = f"measured memory is {found.memory:.3f} times the plan's, steps {found.time:.3f} times"
        print(f"{found.records} records: {ratios}")


def _print_json(value: object) -> None:
    from sojourn.run.output import print_json

    print_json(value, default=str)
