"""Several ranks from one command: `sojourn train RUN --gpus 0,1` starts itself again under torchrun's own agent.

The agent runs in a thread. The main thread forwards signals to the workers and waits as long as they take to save
(torchrun would kill them after 30 s). Workers that end without a verdict (`verdict.py`) are restarted from the last
checkpoint, `parallel.restarts` times at most.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.launch.address import node_address, rendezvous_endpoint
from sojourn.launch.stop_signals import STOP_SIGNALS
from sojourn.launch.verdict import VERDICT, printed_marker, stop_marker
from sojourn.machine.precision import choose_device
from sojourn.storage.files import read_json

_JOIN_TIMEOUT = 3600  # seconds for a node to join, or to rejoin


def local_world_size(config: RunConfig) -> int:
    """How many ranks this node is to have; 1 where nothing needs to be launched."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported: a lost rank is one line
    gpus, device = config.parallel.gpus, choose_device(config.train.device)
    if isinstance(gpus, list):
        if device != "cuda" and len(gpus) > 1:
            print(f"note: no GPU is used here; {len(gpus)} ranks share the {device}", flush=True)
        return len(gpus)
    if gpus == "all" and device == "cuda":
        import torch

        return int(torch.cuda.device_count())
    return 1


def launch(config: RunConfig, args: list[str], ranks: int) -> int:
    """Runs `sojourn` with `args` in so many ranks here; returns the exit code when all have ended."""
    world_size, batch = ranks * config.parallel.nodes, config.train.global_batch
    if batch < world_size:
        raise UserError(
            f"train.global_batch: {batch} rows cannot be shared by {world_size} ranks; "
            f"set train.global_batch={world_size}"
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # otherwise a lost node cannot rejoin
    with tempfile.TemporaryDirectory(prefix="sojourn-") as folder:
        path = Path(folder) / "verdict.json"
        os.environ[VERDICT] = str(path)
        try:
            with _forward_signals(stop_marker(path)):
                error = _run_agent(config, [*_torchrun_args(config, ranks), "-m", "sojourn", *args])
        finally:
            del os.environ[VERDICT]  # a later run of this process has a folder of its own
        verdict, printed = read_json(path), printed_marker(path).exists()
    if verdict is None:
        return 0 if error is None else _report(error, config)
    if not printed:
        print(f"sojourn: rank {verdict['rank']}: {verdict['message']}", file=sys.stderr)
    return int(verdict["code"])


def _run_agent(config: RunConfig, torchrun_args: list[str]) -> BaseException | None:
    """torchrun's agent in a thread, so that we handle the signals; returns the error it ended with."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    launch_config, entrypoint, args = config_from_args(parse_args(torchrun_args))
    if config.parallel.nodes > 1:
        print(f"rendezvous of {config.parallel.nodes} nodes at {config.parallel.master}", flush=True)
        launch_config.local_addr = node_address(config.parallel)
    errors: list[BaseException] = []

    def agent() -> None:
        try:
            elastic_launch(config=launch_config, entrypoint=entrypoint)(*args)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=agent, name="agent", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    return errors[0] if errors else None


def _report(error: BaseException, config: RunConfig) -> int:
    """Prints what happened to workers that left no verdict; returns the exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if isinstance(error, RendezvousError):
        message = (
            f"timed out waiting for the nodes of this run at {config.parallel.master}; is the first node gone, or "
            "behind a firewall? Run the same command on all nodes to resume from the last checkpoint"
        )
    elif isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        ended = f"was killed ({failure.signal_name()})" if failure.exitcode < 0 else f"exited ({failure.exitcode})"
        message = (
            f"rank {rank} {ended} after {config.parallel.restarts} restarts (parallel.restarts); run the same command "
            "to resume from the last checkpoint"
        )
    else:
        raise error
    print(f"sojourn: {message}", file=sys.stderr)
    return 1


def _torchrun_args(config: RunConfig, ranks: int) -> list[str]:
    parallel = config.parallel
    args = [f"--nproc_per_node={ranks}", f"--max-restarts={parallel.restarts}", "--monitor-interval=0.1"]
    if parallel.nodes == 1:
        return [*args, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={os.getpid()}"]
    host, port = rendezvous_endpoint(parallel)
    rendezvous = [f"--nnodes={parallel.nodes}", "--rdzv-backend=c10d", f"--rdzv-id={config.name or 'run'}",
                  f"--rdzv-endpoint={host}:{port}"]  # fmt: skip
    is_host = [] if parallel.node == "auto" else [f"is_host={'true' if parallel.node == 0 else 'false'}"]
    return [*args, *rendezvous, f"--rdzv-conf={','.join([f'join_timeout={_JOIN_TIMEOUT}', *is_host])}"]


@contextmanager
def _forward_signals(stopped: Path) -> Iterator[None]:
    """Every signal goes to all workers, which agree on what to do; `stopped` exists from then on."""
    import psutil

    def forward(number: int, _: Any) -> None:
        with suppress(OSError):  # a full disk
            stopped.touch()
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                child.send_signal(number)

    handlers = {n: signal.signal(n, forward) for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
