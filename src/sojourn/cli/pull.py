"""`sojourn pull`: brings a remote run's model home, or a model from a hub."""

from __future__ import annotations

import typer

from sojourn.cli.logs import Json
from sojourn.expand_user import expand_user


def pull(
    name: str = typer.Argument(
        ..., metavar="RUN | ORG/NAME", help="A run of `sojourn runs`; or, with a slash, a model on a hub."
    ),
    what: str = typer.Option("final", "--what", help="Of a run: final, best, checkpoint (the newest) or all."),
    to: str | None = typer.Option(
        None, "--to", metavar="FOLDER", help="Where to. Default: the run's folder here; of a model, the hub's cache."
    ),
    hub: str = typer.Option("hf", "--hub", metavar="hf|modelscope", help="Of a model: which hub."),
    revision: str | None = typer.Option(
        None, "--revision", metavar="REVISION", help="Of a model: branch, tag, commit."
    ),
    include: list[str] = typer.Option([], "--include", metavar="PATTERN", help="Of a model: bring these files too."),
    json: Json = False,
) -> None:
    """Bring a run's model, or the whole run, home; or a model from a hub, to train or export it.

    Each file is verified by its hash; a cut transfer goes on where it was. Of a model on a hub: safetensors, settings
    and tokenizer; a line says what was left out.

    Examples: sojourn pull small; sojourn pull HuggingFaceTB/SmolLM2-135M
    """
    from sojourn.cli.remote_output import Output

    with Output(json) as output:
        if "/" in name:
            from sojourn.model.pull import pull_model

            folder = expand_user(to).absolute() if to else None
            output.result(pull_model(name, hub, revision, folder, include, output.say))
            return
        from sojourn.remote.verbs import pull_named

        output.result(pull_named(name, what, to, output.say))
