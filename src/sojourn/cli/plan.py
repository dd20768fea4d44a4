"""`sojourn plan`: memory, time and money before paying."""

from __future__ import annotations

import typer


def plan(
    words: list[str] = typer.Argument(
        metavar="RUN [key=value]... [--flag value]...", help="A preset or a YAML file, then overrides."
    ),
    gpu: list[str] = typer.Option(
        None, "--gpu", help="Only this GPU (RTX 4090, A100 80GB, …); may be given several times."
    ),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """What a from-scratch run needs and what it costs on each GPU. Needs no torch and no GPU."""
    from sojourn.catalog.names import gpu as find_gpu
    from sojourn.config.load import load_run
    from sojourn.plan.estimate import ASSUMED_SHARE, make_plan

    loaded = load_run(words)
    found = make_plan(loaded.config, [find_gpu(name) for name in gpu] if gpu else None)
    if json:
        from dataclasses import asdict
        from json import dumps

        print(dumps({**asdict(found), "parameters": found.shape.parameters}, ensure_ascii=False, default=str))
        return
    parts, gib = found.memory, 2**30
    size, tokens = found.shape.parameters / 1e6, found.tokens / 1e6
    shape = f"{found.shape.d_model}×{found.shape.num_layers}"
    print(f"{loaded.config.name}: {shape}, {size:,.1f}M parameters, {found.steps:,} steps, about {tokens:,.1f}M tokens")
    print(
        f"memory in 32 bits, {found.micro_batch} row(s) at a time: weights {parts.weights / gib:.2f} + "
        f"gradients {parts.gradients / gib:.2f} + optimizer {parts.optimizer / gib:.2f} + "
        f"activations {parts.activations / gib:.2f} = {parts.total / gib:.2f} GiB"
    )
    print(f"disk: {found.checkpoint_bytes / gib:.2f} GiB a checkpoint\n")
    print(f"{'GPU':<15}{'memory':>9}{'rows at once':>14}{'tok/s':>12}{'time':>7}{'cost':>10}  where")
    sign = "¥" if loaded.config.limits.price_per_hour is None else ""
    for offer in found.offers:
        fits, speed = str(offer.micro_batch or "no"), f"{offer.tokens_per_second:,.0f}"
        cost = "" if offer.cost is None else f"{sign}{offer.cost:,.2f}"
        where = f"{offer.platform or ''} {f'({offer.seen})' if offer.seen else ''}".strip()
        memory, time = f"{offer.gpu.memory_gib:.0f} GiB", _time(offer.hours)
        print(f"{offer.gpu.name:<15}{memory:>9}{fits:>14}{speed:>12}{time:>7}{cost:>10}  {where}")
    print(f"\nrough: time assumes {ASSUMED_SHARE:.0%} of each card's peak, without start-up and downloads; prices move")
    if found.best:
        best = found.best
        print(
            f"cheapest that fits: {best.gpu.name} on {best.platform}, about {_time(best.hours)}, {sign}{best.cost:,.2f}"
        )


def _time(hours: float) -> str:
    return f"{hours * 3600:.0f}s" if hours < 1 / 60 else f"{hours * 60:.0f}m" if hours < 1 else f"{hours:.1f}h"
