"""`sojourn bench`: measure this program on this machine against what it promises."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

bench_app = typer.Typer(help="Measure this program on this machine.", no_args_is_help=True)


@bench_app.callback()
def _root() -> None:
    pass


@bench_app.command("prepare")
def bench_prepare(
    size: Annotated[str, typer.Option(help="Bytes of the generated chats that all contenders prepare.")] = "1GB",
    flat: Annotated[
        str, typer.Option(help="Further sizes, with commas, at which our own memory is measured; may be empty.")
    ] = "0.2GB,4GB",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer's folder; by default one of 32,000 tokens is trained.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=256, help="Processes of each contender; by default one a usable core.")
    ] = None,
    peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Do the same with datasets.map.")] = True,
    folder: Annotated[
        Path | None, typer.Option(help="Where to work; the system's temporary folder by default.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; lines go to standard error.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file.")] = None,
) -> None:
    """Prepare generated chats: speed against datasets.map and the bare tokenizer, peak memory, the second call."""
    from tempfile import gettempdir

    from sojourn.bench.prepare import make_plan, measure

    place = folder or Path(gettempdir())
    _report(lambda say: measure(make_plan(size, flat, tokenizer, workers, peer, place), say), json, out)


@bench_app.command("train")
def bench_train(
    told: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="How our own rows learn: train.lr, train.schedule, train.warmup, train.seed, … They need --no-peers.",
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="What to train (tiny, pretrain-110m, lora-7b, …), with commas; by default what fits this machine."
        ),
    ] = None,
    rows: Annotated[
        str, typer.Option(help="Only these rows, with commas. With --gpus: the one whose settings to use.")
    ] = "",
    steps: Annotated[int, typer.Option(min=2, max=10_000, help="Steps of each row; the first fifth warms up.")] = 25,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Do the same with other programs.")] = True,
    peer_steps: Annotated[
        int | None, typer.Option(min=2, max=10_000, help="Steps of other programs, where --steps would take too long.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Texts of your own to train on (for adapters: chats), a file or a folder, not made-up ones."),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="Report instead what more GPUs bring, on 1, 2, 4, … of these: 0,1 or all.")
    ] = None,
    engines: Annotated[
        str | None, typer.Option(help="Those to compare with one process alone, for --gpus; by default ddp,fsdp.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where to work and to keep weights and data for the next call; by default nothing is kept."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; lines go to standard error.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the result as JSON to this file, after every row already.")
    ] = None,
) -> None:
    """Train models of random weights: speed and memory by optimisation and against peers, every loss compared."""
    from sojourn.bench.train import measure, scaling
    from sojourn.errors import UserError

    if gpus is None:
        if engines is not None:
            raise UserError("--engines: say on which GPUs to compare them, such as --gpus 0,1 or --gpus all")
        wanted = (workload or [], rows, steps, peers, folder, peer_steps, data, out, told or [])
        _report(lambda say: measure.measure(measure.make_plan(*wanted), say), json, out)
        return
    if told:
        raise UserError(f"{told[0]}: what more GPUs bring is measured as the workload says; leave out one of both")
    asked = (workload or [], rows, steps, folder, gpus, engines or "ddp,fsdp", data, out)
    _report(lambda say: scaling.measure(scaling.make_scaling(*asked), say), json, out)


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
        list[str] | None, typer.Option(help="What to train and save (tiny, lora-7b, full-1.5b, …), with commas.")
    ] = None,
    saves: Annotated[int, typer.Option(min=2, max=1000, help="Checkpoints to write.")] = 3,
    every: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between them.")] = 15.0,
    folder: Annotated[
        Path | None, typer.Option(help="Where to keep weights and data for the next call; by default nothing is kept.")
    ] = None,
    runs: Annotated[Path | None, typer.Option(help="Where the checkpoints go; by default with the rest.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; lines go to standard error.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file.")] = None,
) -> None:
    """What saving costs: how long training waits, what it loses in all, and how much later a resumed run starts."""
    from sojourn.bench.save import make_plan, measure

    _report(lambda say: measure(make_plan(workload or [], saves, every, folder, runs), say), json, out)


def _report(measured: Callable[[Callable[[str], None]], dict[str, Any]], json: bool, out: Path | None) -> None:
    """Measures, having made sure that the result can be kept; then prints and writes it."""
    from json import dumps

    from sojourn.errors import UserError
    from sojourn.storage.files import write_json

    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"--out: {out.parent}: no such folder")
    lines = sys.stderr if json else sys.stdout
    result = measured(lambda line: print(line, file=lines, flush=True))
    if json:
        print(dumps(result, ensure_ascii=False))
    if out is not None:
        write_json(out, result)
        print(f"written: {out}", file=lines)
