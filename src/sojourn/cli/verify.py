"""`sojourn verify`: is this export still what its source was?"""

from __future__ import annotations

from pathlib import Path

import typer


def verify(
    folder: Path = typer.Argument(..., metavar="DIR", help="An export; with --against, any model's folder or file."),
    against: str | None = typer.Option(
        None, "--against", metavar="MODEL", help="Compare with this model instead of the record in DIR."
    ),
    runtime: str | None = typer.Option(
        None, "--runtime", metavar="NAME", help="Replay in this program: transformers, llamacpp, onnxruntime, vllm, …"
    ),
    json: bool = typer.Option(False, "--json", help="Print JSON; progress goes to standard error."),
) -> None:
    """Check an export: its files by SHA-256, then template, token ids, logits and greedy text of its stored probes.

    The source is not needed. Exits 0 when everything agrees within the format's tolerance, else 1.

    Examples: sojourn verify exports/small-gguf; sojourn verify other.gguf --against small
    """
    import sys
    from json import dumps

    from sojourn.config.messages import did_you_mean
    from sojourn.errors import RunFailed, UserError
    from sojourn.export.verify import verify_against, verify_export
    from sojourn.infer.runtimes.registry import runtime_names

    if runtime is not None and runtime not in runtime_names():
        names = runtime_names()
        raise UserError(
            f"--runtime {runtime}: no such one{did_you_mean(runtime, names)}; there are: {', '.join(names)}"
        )

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    chosen = [runtime] if runtime is not None else None
    found = verify_export(folder, say, chosen) if against is None else verify_against(folder, against, say, chosen)
    if json:
        print(dumps(found.facts(), ensure_ascii=False))
    if found.problem is not None:
        raise RunFailed(f"{folder}: {found.problem}" if found.damage is None else found.problem)
    if not json:
        print(found.summary())
