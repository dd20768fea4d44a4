"""`sojourn verify-resume`: checks on this machine that a killed run resumes exactly."""

from __future__ import annotations

import typer

from sojourn.cli.run_args import RunArgs


def verify_resume(
    args: RunArgs,
    steps: int = typer.Option(8, "--steps", min=2, max=100_000, help="Steps of each of the two runs."),
    json: bool = typer.Option(False, "--json", help="Print the verdict as JSON; progress goes to standard error."),
) -> None:
    """Train a few steps twice in a scratch folder, once undisturbed and once killed and resumed, and compare.

    Exits 0 when both end with the same weights (on a GPU with nondeterministic kernels: with losses that agree),
    else 1. train.deterministic=on makes a GPU deterministic.
    """
    import sys
    from json import dumps

    from sojourn.config.load import load_run
    from sojourn.errors import RunFailed
    from sojourn.train.verify_resume import verify

    config = load_run(args).config

    def say(line: str) -> None:
        print(line, file=sys.stderr if json else sys.stdout, flush=True)

    verdict = verify(config, steps, say)
    if json:
        print(dumps(verdict.facts))
    else:
        print(verdict.message)
    if not verdict.holds:
        raise RunFailed(
            "the resumed run differs from the undisturbed one; please report this with the folder's run.yaml"
        )
