"""`sojourn catalog`: lists and shows GPUs, platforms, prices, exchange rates and models; adds and refreshes rows."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

catalog_app = typer.Typer(
    help="GPUs, platforms, prices, exchange rates and models: list, show, add, refresh.", no_args_is_help=True
)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@catalog_app.command("list")
def list_catalog(
    kind: Annotated[
        str | None, typer.Argument(help="gpus, platforms, prices, currencies, models or datasets. Default: a summary.")
    ] = None,
    stale: Annotated[bool, typer.Option("--stale", help="Only prices and rates older than 90 days.")] = False,
    json: _Json = False,
) -> None:
    """List what the catalogue has, with dates; stale prices and exchange rates are marked."""
    from sojourn.catalog.describe import entries, entry_values, list_lines, summary_lines
    from sojourn.catalog.tables import KINDS
    from sojourn.catalog.user_rows import kind_of

    kinds = [kind_of(kind)] if kind else ["price", "currency"] if stale else list(KINDS)
    if json:
        _print_json([entry_values(e) for one in kinds for e in entries(one) if e.stale or not stale])
    elif kind is None and not stale:
        print("\n".join(summary_lines()))
    else:
        print("\n".join(line for one in kinds for line in list_lines(one, stale)))


@catalog_app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A GPU, platform, model, currency or data set, however it is spelled.")],
    json: _Json = False,
) -> None:
    """Show an entry as it counts, with its source, date and prices, in the form of catalog.toml."""
    from sojourn.catalog.describe import entry_values, find_entries, show_lines

    found = find_entries(name)
    if json:
        _print_json([entry_values(entry) for entry in found])
        return
    print("\n\n".join("\n".join(show_lines(entry)) for entry in found))


@catalog_app.command("add")
def add(
    kind: Annotated[str, typer.Argument(help="gpu, platform, price, currency, model or dataset.")],
    words: Annotated[
        list[str], typer.Argument(metavar="NAME key=value...", help="Of a price: PLATFORM GPU and ¥1.98 or $0.35.")
    ],
) -> None:
    """Add a row to your catalog.toml, or change one there. It is checked first."""
    from sojourn.catalog.user_rows import add_row, kind_of, parse_row

    which = kind_of(kind)
    name, row = parse_row(which, words)
    path, changed = add_row(which, name, row)
    print(f"{which} {name} {'changed' if changed else 'added'} in {path}")


@catalog_app.command("refresh")
def refresh(
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="FILE|URL", help="Take newer rows from this catalogue file instead."),
    ] = None,
    json: _Json = False,
) -> None:
    """Get today's exchange rates (European Central Bank) and the prices of platforms whose token is known.

    --from takes rows newer than those here from a file like catalog.toml; each needs a source and a date.
    """
    from dataclasses import asdict

    from sojourn.catalog.refresh import refresh_from, refresh_rates
    from sojourn.errors import RunFailed, UserError
    from sojourn.remote.platforms.market import refresh_live_prices

    if source is not None:
        found, problems = refresh_from(source), list[str]()
    else:
        found, problems = None, []
        for step in (refresh_rates, refresh_live_prices):
            try:
                one = step()
                found = one if found is None else found.joined(one)
            except UserError as error:
                problems.append(str(error))
    for problem in problems:
        print(f"note: {problem}", file=sys.stderr)
    if found is None:
        raise RunFailed("nothing was refreshed; sojourn catalog refresh --from FILE takes rows from a file")
    if json:
        _print_json({**asdict(found), "problems": problems})
        return
    print("\n".join(found.lines()))


def _print_json(value: object) -> None:
    from sojourn.run.output import print_json

    print_json(value, default=str)
