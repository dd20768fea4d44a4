"""`sojourn presets`: lists, shows and copies presets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

presets_app = typer.Typer(help="List, show and copy presets.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help="A preset's name or one of its aliases.")]


@presets_app.command("list")
def list_presets(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the presets and what each is for."""
    from sojourn.config.preset import presets

    found = presets()
    if json:
        from sojourn.run.output import print_json

        rows = [{"name": p.name, "summary": p.summary, "aliases": list(p.aliases)} for p in found]
        print_json(rows)
        return
    for item in found:
        print(f"{item.name:<10} {item.summary}" + (f"  (also: {', '.join(item.aliases)})" if item.aliases else ""))
    print("\nnext: sojourn presets show NAME · sojourn presets copy NAME my.yaml · sojourn plan NAME")


@presets_app.command("show")
def show_preset(name: _Name) -> None:
    """Print a preset's YAML."""
    from sojourn.config.preset import get_preset

    print(get_preset(name).read_text(encoding="utf-8"), end="")


@presets_app.command("copy")
def copy_preset(
    name: _Name,
    file: Annotated[Path | None, typer.Argument(help="Target file. Default: NAME.yaml.")] = None,
) -> None:
    """Copy a preset to a new file. Never overwrites one."""
    from sojourn.config.preset import copy_preset

    written = copy_preset(name, file)
    print(f"{written} written; edit it, then: sojourn config check {written}")
