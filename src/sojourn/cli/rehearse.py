"""`sojourn rehearse`: one minute on the card that proves a run will go through, or says why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

if TYPE_CHECKING:
    from sojourn.train.rehearse import Report


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
    import sys

    from sojourn.config.load import load_run, with_settings
    from sojourn.errors import RunFailed
    from sojourn.run.home import run_folder

    loaded, told = load_run(words), sys.stdout
    run = run_folder(loaded.config.name or "run", loaded.config.save.folder)
    with redirect_stdout(sys.stderr) if json else nullcontext():
        from sojourn.launch.agent import launch, local_world_size
        from sojourn.launch.worker import exit_if_run_over, is_worker, worker_process

        if not is_worker():
            ranks_here = local_world_size(loaded.config)
            if ranks_here > 1 or loaded.config.parallel.nodes > 1:
                once = with_settings(loaded.config, {"parallel.restarts": 0})
                raise typer.Exit(launch(once, sys.argv[1:], ranks_here))
        exit_if_run_over()
        from sojourn.train.loop import use_device
        from sojourn.train.ranks import join_process_group, leave_process_group
        from sojourn.train.rehearse import rehearse as rehearse_run

        silent = os.environ.get("RANK", "0") != "0"
        with worker_process(), _nowhere() if silent else nullcontext():
            ranks = join_process_group(use_device(loaded.config), loaded.config)
            report = rehearse_run(loaded.config, run, ranks)
            if ranks.is_main:
                _show(report, json, told)
            if report.refused is not None:
                raise RunFailed(f"this run should not start: {report.refused}")
            leave_process_group()
    if not (json or silent):
        print(f"ready: sojourn train {' '.join(words)}")


@contextmanager
def _nowhere() -> Iterator[None]:
    """One process speaks for all."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def _show(report: Report, json: bool, told: TextIO) -> None:
    if json:
        from dataclasses import asdict
        from json import dumps

        found = [asdict(one) for one in report.findings]
        all_of_it = {"starts": report.refused is None, "findings": found, **report.facts}
        print(dumps(all_of_it, ensure_ascii=False), file=told)
        return
    marks = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
    for one in report.findings:
        print(f"{marks[one.level]} {one.name:<10} {one.says}", file=told)
