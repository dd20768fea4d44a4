"""Clean processes for cases, forked from one that has imported everything and never touched a GPU."""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner import child
from benchmarks.planner.child import Found, Task
from benchmarks.planner.process import PAUSE, Need, Running, take_turn
from benchmarks.planner.protocol import ASK, OPENED, Line, die_with

_HEAVY = (
    "torch", "transformers", "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.mistral.modeling_mistral",
    "sojourn.train.loop", "sojourn.train.calibration", "sojourn.train.distributed.open",
    "sojourn.model.kernels.fused_forwards",
)  # fmt: skip
_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx", "triton")
_PROBE = 60.0


def make_pool(device: str, capability: tuple[int, int] | None, compiled: Path, adapters: bool) -> WorkerPool:
    """`adapters`: whether any case has them."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else asking for a GPU already begins to use it
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # cases compile side by side
    os.environ["HF_HUB_OFFLINE"] = "1"
    spoilt = _load(capability, [*_HEAVY, *(["peft"] if adapters else []), *(_COMPILER if device == "cuda" else ())])
    gc.freeze()  # no case need look through what was imported when it frees memory
    if device != "cuda" or (spoilt is None and _fork_reaches_gpu()):
        return WorkerPool(forks=True)
    return WorkerPool(forks=False, why=f"{spoilt} uses it already" if spoilt else "as it says above")


@dataclass(frozen=True)
class WorkerPool:
    """`forks`: whether cases are forked; where forking spoils the GPU, each starts a Python of its own."""

    forks: bool
    why: str = ""

    def start(self, task: Task, need: Need) -> Running:
        Path(task.out).unlink(missing_ok=True)  # of an earlier call
        ours, theirs = socket.socketpair()
        with theirs:
            if self.forks:
                return Running(self._fork(task, theirs), task, ours, need)
            command = [sys.executable, "-c", "from benchmarks.planner.child import main; main()",
                       str(child.task_file(task)), str(theirs.fileno()), str(os.getpid())]  # fmt: skip
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            fds = (theirs.fileno(),)
            process = subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=fds)
            return Running(process.pid, task, ours, need, process)

    def _fork(self, task: Task, line: socket.socket) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                die_with(parent)
                child.work(task, Line(line))
            finally:
                os._exit(0)
        return pid

    def run(
        self, tasks: list[tuple[Task, Need]], tell: Callable[[Task, Found], None], room: int, jobs: int, limit: float,
        until: float = math.inf,
    ) -> None:  # fmt: skip
        """All tasks: as many at once as there is room for, the next in line that fits first. `tell` hears of each as it
        ends, or is ended after `limit` seconds of its own. After `until`, on the monotonic clock, none is started."""
        waiting, running = list(tasks), list[Running]()
        try:
            while waiting or running:
                waiting = waiting if time.monotonic() < until else []
                following = next((one for one in waiting if _fits(one[1], running, room)), None)
                if following is not None and len(running) < jobs:
                    waiting.remove(following)
                    running.append(self.start(*following))
                    continue
                for one in list(running):
                    found = _found(one, [other for other in running if other is not one], limit)
                    if found is None:
                        continue
                    running.remove(one)
                    one.line.close()
                    if found["measured"].get("out_of_memory") and running and one.need.first < room:
                        waiting.append((one.task, Need(room, room)))  # perhaps the others took it: once more, alone
                    else:
                        tell(one.task, found)
                _share(running, room)
                time.sleep(PAUSE)
        finally:
            for one in running:
                one.kill()


def _fits(need: Need, running: list[Running], room: int) -> bool:
    """Whether any one of them could then still make whole steps, as otherwise all might wait for each other."""
    needs = [need, *(one.need for one in running)]
    return not running or sum(one.first for one in needs) + max(one.most - one.first for one in needs) <= room


def _share(running: list[Running], room: int) -> None:
    """Lets those make whole steps that there is room for, in the order of their beginning, so that small ones do not
    keep out a large one."""
    for one in (one for one in running if one.ready):
        others = sum(other.holds for other in running if other is not one)
        if others and others + one.need.most > room:
            return
        one.begin_steps()


def _found(one: Running, others: list[Running], limit: float) -> Found | None:
    """What it found, if it has come to its end. If it asks for quiet, it gets it, and comes to its end."""
    one.listen()
    in_time = one.age <= limit
    if one.asks and not one.ended():
        in_time = take_turn(one, others, limit)
    if in_time and not one.ended():
        return None
    measured = {} if one.ended() else {"failed": f"took longer than {limit:.0f} s"}
    one.kill()
    path = Path(one.task.out)
    found: Found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not found and not measured:
        measured = {"failed": f"ended with {one.status}: {_last_line(Path(one.task.log))}"}
    found["measured"] = {**found.get("measured", {}), **measured, **_times(one)}
    if one.device is not None:
        found["measured"]["device"] = one.device
    return found


def _times(one: Running) -> dict[str, float]:
    """Where its time went: until it was open, compiling and in its first steps, in the quiet, in all."""
    opened = one.said.get(OPENED)
    found = {"seconds": one.age, "opened": opened, "quiet": one.quiet}
    if opened is not None and ASK in one.said:
        found["first_seconds"] = one.said[ASK] - opened
    return {name: round(seconds, 2) for name, seconds in found.items() if seconds is not None}


def _last_line(log: Path) -> str:
    said = log.read_text(encoding="utf-8", errors="replace").strip() if log.is_file() else ""
    return (said.splitlines() or ["nothing said"])[-1][:200]


def _load(capability: tuple[int, int] | None, names: list[str]) -> str | None:
    """Imports once for all. bitsandbytes asks the GPU for its kind while it is imported, which would begin to use it:
    it gets the driver's answer instead. Returns the module that begins to use the GPU all the same, if one does."""
    import torch

    asked = torch.cuda.get_device_capability
    if capability is not None:
        torch.cuda.get_device_capability = lambda *given, **named: capability
    try:
        for name in names:
            with suppress(ImportError):  # the case that needs it says so
                importlib.import_module(name)
            if torch.cuda.is_initialized():
                return name
    finally:
        torch.cuda.get_device_capability = asked
    return None


def _fork_reaches_gpu() -> bool:
    """Whether a forked process can use the GPU: not if an import uses it already in this process."""
    import torch

    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.zeros(8, device="cuda").sum().item()
            status = 0
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    began = time.monotonic()
    while time.monotonic() - began < _PROBE:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(PAUSE)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False
