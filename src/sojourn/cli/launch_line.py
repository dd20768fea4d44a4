"""`sojourn launch-line`: prints the commands that start a run on several machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from sojourn.cli.run_args import RunArgs

if TYPE_CHECKING:
    from sojourn.launch.command_lines import Launch

_KINDS = ("shell", "slurm", "pytorchjob", "trainjob")


def launch_line(
    args: RunArgs,
    nodes: int = typer.Option(2, "--nodes", min=1, max=10_000, help="Number of machines."),
    gpus_per_node: str = typer.Option("auto", "--gpus-per-node", help="GPUs per machine. auto: as many as here."),
    master: str | None = typer.Option(None, "--master", metavar="HOST", help="Name or address of the first machine."),
    port: int = typer.Option(29500, "--port", min=1, max=65535, help="Open port on that machine."),
    max_restarts: int = typer.Option(3, "--max-restarts", min=0, max=1000, help="Restarts after a failure."),
    kind: str = typer.Option("shell", "--for", help=f"Format: {', '.join(_KINDS)} or all."),
    image: str | None = typer.Option(None, "--image", help="Container image for the Kubernetes jobs."),
    fork: str | None = typer.Option(None, "--fork", metavar="NEWNAME", help="As in sojourn train."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of text."),
) -> None:
    """Print the commands that start one run on several machines: torchrun, Slurm or Kubernetes.

    Checks the run first and starts nothing. Notes go to standard error.
    """
    import sys

    from sojourn.config.load import load_run, with_settings
    from sojourn.errors import UserError
    from sojourn.launch.command_lines import Launch, check_launch, refuse_secrets

    refuse_secrets(args)
    if kind not in (*_KINDS, "all"):
        raise UserError(f"--for: “{kind[:40]}” given; allowed: {', '.join(_KINDS)} or all")
    loaded = load_run(args)
    config = loaded.config if fork is None else with_settings(loaded.config, {"name": fork})
    all_args = [*args, *(["--fork", fork] if fork else [])]
    if nodes == 1 and config.parallel.gpus == "auto" and kind == "shell":
        all_args += ["--gpus", _gpu_indices(gpus_per_node)]
    launch = Launch(
        config.name or "run", tuple(all_args), nodes, _count_gpus(gpus_per_node), master, port, max_restarts, image,
        float(config.limits.grace),
    )  # fmt: skip
    notes = [*loaded.notes, *check_launch(launch, config)]
    made = {each: _make(each, launch, json) for each in (_KINDS if kind == "all" else (kind,))}
    if json:
        from sojourn.run.output import print_json

        facts = {"run": launch.name, "nodes": nodes, "gpus_per_node": launch.gpus, "notes": notes}
        print_json({**facts, **made}, indent=2)
        return
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    titled = [f"# {each}\n\n{text}" if kind == "all" else text for each, text in made.items()]
    print("\n".join(titled), end="")


def _make(kind: str, launch: Launch, json: bool) -> Any:
    from sojourn.launch.command_lines import format_shell, shell_commands, slurm_script
    from sojourn.launch.kubernetes import pytorchjob, trainjob

    if kind == "shell":
        return shell_commands(launch) if json else format_shell(launch)
    return {"slurm": slurm_script, "pytorchjob": pytorchjob, "trainjob": trainjob}[kind](launch)


def _count_gpus(value: str) -> int:
    from sojourn.errors import UserError

    if value == "auto":
        from sojourn.machine.gpus import driver_gpus

        try:
            return len(driver_gpus()) or 1
        except RuntimeError as error:
            raise UserError(f"--gpus-per-node auto: {error}; give a number, such as --gpus-per-node 4") from None
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:6]) <= 1024:
        raise UserError(f"--gpus-per-node: “{value[:40]}” given; allowed: auto or a number from 1 to 1024")
    return int(value)


def _gpu_indices(value: str) -> str:
    """For --gpus: on one machine `train` starts the ranks itself."""
    return "all" if value == "auto" else ",".join(map(str, range(_count_gpus(value))))
