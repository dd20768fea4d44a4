"""`sojourn launch-line`: the commands that start a run on several machines, printed and not run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from sojourn.launch.command_lines import Launch

_KINDS = ("shell", "slurm", "pytorchjob", "trainjob")


def launch_line(
    words: list[str] = typer.Argument(
        metavar="RUN [key=value]... [--flag value]...", help="As for train: a preset or a YAML file, then overrides."
    ),
    nodes: int = typer.Option(2, "--nodes", min=1, max=10_000, help="How many machines."),
    gpus_per_node: str = typer.Option("auto", "--gpus-per-node", help="GPUs of each; auto: as many as are here."),
    master: str | None = typer.Option(None, "--master", metavar="HOST", help="The machine that the others find."),
    port: int = typer.Option(29500, "--port", min=1, max=65535, help="A port that is open on it."),
    max_restarts: int = typer.Option(3, "--max-restarts", min=0, max=1000, help="How often to begin again by itself."),
    kind: str = typer.Option("shell", "--for", help=f"For whom: {', '.join(_KINDS)}, or all of them."),
    image: str | None = typer.Option(None, "--image", help="The container image, for the Kubernetes jobs."),
    fork: str | None = typer.Option(None, "--fork", metavar="NEWNAME", help="As for train."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of text."),
) -> None:
    """Print the commands that start one run on several machines: torchrun lines, Slurm, Kubernetes.

    The run is checked first. Nothing is started; notes go to standard error, so the output can go into a file.
    """
    import sys

    from sojourn.config.load import load_run, with_settings
    from sojourn.errors import UserError
    from sojourn.launch.command_lines import Launch, check_launch, refuse_secrets

    refuse_secrets(words)
    if kind not in (*_KINDS, "all"):
        raise UserError(f"--for: “{kind[:40]}” given; allowed: {', '.join(_KINDS)} or all")
    loaded = load_run(words)
    config = loaded.config if fork is None else with_settings(loaded.config, {"name": fork})
    all_words = [*words, *(["--fork", fork] if fork else [])]
    if nodes == 1 and config.parallel.gpus == "auto" and kind == "shell":
        all_words += ["--gpus", _named(gpus_per_node)]
    launch = Launch(
        config.name or "run", tuple(all_words), nodes, _gpus(gpus_per_node), master, port, max_restarts, image,
        float(config.limits.grace),
    )  # fmt: skip
    notes = [*loaded.notes, *check_launch(launch, config)]
    made = {each: _make(each, launch, json) for each in (_KINDS if kind == "all" else (kind,))}
    if json:
        from json import dumps

        facts = {"run": launch.name, "nodes": nodes, "gpus_per_node": launch.gpus, "notes": notes}
        print(dumps({**facts, **made}, indent=2, ensure_ascii=False))
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


def _gpus(typed: str) -> int:
    from sojourn.errors import UserError

    if typed == "auto":
        from sojourn.machine.gpus import driver_gpus

        try:
            return len(driver_gpus()) or 1
        except RuntimeError as error:
            raise UserError(f"--gpus-per-node auto: {error}; say how many, such as --gpus-per-node 4") from None
    if not typed.isascii() or not typed.isdigit() or not 1 <= int(typed[:6]) <= 1024:
        raise UserError(f"--gpus-per-node: “{typed[:40]}” given; allowed: auto or a number from 1 to 1024")
    return int(typed)


def _named(typed: str) -> str:
    """On one machine train starts its processes by itself, and wants to know on which GPUs."""
    return "all" if typed == "auto" else ",".join(map(str, range(_gpus(typed))))
