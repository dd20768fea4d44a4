"""`sojourn install`: an environment of its own for a program that pins its own torch."""

from __future__ import annotations

import typer

from sojourn.cli.confirm import YesOption, confirm


def install(
    name: str = typer.Argument(..., metavar="PROGRAM", help="vllm or llmcompressor."), yes: YesOption = False
) -> None:
    """Install a program that exports are made with or replayed in, in an environment of its own in SOJOURN_HOME.

    vllm serves and replays models; llmcompressor quantizes them for vLLM: sojourn quantize --to gptq, awq or fp8-vllm.

    Examples: sojourn install llmcompressor; sojourn install vllm --yes
    """
    import sys

    from sojourn.config.messages import did_you_mean, printable
    from sojourn.errors import UserError
    from sojourn.infer.runtimes.managed_environment import ENVIRONMENTS

    if name not in ENVIRONMENTS:
        guess = did_you_mean(name, list(ENVIRONMENTS))
        raise UserError(f"no program is called “{printable(name)}”{guess}; there are: {', '.join(ENVIRONMENTS)}")
    found = ENVIRONMENTS[name]
    if not found.why_unavailable():
        print(f"{found.title} is there already: {found.python()}")
        return
    what, _, where = found.describe_install().partition(" in ")
    confirm(what, f"in {where}", yes)
    folder = found.install(lambda line: print(line, file=sys.stderr, flush=True))
    print(f"{found.title} is installed: {folder}")
