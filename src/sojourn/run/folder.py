"""The run folder: the files of a run, its status, metrics and events.

runs/NAME/
  run.yaml           the configuration, every `auto` resolved
  identity.json      the run's id, and a hash of the settings that decide its numbers
  environment.json   versions, machine, command
  status.json        where the run stands (replaced atomically)
  metrics.jsonl      one line a logged step; events.jsonl: what happened
  loss.svg           the losses as a plot, written when training ends or stops
  logs/              TensorBoard, the trackers' files, output of ranks above 0; trackers.json: the run's id at trackers
  ledger.json        time and money spent, also by calls that were killed; ladder.json: the OOM fallbacks taken
  checkpoints/step-00000040/ …, latest; damaged-step-00000030/: set aside, never read or counted
  best/              the model with the lowest held-out loss so far, with train.eval_every
  final/             the model, for plain transformers; an adapter, for plain peft
  .lock, .owner-N.json  which process trains the run: see lock.py

metrics.jsonl and events.jsonl are append-only: a line cut short by a kill damages only itself; readers keep the last
line of each step.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from sojourn.machine.process import current_process, is_alive
from sojourn.run import unwritten
from sojourn.run.lock import RunLock, is_owned_elsewhere
from sojourn.storage.files import append_json, overwrite_json, read_json_lines, read_json_object, write_json

State = Literal["starting", "running", "stopped", "done", "failed"]


@dataclass(frozen=True)
class Status:
    """`pid` and `started` together identify the process, since pids are reused."""

    state: State
    step: int = 0
    total_steps: int = 0
    message: str = ""
    resumable: bool = True
    pid: int = 0
    started: float = 0.0
    updated: float = 0.0


def _parse_status(written: dict[str, Any]) -> Status | None:
    """None where a field has another type: such a status says nothing reliable."""
    written.setdefault("message", written.get("says", ""))  # the name in older run folders
    known = {field.name: written[field.name] for field in fields(Status) if field.name in written}
    numbers = [known.get(name, 0) for name in ("step", "total_steps", "pid")]
    times = [known.get(name, 0.0) for name in ("started", "updated")]
    if (
        known.get("state") not in get_args(State)
        or not all(type(number) is int and 0 <= number < 2**53 for number in numbers)
        or not all(type(time) in (int, float) for time in times)
        or type(known.get("resumable", True)) is not bool
        or not isinstance(known["message"], str)
    ):
        return None
    return Status(**{**known, "message": known["message"].encode(errors="replace").decode()})


@dataclass(frozen=True)
class RunFolder:
    """`is_main_process`: rank 0; the other ranks write no status, metrics, events or lock."""

    path: Path
    is_main_process: bool = True
    lock: RunLock | None = None  # while this process trains the run

    @property
    def config(self) -> Path:
        return self.path / "run.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.svg"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.json"

    @property
    def ladder(self) -> Path:
        return self.path / "ladder.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def compile_cache(self) -> Path:
        return self.path / "compiled"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        return self.path / "best"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def _status(self) -> Path:
        return self.path / "status.json"

    @property
    def identity(self) -> Path:
        return self.path / "identity.json"

    @property
    def writable(self) -> bool:
        """By this process: rank 0, as long as no other process has taken over the run."""
        return self.is_main_process and (self.lock is None or self.lock.lost is None)

    def check_ownership(self) -> None:
        """Before every write that another trainer of this run could collide with."""
        if self.lock is not None:
            self.lock.check()

    def relocate(self, path: Path) -> None:
        """For a run whose folder was taken by another run: everything is written to `path` from now on."""
        object.__setattr__(self, "path", path)

    def exists(self) -> bool:
        return os.path.lexists(self.config)

    def has_final(self) -> bool:
        """A complete model, or an adapter."""
        return any((self.final / name).is_file() for name in ("config.json", "adapter_config.json"))

    def status(self) -> Status | None:
        """The written status; a run that is “running” while its process is gone has failed and is resumable."""
        status = _parse_status(read_json_object(self._status))
        if status is None:
            return None
        is_over = not is_alive(status.pid, status.started) and not is_owned_elsewhere(self.path)
        if status.state in ("starting", "running") and is_over:
            return replace(status, state="failed", message="its process was killed; run the same command to resume")
        return status

    def status_written_at(self) -> float:
        """When the status was last written, as `time.time`."""
        return self._status.stat().st_mtime

    def set_status(
        self,
        state: State,
        step: int,
        total_steps: int,
        message: str = "",
        resumable: bool = True,
        durable: bool = True,
    ) -> None:
        """Not `durable`: see write_text."""
        if not self.writable:
            return
        pid, started = current_process()
        status = asdict(Status(state, step, total_steps, message, resumable, pid, started, time.time()))
        try:
            write_json(self._status, status, durable)
        except (OSError, ValueError) as error:
            if not overwrite_json(self._status, status):
                unwritten.count(str(self._status), error)

    def event(self, kind: str, **facts: Any) -> None:
        if self.writable:
            self._append(self.events, {"kind": kind, **facts})

    def metric(self, **values: Any) -> None:
        if self.writable:
            self._append(self.metrics, values)

    def _append(self, path: Path, values: dict[str, Any]) -> None:
        try:
            append_json(path, {"time": round(time.time(), 3), **values})
        except (OSError, ValueError) as error:  # ValueError: a number that JSON does not have
            unwritten.count(str(path), error)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The last line of each step, so that steps repeated after a kill appear once."""
        lines = read_json_lines(self.metrics)
        return list({(line.get("kind"), line.get("step"), line.get("prompt")): line for line in lines}.values())
