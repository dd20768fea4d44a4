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
    print_measurement(lambda echo: measure(make_bench(size, flat, tokenizer, workers, peer, folder), echo), json, out)


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
        print_measurement(lambda echo: measure.measure(measure.make_bench(*options), echo), json, out)
        return
    if overrides:
        raise UserError(f"{overrides[0]}: not with --gpus, which measures the workload as it is; remove one of the two")
    scaling_options = (workload or [], rows, steps, folder, gpus, engines or "ddp,fsdp", data, out)
    print_measurement(lambda echo: scaling.measure(scaling.make_scaling(*scaling_options), echo), json, out)


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

    print_measurement(lambda echo: measure(make_bench(workload or [], saves, every, folder, runs), echo), json, out)


@bench_app.command("serve")
def bench_serve(
    model: Annotated[str, typer.Argument(help="What `sojourn serve` serves: a run, a folder, a GGUF file.")],
    clients: Annotated[
        str, typer.Option(help="Clients that ask at a time, separated by commas (closed loop).")
    ] = "1,32",
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests a second instead, whenever they are answered (open loop).")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of each row; by default 3 a client.")] = None,
    lengths: Annotated[
        str, typer.Option(help="Tokens of prompt and answer (128x128), or chat: as in instruction data.")
    ] = "128x128",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    peer: Annotated[
        bool,
        typer.Option(
            "--peer/--no-peer",
            help="transformers.generate, and vLLM and llama.cpp (for GGUF files) where installed, too.",
        ),
    ] = True,
    quantize: Annotated[str | None, typer.Option(help="Our engine's weights: int8; on a GPU fp8 or nf4, too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; lines go to standard error.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file.")] = None,
) -> None:
    """Serve a model under load: tokens a second, time to first token (TTFT), inter-token latency (ITL), in ms."""
    from sojourn.bench.serve.measure import make_bench, measure

    arguments = ["--quantize", quantize] if quantize else []
    bench = make_bench(model, clients, rate, requests, lengths, device, peer, arguments)
    print_measurement(lambda echo: measure(bench, echo), json, out)


def print_measurement(measure: Callable[[Callable[[str], None]], dict[str, Any]], json: bool, out: Path | None) -> None:
    """Checks --out first, then measures, prints and writes the result."""
    from sojourn.errors import UserError
    from sojourn.run.output import print_json
    from sojourn.storage.files import write_json

    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"--out: {out.parent}: no such folder")
    lines = sys.stderr if json else sys.stdout
    result = measure(lambda line: print(line, file=lines, flush=True))
    if json:
        print_json(result)
    if out is not None:
        write_json(out, result)
        print(f"written: {out}", file=lines)
