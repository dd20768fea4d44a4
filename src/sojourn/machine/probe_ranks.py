"""Several processes examined as one: `sojourn doctor` under torchrun, before they train a run together.

Each process writes its facts into the store through which torchrun's processes meet; from then on all know all. The
first compares them, measures every clock against its own, and tells what it found; the others leave with its exit code.
`python -m sojourn.machine.probe_ranks FILE` under torchrun writes the findings to a file for `sojourn doctor`.
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
from sojourn.machine.finding import Finding, guarded, one_line
from sojourn.machine.hardware import volume
from sojourn.machine.precision import INSTALL_TORCH
from sojourn.machine.probe_software import installed
from sojourn.machine.process_group import NETWORK_MEND, WAIT, Facts, Speed, absent, all_reduce, backend, compare

SHARED = Path("/dev/shm")  # noqa: S108
_MEASURING = 90.0  # seconds; a first all-reduce that takes longer hangs
_BYTES = 64 * 1024**2

Tell = Callable[[list[Finding]], int]


def called(env: Mapping[str, str] = os.environ) -> bool:
    """Whether we are one of several processes."""
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


def attend(tell: Tell, env: Mapping[str, str] = os.environ) -> int:
    """Meets the others and examines all. The first tells what was found; everyone returns the code it returned."""
    rank, size, patience = int(env["RANK"]), int(env["WORLD_SIZE"]), _patience(env)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what goes wrong becomes a finding, said once
    try:
        mine = facts(env)
    except Exception as error:  # a torch that is missing or broken, a driver that does not answer
        says = f"rank {rank} on {socket.gethostname()}: {one_line(error)}"
        alone = "on that machine: WORLD_SIZE=1 sojourn doctor"
        lacking = isinstance(error, ModuleNotFoundError)
        return tell([Finding("processes", "fail", says, INSTALL_TORCH if lacking else alone)])
    store, trouble = _reach(env, patience)
    if trouble:
        return tell([trouble]) if mine.local_rank == 0 else 1
    store.set(f"facts/{rank}", json.dumps(asdict(mine)))
    if missing := _missing(store, size, patience):
        present = [other for other in range(size) if other not in missing]
        if present[:1] == [rank]:
            store.set("code", str(tell([absent(missing, size, patience, _address(env))])))
        return _code(store, present, rank)
    findings, hung = _examine(store, rank, size, env)
    if rank == 0:
        store.set("code", str(tell(findings)))
    code = _code(store, list(range(size)), rank)
    if hung:  # a collective that never ends would keep Python from ending too
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _examine(store: Any, rank: int, size: int, env: Mapping[str, str]) -> tuple[list[Finding], bool]:
    """What all do together once they have met: the first one's findings, and whether this process hangs in them."""
    try:
        known = [Facts(**json.loads(store.get(f"facts/{other}"))) for other in range(size)]
        known = _with_clocks(store, known, rank)
        speeds, hung = _speeds(store, known, rank, env)
    except RuntimeError as error:  # every error of the store is one
        return [Finding("processes", "fail", f"one went away: {one_line(error)}", NETWORK_MEND)], True
    if rank > 0:
        return [], hung
    return [*compare(known, _address(env)), all_reduce(known, speeds)], hung


def facts(env: Mapping[str, str]) -> Facts:
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
    return Facts(
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


def _patience(env: Mapping[str, str]) -> float:
    text = env.get(WAIT, "120")
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{WAIT}={text} is no number of seconds; for two minutes: export {WAIT}=120") from None


def _address(env: Mapping[str, str]) -> str:
    return f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"


def _reach(env: Mapping[str, str], patience: float) -> tuple[Any, Finding | None]:
    """The store that all share, or why it cannot be had. Where torchrun does not keep it, rank 0 does."""
    rank, host, port = int(env["RANK"]), env["MASTER_ADDR"], int(env["MASTER_PORT"])
    keeper = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # torchrun ends all processes of a machine when one leaves; so the one that tells leaves first.
    why = None if keeper else _knock(host, port, patience + (3 if env.get("LOCAL_RANK", "0") != "0" else 0))
    if why is None:
        try:
            return _connect(env, "doctor", keeper), None
        except (RuntimeError, ValueError) as error:
            why = str(error).partition("\n")[0]
    mend = (
        "start rank 0 first; check --master_addr (on its machine: hostname -I) and let the firewall there pass "
        f"port {port} (sudo ufw allow {port}/tcp); for this machine alone: unset WORLD_SIZE"
    )
    says = f"rank {rank} on {socket.gethostname()} cannot meet the others at {host}:{port}: {why}"
    return None, Finding("processes", "fail", says, f"choose a free port: --master_port={port + 1}" if keeper else mend)


def _connect(env: Mapping[str, str], name: str, keeper: bool = False) -> Any:
    """A connection of its own: a call that waits in one holds up every other call in it."""
    from torch.distributed import PrefixStore, TCPStore

    step = timedelta(seconds=_MEASURING + 30)  # nothing after the meeting takes longer
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    store = TCPStore(host, port, is_master=keeper, timeout=step, wait_for_workers=False)
    return PrefixStore(f"sojourn-{name}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _knock(host: str, port: int, patience: float) -> str | None:
    """None when somebody listens there, else the last refusal. In plain Python, since torch fills the screen."""
    until = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.1)).close()
        except OSError as error:
            if time.monotonic() + 0.3 > until:
                return f"{error.strerror or error} (for {patience:g} s)"
            time.sleep(0.3)
        else:
            return None


def _missing(store: Any, size: int, patience: float) -> list[int]:
    """Who has not come after this time."""
    try:
        store.wait([f"facts/{rank}" for rank in range(size)], timedelta(seconds=patience))
    except RuntimeError:
        return [rank for rank in range(size) if not _there(store, f"facts/{rank}")]
    return []


def _there(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:  # the store has gone
        return False


def _code(store: Any, present: list[int], rank: int) -> int:
    """The exit code all leave with. Who told leaves last: the store may be in that process."""
    try:
        code = int(store.get("code"))
        store.set(f"gone/{rank}", "")
        if rank == present[0]:
            store.wait([f"gone/{other}" for other in present], timedelta(seconds=5))
    except RuntimeError:
        return 1
    return code


def _with_clocks(store: Any, known: list[Facts], rank: int) -> list[Facts]:
    """Each clock against the first one's: asked and answered, so that half the round trip bounds the error."""
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


def _speeds(store: Any, known: list[Facts], rank: int, env: Mapping[str, str]) -> tuple[list[Speed], bool]:
    """What every process measured, and whether this one hangs in it. Only the first one learns the others'."""
    found: list[Speed] = []

    def work() -> list[Finding]:
        found.append(_measure(_connect(env, "group"), known, known[rank]))
        return []

    trouble = guarded("all-reduce", work, seconds=_MEASURING)
    mine = found[0] if found else Speed(error=trouble[0].says)
    store.set(f"speed/{rank}", json.dumps(asdict(mine)))
    answers = [mine]
    if rank == 0:
        answers = [Speed(**json.loads(store.get(f"speed/{other.rank}"))) for other in known]
    return answers, bool(trouble)


def _measure(store: Any, known: list[Facts], mine: Facts) -> Speed:
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if backend(known) == "nccl":
        device = torch.device("cuda", mine.local_rank)
        torch.cuda.set_device(device)
    # Beyond our own patience: torch would end the process.
    later = timedelta(seconds=4 * _MEASURING)
    dist.init_process_group(backend(known), store=store, rank=mine.rank, world_size=len(known), timeout=later)

    def seconds(tensor: Any, times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    size = len(known)
    data = torch.full((_BYTES // 4,), mine.rank + 1.0, device=device)
    dist.all_reduce(data)
    right = bool((data == size * (size + 1) / 2).all())
    small, data = torch.zeros(1, device=device), data.zero_()
    seconds(small, 5)
    latency = seconds(small, 50)
    once = torch.tensor(seconds(data, 1), device=device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX)  # all must make the same number of rounds
    took = seconds(data, min(max(int(1 / float(once)), 1), 20))
    dist.destroy_process_group()
    return Speed(2 * (size - 1) / size * _BYTES / took / 1e9, latency * 1e6, right)


def _main() -> None:
    def write(findings: list[Finding]) -> int:
        Path(sys.argv[1]).write_text(json.dumps([asdict(finding) for finding in findings]), encoding="utf-8")
        return 0  # the findings say what failed; torchrun need not

    sys.exit(attend(write))


if __name__ == "__main__":
    _main()
