"""`sojourn train`: trains a run, or resumes it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from sojourn.cli.run_args import RunArgs
from sojourn.run.output import lossy

if TYPE_CHECKING:
    from sojourn.config.schema import RunConfig
    from sojourn.run.folder import RunFolder
    from sojourn.run.startup import Startup


@lossy("stdout")
def train(
    args: RunArgs,
    fork: str | None = typer.Option(
        None,
        "--fork",
        metavar="NEWNAME",
        help="Start a new run with new settings from this run's newest checkpoint.",
    ),
) -> None:
    """Train a run. Ctrl-C saves a checkpoint; run the same command to resume.

    Set any key after RUN as key=value (train.lr=1e-4). Flags of other trainers work too:
    --d_model 512 --num_layers 6 --batch_size 16 --num_epochs 10 --max_seq_len 512 --train_file my.jsonl --gpus 0 …
    Several GPUs: --gpus 0,1 or --gpus all, optionally with --fsdp or --deepspeed ds_config.json. Several machines:
    --nnodes 2 --node_rank 0 --master_addr HOST on each (see: sojourn launch-line).
    """
    from sojourn.config.load import load_run
    from sojourn.data.tokenize.templates import has_chat_template
    from sojourn.run.fork import fork_run
    from sojourn.run.home import run_folder
    from sojourn.run.startup import Startup
    from sojourn.train.run_name import choose_name

    loaded = load_run(args)
    config, note = choose_name(loaded) if fork is None else (fork_run(loaded.config, fork), None)
    is_main = os.environ.get("RANK", "0") == "0"
    name = config.name or "run"
    run = run_folder(name, config.save.folder)
    with Startup(run.path if is_main and config.parallel.node in ("auto", 0) else None) as startup:
        _train(config, replace(run, is_main_process=is_main), startup, loaded.notes, note)
    if not is_main:
        return
    print(f"done: the model is in {run.final}")
    chats = has_chat_template(run.final)
    model = name if config.save.folder is None else run.path
    print(f"next: sojourn chat {model}" if chats else f'next: sojourn generate {model} --prompt "Once"')


def _train(config: RunConfig, run: RunFolder, startup: Startup, notes: tuple[str, ...], renamed: str | None) -> None:
    """In this process, or in those of the launcher. `renamed`: why the run has another name than its command says."""
    from sojourn.run.home import home_warning

    if config.model.base is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        from sojourn.machine.read_ahead import read_ahead

        read_ahead(config.model.base)  # into the page cache, while Python imports torch
    from sojourn.launch.agent import launch, local_world_size
    from sojourn.launch.worker import exit_if_run_over, is_worker, worker_process

    if not is_worker():
        ranks_here = local_world_size(config)
        if ranks_here > 1 or config.parallel.nodes > 1:
            startup.hand_over()
            if renamed:
                print(f"note: {renamed}", flush=True)
            name = [f"name={config.name}"] if renamed else []
            raise typer.Exit(launch(config, [*sys.argv[1:], *name], ranks_here))
    exit_if_run_over()  # restarted by the launcher after the run had stopped or failed
    warning = home_warning() if config.save.folder is None else None
    if run.is_main_process:
        for line in (
            *(f"note: {note}" for note in (*notes, renamed) if note),
            *([f"warning: {warning}"] if warning else ()),
        ):
            print(line)
    from sojourn.train.loop import train as train_run

    with worker_process():
        train_run(config, run, startup)
