"""`sojourn runs`: lists the runs; `sojourn runs show NAME`: one of them, with its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sojourn.run.folder import RunFolder
    from sojourn.run.listing import RunSummary

_HELP = (
    "List the runs (in SOJOURN_HOME, else the platform's persistent folder, else this one): state, step, loss, time, "
    "cost, path. Or show one with a plot of its loss: sojourn runs show NAME."
)

runs_app = typer.Typer(help=_HELP, invoke_without_command=True)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@runs_app.callback()
def list_all(context: typer.Context, json: _Json = False) -> None:
    """List the runs of SOJOURN_HOME, newest first: state, step, loss, time, cost, path."""
    if context.invoked_subcommand is not None:
        return
    from dataclasses import asdict

    from sojourn.run.home import home
    from sojourn.run.listing import list_runs

    folder = home() / "runs"
    runs = list_runs(folder)
    if json:
        from json import dumps

        print(dumps([asdict(run) for run in runs]))
        return
    if not runs:
        print(f"no runs in {folder.absolute()}; train one: sojourn train smoke")
        return
    rows = [("NAME", "STATE", "STEP", "LOSS", "TIME", "COST", "PATH"), *(_row(run) for run in runs)]
    widths = [max(_width(row[column]) for row in rows) for column in range(6)]
    for row in rows:
        cells = (cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=False))
        print("  ".join([*cells, row[6]]))


@runs_app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name or folder of a run.")],
    json: _Json = False,
) -> None:
    """Show a run: where it stands, which models it has, and its loss as a plot."""
    import sys
    from dataclasses import asdict

    from sojourn.plot.loss import loss_points, loss_text
    from sojourn.run.home import find_run
    from sojourn.run.listing import summarize

    run = find_run(name)
    summary, metrics = summarize(run), run.read_metrics()
    train, held_out = loss_points(metrics, "train"), loss_points(metrics, "eval")
    if json:
        from json import dumps

        losses = {"train": train, "held_out": held_out, "models": _models(run)}
        print(dumps({**asdict(summary), **losses}))
        return
    _, state, step, loss, seconds, cost, path = _row(summary)
    print(f"{summary.name}: {state}{f' by {summary.message}' if state == 'stopped' else ''}, step {step}, loss {loss}")
    if state in ("failed", "unknown") and summary.message:
        print(summary.message)
    if held_out:
        best = min(held_out, key=lambda point: point[1])
        print(f"held-out loss {held_out[-1][1]:.4f}, lowest {best[1]:.4f} at step {best[0]:,.0f}")
    print(f"time {seconds}, cost {cost}")
    print(f"models: {', '.join(_models(run)) or 'none yet'} (sojourn generate {name} --checkpoint …)")
    print(path)
    for line in loss_text(train, braille=_encodes("⣿┤", sys.stdout.encoding)):
        print(line)


def _row(run: RunSummary) -> tuple[str, str, str, str, str, str, str]:
    from sojourn.config.quantities import Duration

    return (
        run.name,
        run.state,
        f"{run.step:,}/{run.total_steps:,}" if run.total_steps else "-",
        "-" if run.loss is None else f"{run.loss:.4f}",
        str(Duration(round(run.seconds))),
        f"{run.money:.2f} {run.currency}".rstrip() if run.money else "-",
        run.path,
    )


def _models(run: RunFolder) -> list[str]:
    """The values of --checkpoint that this run has."""
    from sojourn.run.checkpoints import list_checkpoints, step_of

    there = [folder.name for folder in (run.final, run.best) if folder.is_dir()]
    return [*there, *(str(step_of(path)) for path in list_checkpoints(run.checkpoints))]


def _width(text: str) -> int:
    from unicodedata import east_asian_width

    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def _encodes(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
