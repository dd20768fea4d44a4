"""`sojourn config check`: is this run's configuration right, and what does it come to?"""

from __future__ import annotations

from typing import Annotated

import typer

config_app = typer.Typer(help="Check a configuration.", no_args_is_help=True)

_Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN [key=value]... [--flag value]...", help="A preset or a YAML file, and settings."),
]


@config_app.command("check", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def check(
    words: _Words = None,
    show: Annotated[bool, typer.Option("--show", help="Print the whole configuration, defaults included.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the whole configuration as JSON.")] = False,
) -> None:
    """Check a run's configuration without running it: every key, every value, every combination."""
    from sojourn.config.load import dump, load_run, summary, to_yaml

    loaded = load_run(words or [])
    if json:
        from json import dumps

        print(dumps({"ok": True, "notes": list(loaded.notes), "config": dump(loaded.config)}, ensure_ascii=False))
        return
    for note in loaded.notes:
        print(f"note: {note}")
    if show:
        print(to_yaml(loaded.config), end="")
    print(f"ok: {loaded.source} is a valid run ({summary(loaded.config)})")
