"""`sojourn doctor` under torchrun: compares all ranks before they train a run together.

Each rank writes its facts into torchrun's TCPStore. Rank 0 compares them, measures the offset of every clock, and
reports; the other ranks exit with its exit code. `python -m sojourn.machine.probe_ranks FILE` under torchrun writes
the findings to a file for `sojourn doctor`.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from sojourn import __version__
from sojourn.errors import UserError
from sojourn.machine.compare_ranks import (
    NETWORK_FIX,
    WAIT,
    AllReduceSpeed,
    RankFacts,
    backend,
    compare,
    judge_all_reduce,
    missing_ranks,
)
from sojourn.machine.finding import Finding, guarded, one_line
from sojourn.machine.hardware import volume
from sojourn.machine.precision import INSTALL_TORCH
from sojourn.machine.probe_software import installed

SHARED = Path("/dev/shm")  # noqa: S108
_ALL_REDUCE_TIMEOUT = 90.0  # seconds; a first all-reduce that takes longer hangs
_ALL_REDUCE_BYTES = 64 * 1024**2

Report = Callable[[list[Finding]], int]


def is_multi_rank(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process as one of several ranks."""
    size = env.get("WORLD_SIZE", "1")
    if not size.isdigit() or int(size) < 2:
        return False
    lacks = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if lacks:
        raise UserError(
            f"WORLD_SIZE={size} but {', '.join(lacks)} not set; start all processes with: torchrun "
            "--nproc_per_node=GPUS -m sojourn doctor; or, for this machine alone: unset WORLD_SIZE"
        )
    return True


def examine_ranks(report: Report, env: Mapping[str, str] = os.environ) -> int:
    """Examines all ranks. Rank 0 calls `report`; every rank returns the exit code that it returned."""
    rank, size, timeout = int(env["RANK"]), int(env["WORLD_SIZE"]), _timeout(env)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # errors become findings
    try:
        mine = rank_facts(env)
    except Exception as error:  # a torch that is missing or broken, a driver that does not answer
        message = f"rank {rank} on {socket.gethostname()}: {one_line(error)}"
        alone = "on that machine: WORLD_SIZE=1 sojourn doctor"
        lacking = isinstance(error, ModuleNotFoundError)
        return report([Finding("ranks", "fail", message, INSTALL_TORCH if lacking else alone)])
    store, trouble = _open_store(env, timeout)
    if trouble:
        return report([trouble]) if mine.local_rank == 0 else 1
    store.set(f"facts/{rank}", json.dumps(asdict(mine)))
    if missing := _missing_ranks(store, size, timeout):
        arrived = [other for other in range(size) if other not in missing]
        if arrived[:1] == [rank]:
            store.set("code", str(report([missing_ranks(missing, size, timeout, _address(env))])))
        return _share_exit_code(store, arrived, rank)
    findings, hung = _examine(store, rank, size, env)
    if rank == 0:
        store.set("code", str(report(findings)))
    code = _share_exit_code(store, list(range(size)), rank)
    if hung:  # a collective that never ends would keep Python from ending too
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _examine(store: Any, rank: int, size: int, env: Mapping[str, str]) -> tuple[list[Finding], bool]:
    """Rank 0's findings, and whether this rank hangs in a collective."""
    try:
        known = [RankFacts(**json.loads(store.get(f"facts/{other}"))) for other in range(size)]
        known = _with_clocks(store, known, rank)
        speeds, hung = _speeds(store, known, rank, env)
    except RuntimeError as error:  # every error of the store is one
        return [Finding("ranks", "fail", f"lost the connection to rank 0: {one_line(error)}", NETWORK_FIX)], True
    if rank > 0:
        return [], hung
    return [*compare(known, _address(env)), judge_all_reduce(known, speeds)], hung


def rank_facts(env: Mapping[str, str]) -> RankFacts:
    import torch
    import torch.distributed as dist

    local = int(env.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    card = torch.cuda.get_device_properties(local) if local < count else None
    nccl = bool(torch.version.cuda) and dist.is_nccl_available()
    versions = {
        "python": platform.python_version(),
        "sojourn": __version__,
        "torch": str(torch.__version__),
        "transformers": installed("transformers"),
        "peft": installed("peft"),
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
    }
    return RankFacts(
        rank=int(env["RANK"]),
        host=socket.gethostname(),
        versions=versions,
        node=int(env.get("GROUP_RANK", "0")),
        local_rank=local,
        gpu=str(card.name) if card else None,
        gpu_bytes=int(card.total_memory) if card else 0,
        gpus_here=count,
        shared_free=volume(SHARED).free if SHARED.is_dir() else None,
    )


def _timeout(env: Mapping[str, str]) -> float:
    text = env.get(WAIT, "120")
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{WAIT}={text} is not a number of seconds; for two minutes: export {WAIT}=120") from None


def _address(env: Mapping[str, str]) -> str:
    return f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"


def _open_store(env: Mapping[str, str], timeout: float) -> tuple[Any, Finding | None]:
    """The TCPStore of this job, or why it cannot be reached. Rank 0 hosts it where torchrun does not."""
    rank, host, port = int(env["RANK"]), env["MASTER_ADDR"], int(env["MASTER_PORT"])
    is_host = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # torchrun stops every rank of a machine when one exits, so the rank that reports must exit first.
    why = None if is_host else _wait_for_port(host, port, timeout + (3 if env.get("LOCAL_RANK", "0") != "0" else 0))
    if why is None:
        try:
            return _connect(env, "doctor", is_host), None
        except (RuntimeError, ValueError) as error:
            why = str(error).partition("\n")[0]
    fix = (
        "start rank 0 first; check --master_addr (on its machine: hostname -I) and open port "
        f"{port} in its firewall (sudo ufw allow {port}/tcp); for this machine alone: unset WORLD_SIZE"
    )
    message = f"rank {rank} on {socket.gethostname()} cannot connect to {host}:{port}: {why}"
    return None, Finding("ranks", "fail", message, f"choose a free port: --master_port={port + 1}" if is_host else fix)


def _connect(env: Mapping[str, str], name: str, is_host: bool = False) -> Any:
    """A separate connection: a call that waits blocks every other call of the same connection."""
    from torch.distributed import PrefixStore, TCPStore

    step = timedelta(seconds=_ALL_REDUCE_TIMEOUT + 30)  # no later operation takes longer
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    store = TCPStore(host, port, is_master=is_host, timeout=step, wait_for_workers=False)
    return PrefixStore(f"sojourn-{name}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _wait_for_port(host: str, port: int, timeout: float) -> str | None:
    """None when the port accepts connections, else the last error. A plain socket: torch would log every retry."""
    until = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.1)).close()
        except OSError as error:
            if time.monotonic() + 0.3 > until:
                return f"{error.strerror or error} (for {timeout:g} s)"
            time.sleep(0.3)
        else:
            return None


def _missing_ranks(store: Any, size: int, timeout: float) -> list[int]:
    """The ranks that have not connected after `timeout` seconds."""
    try:
        store.wait([f"facts/{rank}" for rank in range(size)], timedelta(seconds=timeout))
    except RuntimeError:
        return [rank for rank in range(size) if not _has_key(store, f"facts/{rank}")]
    return []


def _has_key(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:  # the store is gone
        return False


def _share_exit_code(store: Any, arrived: list[int], rank: int) -> int:
    """The exit code of all ranks. The rank that reported exits last: it may host the store."""
    try:
        code = int(store.get("code"))
        store.set(f"gone/{rank}", "")
        if rank == arrived[0]:
            store.wait([f"gone/{other}" for other in arrived], timedelta(seconds=5))
    except RuntimeError:
        return 1
    return code


def _with_clocks(store: Any, known: list[RankFacts], rank: int) -> list[RankFacts]:
    """Each clock's offset from rank 0's, by request and reply: half the round trip bounds the error."""
    rounds = range(5)
    if rank > 0:
        for turn in rounds:
            store.wait([f"ask/{rank}/{turn}"])
            store.set(f"time/{rank}/{turn}", repr(time.time()))
        return known
    measured = [known[0]]
    for other in known[1:]:
        answers = []
        for turn in rounds:
            asked = time.time()
            store.set(f"ask/{other.rank}/{turn}", "")
            theirs = float(store.get(f"time/{other.rank}/{turn}"))
            answered = time.time()
            answers.append(((answered - asked) / 2, theirs - (asked + answered) / 2))
        within, off = min(answers)
        measured.append(replace(other, seconds_off=off, within=within))
    return measured


def _speeds(store: Any, known: list[RankFacts], rank: int, env: Mapping[str, str]) -> tuple[list[AllReduceSpeed], bool]:
    """What each rank measured (rank 0 gets all of them), and whether this rank hangs in the measurement."""
    found: list[AllReduceSpeed] = []

    def work() -> list[Finding]:
        found.append(_measure(_connect(env, "group"), known, known[rank]))
        return []

    trouble = guarded("all-reduce", work, seconds=_ALL_REDUCE_TIMEOUT)
    mine = found[0] if found else AllReduceSpeed(error=trouble[0].message)
    store.set(f"speed/{rank}", json.dumps(asdict(mine)))
    answers = [mine]
    if rank == 0:
        answers = [AllReduceSpeed(**json.loads(store.get(f"speed/{other.rank}"))) for other in known]
    return answers, bool(trouble)


def _measure(store: Any, known: list[RankFacts], mine: RankFacts) -> AllReduceSpeed:
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if backend(known) == "nccl":
        device = torch.device("cuda", mine.local_rank)
        torch.cuda.set_device(device)
    # Longer than our own timeout: at its own, torch aborts the process.
    later = timedelta(seconds=4 * _ALL_REDUCE_TIMEOUT)
    dist.init_process_group(backend(known), store=store, rank=mine.rank, world_size=len(known), timeout=later)

    def seconds(tensor: Any, times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    size = len(known)
    data = torch.full((_ALL_REDUCE_BYTES // 4,), mine.rank + 1.0, device=device)
    dist.all_reduce(data)
    right = bool((data == size * (size + 1) / 2).all())
    small, data = torch.zeros(1, device=device), data.zero_()
    seconds(small, 5)
    latency = seconds(small, 50)
    once = torch.tensor(seconds(data, 1), device=device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX)  # every rank must run the same number of rounds
    took = seconds(data, min(max(int(1 / float(once)), 1), 20))
    dist.destroy_process_group()
    return AllReduceSpeed(2 * (size - 1) / size * _ALL_REDUCE_BYTES / took / 1e9, latency * 1e6, right)


def _main() -> None:
    def write(findings: list[Finding]) -> int:
        Path(sys.argv[1]).write_text(json.dumps([asdict(finding) for finding in findings]), encoding="utf-8")
        return 0  # failures are in the findings, not in the exit code

    sys.exit(examine_ranks(write))


if __name__ == "__main__":
    _main()
