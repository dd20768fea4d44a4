"""`sojourn bench`: measure speed and memory on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

bench_app = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)


@bench_app.callback()
def _root() -> None:
    pass


@bench_app.command("prepare")
def bench_prepare(
    size: Annotated[str, typer.Option(help="Bytes of synthetic chats that all rows prepare.")] = "1GB",
    flat: Annotated[
        str,
        typer.Option(
            help="Further sizes, separated by commas, at which our own peak memory is measured; may be empty."
        ),
    ] = "0.2GB,4GB",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of a tokenizer; by default a new one of 32,000 tokens.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=256, help="Processes of each row; by default one per usable core.")
    ] = None,
    peer: Annotated[
        bool | None,
        typer.Option(
            "--peer/--no-peer", help="Do the same with datasets.map; by default where the repository is at hand."
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Working folder; by default the system's temporary folder.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; lines go to standard error.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file.")] = None,
) -> None:
    """Prepare synthetic chats: throughput against datasets.map and the bare tokenizer, peak memory, second call."""
    from tempfile import gettempdir

    from sojourn.bench.prepare import make_bench, measure

    folder = folder or Path(gettempdir())
    _report(lambda echo: measure(make_bench(size, flat, tokenizer, workers, peer, folder), echo), json, out)


@bench_app.command("train")
def bench_train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Hyperparameters of our own rows: train.lr, train.schedule, train.seed, … Only with --no-peers.",
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="What to train (tiny, pretrain-110m, lora-7b, …), separated by commas; by default what fits this GPU."
        ),
    ] = None,
    rows: Annotated[
        str, typer.Option(help="Only these rows, separated by commas. With --gpus: the row whose settings to use.")
    ] = "",
    steps: Annotated[int, typer.Option(min=2, max=10_000, help="Steps of each row; the first fifth is warm-up.")] = 25,
    peers: Annotated[
        bool | None,
        typer.Option("--peers/--no-peers", help="Do the same with other programs; by default from the repository."),
    ] = None,
    peer_steps: Annotated[
        int | None, typer.Option(min=2, max=10_000, help="Steps of other programs, if fewer than --steps.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Train on your own texts (for fine-tuning: chats), a file or folder, instead of synthetic ones."
        ),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="Measure scaling over 1, 2, 4, … of these GPUs instead: 0,1 or all.")
    ] = None,
    engines: Annotated[
        str | None, typer.Option(help="With --gpus: engines to compare with a single process; by default ddp,fsdp.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Working folder; keeps weights and data for the next call. By default nothing is kept."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; lines go to standard error.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file after every row.")] = None,
) -> None:
    """Train randomly initialised models: throughput and memory per optimisation and peer, with every loss compared."""
    from sojourn.bench.train import measure, scaling
    from sojourn.errors import UserError

    if gpus is None:
        if engines is not None:
            raise UserError("--engines: needs --gpus, such as --gpus 0,1 or --gpus all")
        options = (workload or [], rows, steps, peers, folder, peer_steps, data, out, overrides or [])
        _report(lambda echo: measure.measure(measure.make_bench(*options), echo), json, out)
        return
    if overrides:
        raise UserError(f"{overrides[0]}: not with --gpus, which measures the workload as it is; remove one of the two")
    scaling_options = (workload or [], rows, steps, folder, gpus, engines or "ddp,fsdp", data, out)
    _report(lambda echo: scaling.measure(scaling.make_scaling(*scaling_options), echo), json, out)


@bench_app.command("plan")
def bench_plan(
    cases: Annotated[
        list[str] | None, typer.Option(help="Only these, by name or a part of it (lora, 7b, …), with commas.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many of them.")] = None,
    draw: Annotated[
        int | None, typer.Option(min=1, help="So many runs drawn at random instead, to which nothing was ever fitted.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of --draw: the same runs each time.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Runs at once, if their memory allows.")] = 12,
    skip_capped: Annotated[
        bool, typer.Option("--skip-capped", help="Let first steps have more memory than is planned.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="A run that takes longer is ended; waiting does not count.")
    ] = 180.0,
    within: Annotated[
        float | None, typer.Option(min=1, help="After so many seconds no further run begins; --resume goes on later.")
    ] = None,
    read: Annotated[
        Path | None, typer.Option(help="Measure nothing: plan what this result has measured anew, without a GPU.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this result; what it has is kept.")] = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Ask other programs for the same runs.")] = True,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where to work and to keep what was compiled for the next call; by default nothing is kept."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; lines go to standard error.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the result as JSON to this file, after every run already.")
    ] = None,
) -> None:
    """How right `sojourn plan` is: real steps of many runs against what was planned, and against other estimates."""
    from sojourn.bench.plan.measure import make_plan, measure, read_again
    from sojourn.errors import UserError

    if read is not None:
        if resume is not None or cases or limit or draw:
            raise UserError("--read: measures nothing; remove --resume, --cases, --limit and --draw, or --read")
        _report(lambda say: read_again(read, peers, say), json, out)
        return
    if draw is not None and (cases or limit):
        raise UserError("--draw: draws its own runs; remove --cases and --limit, or --draw")
    asked = (cases or [], limit, jobs, seconds, within, not skip_capped, peers, folder, out, resume, draw, seed)
    _report(lambda say: measure(make_plan(*asked), say), json, out)


@bench_app.command("save")
def bench_save(
    workload: Annotated[
        list[str] | None,
        typer.Option(help="What to train and save (tiny, lora-7b, full-1.5b, …), separated by commas."),
    ] = None,
    saves: Annotated[int, typer.Option(min=2, max=1000, help="Checkpoints to write.")] = 3,
    every: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between them.")] = 15.0,
    folder: Annotated[
        Path | None, typer.Option(help="Keeps weights and data for the next call. By default nothing is kept.")
    ] = None,
    runs: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoints; by default in the working folder.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; lines go to standard error.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file.")] = None,
) -> None:
    """The cost of checkpoints: how long training waits, what it loses in all, how much later a resumed run starts."""
    from sojourn.bench.save import make_bench, measure

    _report(lambda echo: measure(make_bench(workload or [], saves, every, folder, runs), echo), json, out)


def _report(measure: Callable[[Callable[[str], None]], dict[str, Any]], json: bool, out: Path | None) -> None:
    """Checks --out first, then measures, prints and writes the result."""
    from json import dumps

    from sojourn.errors import UserError
    from sojourn.storage.files import write_json

    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"--out: {out.parent}: no such folder")
    lines = sys.stderr if json else sys.stdout
    result = measure(lambda line: print(line, file=lines, flush=True))
    if json:
        print(dumps(result, ensure_ascii=False))
    if out is not None:
        write_json(out, result)
        print(f"written: {out}", file=lines)
