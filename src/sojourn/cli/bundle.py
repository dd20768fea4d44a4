"""`sojourn bundle`: a run as one file, for machines that are reached through a notebook only."""

from __future__ import annotations

from pathlib import Path

import typer

from sojourn.cli.run_args import RunArgs


def bundle(
    args: RunArgs,
    out: Path | None = typer.Option(None, "--out", metavar="FILE", help="Where to write it (NAME.zip here)."),
    colab: bool = typer.Option(False, "--colab", help="A Colab notebook, too, that mounts Drive and starts it."),
    allow_secrets: bool = typer.Option(False, "--allow-secrets", help="Send files that look like secrets."),
    json: bool = typer.Option(False, "--json", help="Print the facts as JSON."),
) -> None:
    """Write a run as one archive: program, settings, data, prepared data. No secrets.

    Upload it through a notebook's file browser, then start it there with one line:
    !python NAME.zip. The same line continues it. It runs on when the page is closed.
    """
    from sojourn.config.load import load_run
    from sojourn.remote.bundle import make_bundle

    def say(line: str) -> None:
        if not json:
            print(line, flush=True)

    loaded = load_run(args)
    for note in loaded.notes:
        say(f"note: {note}")
    notebook: Path | None = None
    if colab:
        from sojourn.remote.platforms.colab import make_colab_bundle

        made, notebook = make_colab_bundle(loaded, out, allow_secrets=allow_secrets, say=say)
    else:
        made = make_bundle(loaded, out, allow_secrets=allow_secrets, say=say)
    for note in made.notes:
        say(f"note: {note}")
    if json:
        from sojourn.run.output import print_json

        facts = {"file": str(made.path), "run": made.run, "size": made.size, "sha256": made.sha256, "parts": made.parts,
                 "start": made.start, "notebook": str(notebook) if notebook else None}  # fmt: skip
        print_json(facts)
        return
    from sojourn.storage.sizes import format_size

    parts = ", ".join(f"{kind} {format_size(size)}" for kind, size in sorted(made.parts.items()))
    print(f"{made.path}: {format_size(made.size)} ({parts} before compression)")
    if notebook:
        print(f"{notebook}: open it in Colab and run all cells; it asks for {made.path.name} the first time")
        from sojourn.remote.platforms.colab import cli_lines, has_cli

        for line in ["or from a terminal:", *cli_lines(made)] if has_cli() else []:
            print(f"  {line}")
        return
    print("upload it with the notebook's file browser, then in a cell or a terminal there:")
    print(f"  start:    !{made.start}")
    print(f"  continue: !{made.start}")
    print(f"  look:     !{made.start} --status      the model as one file: !{made.start} --pack")
