"""`sojourn runs`: lists the runs, here and on all hosts; `sojourn runs show NAME`: one of them, with its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sojourn.remote.listing import HostAnswer, RemoteRun
    from sojourn.run.folder import RunFolder
    from sojourn.run.listing import RunSummary

_HELP = (
    "List the runs (in SOJOURN_HOME, else the platform's persistent folder, else this one) and those on all hosts: "
    "state, step, loss, time, cost, path. Or show one with a plot of its loss: sojourn runs show NAME."
)

runs_app = typer.Typer(help=_HELP, invoke_without_command=True)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@runs_app.callback()
def list_all(
    context: typer.Context,
    json: _Json = False,
    local: bool = typer.Option(False, "--local", help="Only the runs on this machine; asks no host."),
) -> None:
    """List the runs, newest first: here, then those on hosts, with money spent and projected and the time left."""
    if context.invoked_subcommand is not None:
        return
    from dataclasses import asdict

    from sojourn.run.home import home
    from sojourn.run.listing import list_runs

    folder = home() / "runs"
    runs = list_runs(folder)
    remote, silent = _ask_hosts() if not local else ([], [])
    if json:
        from json import dumps

        print(dumps([*map(asdict, runs), *map(asdict, remote)]))
    elif not runs and not remote:
        print(f"no runs in {folder.absolute()}; train one: sojourn train smoke")
    else:
        if runs:
            _print_table([("NAME", "STATE", "STEP", "LOSS", "TIME", "COST", "PATH"), *(_row(run) for run in runs)])
        if remote:
            print("\n" * bool(runs), end="")
            head = ("NAME", "HOST", "STATE", "STEP", "LOSS", "TIME", "COST", "AT THE END", "LEFT", "NOTE")
            _print_table([head, *(_remote_row(run) for run in remote)])
    _name_silent(silent)


def _ask_hosts() -> tuple[list[RemoteRun], list[HostAnswer]]:
    from sojourn.remote.hosts import load_hosts
    from sojourn.remote.job import all_jobs
    from sojourn.remote.platforms.kaggle import all_kaggle_runs

    remote: list[RemoteRun] = []
    silent: list[HostAnswer] = []
    if load_hosts() or all_jobs():
        from sojourn.remote.listing import list_remote_runs

        remote, silent = list_remote_runs()
    if all_kaggle_runs():
        from sojourn.remote.listing import PATIENCE
        from sojourn.remote.without_ssh import list_kaggle_runs

        remote += list_kaggle_runs(PATIENCE)
    return remote, silent


def _name_silent(silent: list[HostAnswer]) -> None:
    import sys

    for answer in silent:
        print(f"unreachable: {answer.error}", file=sys.stderr)


def _print_table(rows: list[tuple[str, ...]]) -> None:
    """Columns as wide as their widest cell, the last one as it is."""
    widths = [max(_width(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = (cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=False))
        print("  ".join([*cells, row[-1]]).rstrip())


def _remote_row(run: RemoteRun) -> tuple[str, ...]:
    from sojourn.config.quantities import Duration

    state = f"{run.state} ({run.phase})" if run.phase and run.state == "running" else run.state
    model = "model at home" if run.at_home else ""
    return (
        run.name,
        run.host,
        state,
        f"{run.step:,}/{run.total_steps:,}" if run.total_steps else "-",
        "-" if run.loss is None else f"{run.loss:.4f}",
        str(Duration(round(run.seconds))),
        f"{run.money:.2f} {run.currency}".rstrip() if run.money else "-",
        "-" if run.projected is None else f"{run.projected:.2f} {run.currency}".rstrip(),
        "-" if run.left is None else str(Duration(round(run.left))),
        "; ".join(filter(None, (model, run.message))),
    )


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
