"""Several processes from one command: `sojourn train RUN --gpus 0,1` starts itself again under torchrun's own agent.

The agent runs in a thread of this process, which stays to pass signals on: to the workers alone, and as long as they
take to save. A worker that must end the whole run leaves a verdict; one that was killed, or lost another, leaves none,
and then all are started again from the last checkpoint, `parallel.restarts` times at most.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sojourn.config.schema import RunConfig
from sojourn.errors import Stopped, UserError
from sojourn.launch.address import node_address, rendezvous_endpoint
from sojourn.launch.verdict import VERDICT, RelayedError, RestartNeeded, RunOver
from sojourn.machine.precision import choose_device
from sojourn.storage.files import read_json

_TOLD = ".told"  # beside a verdict that its process has shown itself
_WAIT = 3600  # seconds for a machine to come, or to come back
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_LOST = ("connection closed by peer", "connection reset", "gloo", "nccl", "socket", "broken pipe", "peer")


def is_worker() -> bool:
    """Whether torchrun, or we, started this process as one of several."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def local_world_size(config: RunConfig) -> int:
    """How many this machine is to have; 1 where nothing need be launched."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is there: a lost peer is told in one line
    gpus, device = config.parallel.gpus, choose_device(config.train.device)
    if isinstance(gpus, list):
        if device != "cuda" and len(gpus) > 1:
            print(f"note: no GPU is used here; {len(gpus)} processes share the {device}", flush=True)
        return len(gpus)
    if gpus == "all" and device == "cuda":
        import torch

        return int(torch.cuda.device_count())
    return 1


def launch(config: RunConfig, words: list[str], processes: int) -> int:
    """Runs `sojourn` with `words` in so many processes here; returns its exit code when all have ended."""
    several, batch = processes * config.parallel.nodes, config.train.global_batch
    if batch < several:
        raise UserError(f"train.global_batch: {batch} rows cannot be shared by {several} processes; use {several}")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a machine that was lost cannot come back
    with tempfile.TemporaryDirectory(prefix="sojourn-") as folder:
        verdict = Path(folder) / "verdict.json"
        os.environ[VERDICT] = str(verdict)
        try:
            with _passed_on(_told_to_stop(verdict)):
                trouble = _run_agent(config, [*_meeting(config, processes), "-m", "sojourn", *words])
        finally:
            del os.environ[VERDICT]  # a later run of this process has a folder of its own
        found, shown = read_json(verdict), verdict.with_suffix(_TOLD).exists()
    if found is not None and not shown:
        print(f"sojourn: process {found['rank']}: {found['says']}", file=sys.stderr)
    return int(found["code"]) if found is not None else 0 if trouble is None else _told(trouble, config)


def _run_agent(config: RunConfig, words: list[str]) -> BaseException | None:
    """torchrun's, in a thread, so that signals are ours; returns what went wrong with it in the end."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    how, entry, given = config_from_args(parse_args(words))
    if config.parallel.nodes > 1:
        print(f"meeting {config.parallel.nodes} machines at {config.parallel.master}", flush=True)
        how.local_addr = node_address(config.parallel)
    trouble: list[BaseException] = []

    def agent() -> None:
        try:
            elastic_launch(config=how, entrypoint=entry)(*given)
        except BaseException as error:
            trouble.append(error)

    thread = threading.Thread(target=agent, name="agent", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    return trouble[0] if trouble else None


def _told(trouble: BaseException, config: RunConfig) -> int:
    """What became of processes that left no verdict."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if isinstance(trouble, RendezvousError):
        says = (
            f"the machines of this run do not meet at {config.parallel.master}; is the first one gone, or behind a "
            "firewall? The same command on all of them continues from the last checkpoint"
        )
    elif isinstance(trouble, ChildFailedError):
        rank, failure = trouble.get_first_failure()
        ended = f"was killed ({failure.signal_name()})" if failure.exitcode < 0 else f"ended ({failure.exitcode})"
        says = (
            f"process {rank} {ended}, {config.parallel.restarts} restarts did not help; the same command continues "
            "from the last checkpoint"
        )
    else:
        raise trouble
    print(f"sojourn: {says}", file=sys.stderr)
    return 1


def _meeting(config: RunConfig, processes: int) -> list[str]:
    """Where the machines of this run meet, in torchrun's words."""
    parallel = config.parallel
    words = [f"--nproc_per_node={processes}", f"--max-restarts={parallel.restarts}", "--monitor-interval=0.1"]
    if parallel.nodes == 1:
        return [*words, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={os.getpid()}"]
    host, port = rendezvous_endpoint(parallel)
    meeting = [f"--nnodes={parallel.nodes}", "--rdzv-backend=c10d", f"--rdzv-id={config.name or 'run'}",
               f"--rdzv-endpoint={host}:{port}"]  # fmt: skip
    host_is_here = [] if parallel.node == "auto" else [f"is_host={'true' if parallel.node == 0 else 'false'}"]
    return [*words, *meeting, f"--rdzv-conf={','.join([f'join_timeout={_WAIT}', *host_is_here])}"]


@contextmanager
def _passed_on(told: Path) -> Iterator[None]:
    """Every signal goes to all workers, which agree on what to do. `told` is there from then on."""
    import psutil

    def hear(number: int, _: Any) -> None:
        told.touch()
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                child.send_signal(number)

    was = {n: signal.signal(n, hear) for n in _SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in was.items():
            signal.signal(number, handler)


def exit_if_run_over() -> None:
    """A worker that is started again after a verdict has nothing to do; with other machines it must tell them first."""
    if Path(os.environ.get(VERDICT, "")).is_file() and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        os._exit(0)


@contextmanager
def worker() -> Iterator[None]:
    """Around what one of several processes does. It ends at once where it fails: others may never answer again."""
    if not is_worker() or os.environ["WORLD_SIZE"] == "1":
        yield
        return
    if VERDICT in os.environ:
        threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        _end(error)


def _end(error: BaseException) -> None:
    rank, launched = int(os.environ["RANK"]), VERDICT in os.environ
    code = error.code if isinstance(error, UserError) else 1
    says = str(error) if isinstance(error, UserError) else "".join(traceback.format_exception(error)).rstrip()
    lost = _lost_another(error)
    if lost:
        says = f"process {rank} lost another one, which has ended or cannot be reached"
    if isinstance(error, RunOver):
        _leave_verdict(says)
        os._exit(0)
    if launched and _stopped_by_agent(error):  # because of another process: all begin again
        os._exit(1)
    if isinstance(error, RestartNeeded):  # whichever it is: the first may hear no more of it than a signal
        print(f"sojourn: process {rank}: {says}", file=sys.stderr)
    elif rank == 0 or not (launched or isinstance(error, UserError)):
        print(f"sojourn: {says}", file=sys.stderr)
    if launched and not lost and not isinstance(error, (RestartNeeded, RelayedError)):
        _leave_verdict(json.dumps({"rank": rank, "code": code, "says": says}))
        if rank == 0:
            Path(os.environ[VERDICT]).with_suffix(_TOLD).touch()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if launched and isinstance(error, Stopped) else code)


def _leave_verdict(text: str) -> None:
    place = Path(os.environ[VERDICT])
    whole = place.with_suffix(f".{os.getpid()}")
    whole.write_text(text, encoding="utf-8")
    with suppress(FileExistsError):
        os.link(whole, place)  # the first one counts


def _stopped_by_agent(error: BaseException) -> bool:
    """Whether a signal stopped us that nobody has sent to the one that started us."""
    by_signal = isinstance(error, Stopped) and "stopped by SIGTERM" in str(error)
    return by_signal and not _told_to_stop(Path(os.environ[VERDICT])).exists()


def _told_to_stop(verdict: Path) -> Path:
    return verdict.with_suffix(".stop")


def _lost_another(error: BaseException) -> bool:
    """Whether it failed because another process had gone, which is the one to ask."""
    import torch.distributed as dist

    known = getattr(dist, "DistError", ())
    return isinstance(error, known) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST)
    )


def _watch_parent(parent: int) -> None:
    """If the one that started us is gone, nobody could stop us any more."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
