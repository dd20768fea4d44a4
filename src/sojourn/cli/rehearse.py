"""`sojourn rehearse`: a one-minute test of a run on this machine, before it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from sojourn.cli.run_args import RunArgs

if TYPE_CHECKING:
    from sojourn.train.rehearse import Report


def rehearse(
    args: RunArgs,
    json: bool = typer.Option(False, "--json", help="Print the result as JSON; progress goes to standard error."),
) -> None:
    """Test a run for a minute: memory, speed, checkpoints, disk, mirror. Leaves nothing behind.

    Runs forward and backward on the longest rows, makes a few real steps, writes a checkpoint and reads it back, and
    checks disk, limits and mirror. Exits 1 with the reason when the run should not start.
    """
    import sys

    from sojourn.config.load import load_run, with_settings
    from sojourn.errors import RunFailed
    from sojourn.run.home import run_folder
    from sojourn.train.run_name import choose_name

    stdout, (config, note) = sys.stdout, choose_name(load_run(args))
    run = run_folder(config.name or "run", config.save.folder)
    with redirect_stdout(sys.stderr) if json else nullcontext():
        from sojourn.launch.agent import launch, local_world_size
        from sojourn.launch.worker import exit_if_run_over, is_worker, worker_process

        if not is_worker():
            ranks_here = local_world_size(config)
            if ranks_here > 1 or config.parallel.nodes > 1:
                once = with_settings(config, {"parallel.restarts": 0})
                raise typer.Exit(launch(once, [*sys.argv[1:], *([f"name={config.name}"] if note else [])], ranks_here))
        exit_if_run_over()
        from sojourn.train.loop import use_device
        from sojourn.train.ranks import join_process_group, leave_process_group
        from sojourn.train.rehearse import rehearse as rehearse_run

        silent = os.environ.get("RANK", "0") != "0"
        with worker_process(), _discard_stdout() if silent else nullcontext():
            ranks = join_process_group(use_device(config), config)
            report = rehearse_run(config, run, ranks)
            if ranks.is_main:
                _show(report, json, stdout)
            if report.refused is not None:
                raise RunFailed(f"this run should not start: {report.refused}")
            leave_process_group()
    if not (json or silent):
        print(f"ready: sojourn train {' '.join(args)}")


@contextmanager
def _discard_stdout() -> Iterator[None]:
    """On all ranks but rank 0."""
    with Path(os.devnull).open("w", encoding="utf-8") as sink, redirect_stdout(sink):
        yield


def _show(report: Report, json: bool, stdout: TextIO) -> None:
    if json:
        from dataclasses import asdict

        from sojourn.run.output import print_json

        found = [asdict(one) for one in report.findings]
        result = {"starts": report.refused is None, "findings": found, **report.facts}
        print_json(result, stdout)
        return
    marks = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
    for one in report.findings:
        print(f"{marks[one.level]} {one.name:<10} {one.message}", file=stdout)
