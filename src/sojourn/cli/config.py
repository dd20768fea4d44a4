"""`sojourn config check`: validates a configuration without running it."""

from __future__ import annotations

from typing import Annotated

import typer

from sojourn.cli.run_args import RunArgs

config_app = typer.Typer(help="Check a configuration.", no_args_is_help=True)


@config_app.command("check", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def check(
    args: RunArgs = [],  # noqa: B006 (typer makes a new list)
    show: Annotated[bool, typer.Option("--show", help="Print the whole configuration, defaults included.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the whole configuration as JSON.")] = False,
) -> None:
    """Check a run's configuration without running it: keys, values and combinations."""
    from sojourn.config.load import dump, load_run, summary, to_yaml

    loaded = load_run(args)
    if json:
        from sojourn.run.output import print_json

        print_json({"ok": True, "notes": list(loaded.notes), "config": dump(loaded.config)})
        return
    for note in loaded.notes:
        print(f"note: {note}")
    if show:
        print(to_yaml(loaded.config), end="")
    print(f"ok: {loaded.source} is a valid run ({summary(loaded.config)})")
