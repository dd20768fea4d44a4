"""`sojourn rehearse`: one minute on the card that proves a run will go through, or says why not."""

from __future__ import annotations

import typer


def rehearse(
    words: list[str] = typer.Argument(
        metavar="RUN [key=value]... [--flag value]...", help="A preset or a YAML file, then overrides."
    ),
    json: bool = typer.Option(False, "--json", help="Print the findings as JSON; other lines go to standard error."),
) -> None:
    """Try a run for a minute before paying for it: memory, speed, saving, disk, mirror. Leaves nothing behind.

    The longest rows go forward and back, a few real steps are made, a checkpoint is written and read back, and the
    disk, the limits and the mirror are checked. Exit 1 when the run should not start, with the reason.
    """
    import contextlib
    import dataclasses
    import sys
    from json import dumps

    from sojourn.config.load import load_run
    from sojourn.errors import RunFailed
    from sojourn.run.home import run_folder

    loaded = load_run(words)
    run = run_folder(loaded.config.name or "run", loaded.config.save.folder)
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        from sojourn.train.loop import use_device
        from sojourn.train.rehearse import rehearse as rehearse_run

        report = rehearse_run(loaded.config, run, use_device(loaded.config))
    if json:
        found = [dataclasses.asdict(one) for one in report.findings]
        print(dumps({"starts": report.refused is None, "findings": found, **report.facts}, ensure_ascii=False))
    else:
        marks = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
        for one in report.findings:
            print(f"{marks[one.level]} {one.name:<10} {one.says}")
    if report.refused is not None:
        raise RunFailed(f"this run should not start: {report.refused}")
    if not json:
        print(f"ready: sojourn train {' '.join(words)}")
