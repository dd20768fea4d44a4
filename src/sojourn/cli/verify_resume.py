"""`sojourn verify-resume`: proves on the user's own run, on this machine, that a kill costs nothing."""

from __future__ import annotations

import typer


def verify_resume(
    words: list[str] = typer.Argument(
        metavar="RUN [key=value]... [--flag value]...", help="A preset, a YAML file or a run's folder, then overrides."
    ),
    steps: int = typer.Option(8, "--steps", min=2, max=100_000, help="Steps of each of the two runs."),
    json: bool = typer.Option(False, "--json", help="Print the verdict as JSON; other lines go to standard error."),
) -> None:
    """Train a few steps twice in a scratch folder, once undisturbed and once killed and continued, and compare.

    Exit 0 when both end with the same weights (or, on a GPU that sums in another order each time, with losses that
    agree), 1 when they do not. train.deterministic=on asks a GPU for the same sums every time.
    """
    import sys
    from json import dumps

    from sojourn.config.load import load_run
    from sojourn.errors import RunFailed
    from sojourn.train.verify_resume import prove

    config = load_run(words).config

    def say(line: str) -> None:
        print(line, file=sys.stderr if json else sys.stdout, flush=True)

    verdict = prove(config, steps, say)
    if json:
        print(dumps(verdict.facts))
    else:
        print(verdict.says)
    if not verdict.holds:
        raise RunFailed("a killed run did not come back the same; please report this with the folder's run.yaml")
