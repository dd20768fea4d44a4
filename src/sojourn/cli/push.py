"""`sojourn push`: sends a model to a hub."""

from __future__ import annotations

import typer

from sojourn.cli.logs import Json


def push(
    model: str = typer.Argument(..., metavar="DIR", help="An export, a model's folder, or a run (its final model)."),
    repository: str = typer.Argument(..., metavar="ORG/NAME", help="The repository; it is made where it is not there."),
    hub: str = typer.Option("hf", "--hub", metavar="hf|modelscope", help="Hugging Face or ModelScope."),
    private: bool = typer.Option(False, "--private", help="A new repository is private; a public one is refused."),
    revision: str | None = typer.Option(None, "--revision", metavar="BRANCH", help="Default: the main branch."),
    json: Json = False,
) -> None:
    """Send a model to a hub. An interrupted push goes on with the same command; the hub's hashes are compared after it.

    The token is taken from HF_TOKEN or MODELSCOPE_API_TOKEN, or from the hub's own login; never from the command line.
    An export that changed since its parity gate, and files with secrets, are refused.

    An example: sojourn push exports/small-gguf me/small-gguf --private
    """
    from sojourn.cli.remote_output import Output
    from sojourn.export.push import push as send

    with Output(json, "interrupted; run the same command to go on where it was") as output:
        done = send(model, repository, hub, private, revision, output.say)
        sent = f"{len(done['sent'])} of {done['files']} files sent, verified" if done["sent"] else "was there already"
        output.say(f"{done['url']}: {sent} ({'private' if done['private'] else 'public'})")
        output.result(done)
