"""`sojourn launch`: runs a RUN on a rented box and brings the model home."""

from __future__ import annotations

import typer

from sojourn.cli.run_args import RunArgs


def launch(
    args: RunArgs,
    on: str = typer.Option(..., "--on", metavar="HOST[,HOST]", help="Hosts of `sojourn host list`; or kaggle, sky."),
    budget: str | None = typer.Option(None, "--budget", help="Most money, kept by the box itself: ¥20, $5."),
    deadline: str | None = typer.Option(None, "--deadline", help="Most time, kept by the box itself: 12h, 3d."),
    price: str | None = typer.Option(None, "--price", help="Price per hour, if not the host's."),
    stop_when_done: bool = typer.Option(False, "--stop-when-done", help="Power the box off once all is safe."),
    nodes: int = typer.Option(1, "--nodes", min=1, max=64, help="Boxes that train together: the first of --on."),
    gpu: str | None = typer.Option(None, "--gpu", help="Which GPU, where one can choose: kaggle (T4), sky (A100:2)."),
    to_yaml: str | None = typer.Option(None, "--to-yaml", metavar="FILE", help="sky: write the task, start nothing."),
    detach: bool = typer.Option(False, "--detach", help="Return once it trains; the model waits on the box."),
    notify: list[str] | None = typer.Option(None, "--notify", help="webhook, command, autodl, serverchan, bark."),
    max_restarts: int = typer.Option(3, "--max-restarts", min=0, max=100, help="Restarts without progress."),
    stall: str = typer.Option("15m", "--stall", help="Restart when no step comes for so long."),
    prepare_there: bool = typer.Option(False, "--prepare-there", help="Prepare the data on the box, not here."),
    allow_secrets: bool = typer.Option(False, "--allow-secrets", help="Send files although they look like secrets."),
    install_torch: bool = typer.Option(False, "--install-torch", help="Install torch on a box without it (gigabytes)."),
    json: bool = typer.Option(False, "--json", help="Print the last state as JSON; everything else on standard error."),
) -> None:  # fmt: skip
    """Train a run on a rented box: plan, send, install, rehearse, train, bring the model home.

    Once it trains, this machine may be closed; the box keeps budget and deadline itself. Ctrl-C only stops watching.
    Typed again, it goes on where it was.
    """
    from pathlib import Path

    from sojourn.cli.remote_output import Output
    from sojourn.plan.arguments import to_budget, to_seconds
    from sojourn.remote.launch import launch as launch_run
    from sojourn.remote.spec import Terms
    from sojourn.remote.start import Options, split_gpu

    terms = Terms(
        to_budget(budget), to_budget(price, "--price"), to_seconds(deadline), stop_when_done, tuple(notify or ()),
        max_restarts, to_seconds(stall, "--stall") or 900.0,
    )  # fmt: skip
    options = Options(
        terms,
        detach,
        allow_secrets,
        not prepare_there,
        install_torch,
        nodes,
        *split_gpu(gpu),
        None if to_yaml is None else Path(to_yaml),
    )
    names = tuple(name.strip() for name in on.split(",") if name.strip())
    with Output(json, "not watching any more; what runs on the box goes on (see: sojourn runs)") as output:
        output.result(launch_run(args, names, options, output.say, output.show))
