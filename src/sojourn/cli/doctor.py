"""`sojourn doctor`: checks this machine and prints how to fix what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from sojourn.machine.finding import Finding

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
    home: Annotated[Path | None, typer.Option(help="Folder for runs. Default: chosen for this platform.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the GPU for half a minute; plans for that card then use it.")
    ] = False,
) -> None:
    """Check this machine by using it: platform, GPU, precision, attention, disks, persistent storage.

    --measure measures what the GPU sustains (matmuls, attention, memory, kernel launches, disk, an all-reduce between
    several) and writes it into your catalogue: plans for this card become as exact as they can be.

    Under torchrun (torchrun --nproc_per_node=GPUS -m sojourn doctor, on each machine) it compares the ranks instead:
    versions, GPUs, clocks, and the speed of an all-reduce.
    """
    from sojourn.errors import UserError
    from sojourn.expand_user import expand_user
    from sojourn.machine.doctor import examine, exit_code, next_step, report
    from sojourn.machine.platform import detect
    from sojourn.machine.probe_ranks import examine_ranks, is_multi_rank
    from sojourn.run.home import home as default_home

    try:
        platform = detect()
        folder = expand_user(home or default_home()).absolute()
    except UserError:  # a broken catalog.toml of the user: `examine` reports it as a finding
        platform, folder = None, expand_user(home or Path()).absolute()

    def show(findings: list[Finding]) -> int:
        if json:
            from json import dumps

            print(dumps(report(findings, folder, platform), indent=2), flush=True)
        else:
            from rich.console import Console

            _show(findings, Console(highlight=False), next_step(findings))
        return exit_code(findings)

    if measure:
        _measure(folder, json)
        return
    raise typer.Exit(examine_ranks(show) if is_multi_rank() else show(examine(folder, platform=platform)))


def _measure(home: Path, json: bool) -> None:
    from sojourn.machine.gpus import gpus
    from sojourn.machine.measure import describe, measure, write_row

    home.mkdir(parents=True, exist_ok=True)
    cards = gpus()
    if not json:
        print(f"measuring {cards[0].name if cards else 'this CPU'}: about half a minute …", flush=True)
    found = measure(home, cards)
    written = write_row(found, cards[0]) if found.device == "cuda" else None
    if json:
        from json import dumps

        path, name = written or (None, None)
        facts = {"gpu": name, "catalogue": path and str(path), "measured": found.values, "failed": found.failed}
        print(dumps(facts, indent=2), flush=True)
        return
    print("\n".join(describe(found, cards, written)))


def _show(findings: list[Finding], console: Console, next_step: str) -> None:
    """One line per finding; wrapped on a terminal, not in a pipe."""
    from rich.text import Text

    name_width = max(len(finding.name) for finding in findings)
    width = max(console.width - 1, 20) if console.is_terminal else None
    indent = 4 + 2 + name_width + 2
    if width is not None and width < indent + 30:  # the text stands below its name
        indent = 4
    for finding in findings:
        mark = Text(f"{finding.level:<4}", style=_COLOURS[finding.level])
        name = f"  {finding.name:<{name_width}}  " if indent > 4 else f"  {finding.name}\n    "
        lines = _wrapped(finding.message, width, indent)
        console.print(Text.assemble(mark, name, lines), soft_wrap=True)
        if finding.fix:
            fix = _wrapped(f"fix: {finding.fix}", width, indent)
            console.print(Text.assemble(" " * indent, (fix, "cyan")), soft_wrap=True)
    counts = ", ".join(f"{sum(f.level == level for f in findings)} {level}" for level in _COLOURS)
    console.print("\n" + _wrapped(f"{counts}. Next: {next_step}", width, 0), soft_wrap=True, markup=False)


def _wrapped(text: str, width: int | None, indent: int) -> str:
    import textwrap

    if width is None:
        return text
    gap = "\n" + " " * indent
    return gap.join(textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False))
