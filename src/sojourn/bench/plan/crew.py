"""Clean processes for cases, forked from one that has imported everything and never touched a GPU."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.bench.plan import child
from sojourn.bench.plan.child import Task

_HEAVY = (
    "torch", "transformers", "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.mistral.modeling_mistral",
    "sojourn.train.loop", "sojourn.train.lessons", "sojourn.train.parallel.open", "sojourn.model.fast.forwards",
)  # fmt: skip
_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx", "triton")
_PAUSE = 0.02
_PROBE = 60.0

Found = dict[str, Any]


@dataclass
class Running:
    pid: int
    task: Task
    began: float
    process: subprocess.Popen[bytes] | None = None

    def ended(self) -> int | None:
        """The exit status, or None while it runs."""
        if self.process is not None:
            return self.process.poll()
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return None if pid == 0 else os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        """It and all that it started, which is a group of its own."""
        for kill in (os.killpg, os.kill):  # one that has just begun is no group yet
            with suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        else:
            os.waitpid(self.pid, 0)


def make_crew(device: str, capability: tuple[int, int] | None, compiled: Path, adapters: bool) -> Crew:
    """`adapters`: whether any case has them."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else asking for a GPU already begins to use it
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # cases compile side by side
    os.environ["HF_HUB_OFFLINE"] = "1"
    spoilt = _load(capability, [*_HEAVY, *(["peft"] if adapters else []), *(_COMPILER if device == "cuda" else ())])
    if device != "cuda" or (spoilt is None and _fork_reaches_gpu()):
        return Crew(forks=True)
    return Crew(forks=False, why=f"{spoilt} has begun to use it" if spoilt else "as it says above")


@dataclass(frozen=True)
class Crew:
    """`forks`: whether cases are forked; where forking spoils the GPU, each starts a Python of its own."""

    forks: bool
    why: str = ""

    def start(self, task: Task) -> Running:
        began = time.monotonic()
        if not self.forks:
            command = [sys.executable, "-c", "from sojourn.bench.plan.child import main; main()",
                       str(child.task_file(task))]  # fmt: skip
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            process = subprocess.Popen(command, env=environment, start_new_session=True)
            return Running(process.pid, task, began, process)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                child.work(task)
            finally:
                os._exit(0)
        return Running(pid, task, began)

    def run(
        self, tasks: list[tuple[Task, int]], tell: Callable[[Task, Found], None], room: int, jobs: int, limit: float,
        until: float = math.inf,
    ) -> None:  # fmt: skip
        """All tasks, each with the bytes that it is to need: as many at once as there is room for, the next in line
        that fits first. `tell` hears of each as it ends, or is ended after `limit` seconds. After `until`, on the
        monotonic clock, none is begun."""
        waiting, running = list(tasks), dict[int, tuple[Running, int]]()
        try:
            while waiting or running:
                waiting = waiting if time.monotonic() < until else []
                free = room - sum(size for _, size in running.values())
                able = len(running) < jobs
                following = next((one for one in waiting if able and (one[1] <= free or not running)), None)
                if following is not None:
                    waiting.remove(following)
                    one = self.start(following[0])
                    running[one.pid] = one, following[1]
                    continue
                for pid, (one, _) in list(running.items()):
                    found = _found(one, limit)
                    if found is not None:
                        del running[pid]
                        tell(one.task, found)
                time.sleep(_PAUSE)
        finally:
            for one, _ in running.values():
                one.kill()


def _found(one: Running, limit: float) -> Found | None:
    status = one.ended()
    if status is None:
        if time.monotonic() - one.began <= limit:
            return None
        one.kill()
        return {"failed": f"took longer than {limit:.0f} s"}
    path = Path(one.task.out)
    if path.is_file():
        found: Found = json.loads(path.read_text(encoding="utf-8"))
        return found
    said = (
        Path(one.task.log).read_text(encoding="utf-8", errors="replace").strip() if Path(one.task.log).is_file() else ""
    )
    return {"failed": f"ended with {status}: {(said.splitlines() or ['nothing said'])[-1][:200]}"}


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
    """Whether a forked process can use the GPU: an import that has begun to use it here would spoil that."""
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
        time.sleep(_PAUSE)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False
