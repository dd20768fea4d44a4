"""Follows a run on a box: its logs as they grow, its state, and, at its end, what became of it. Reads only; the lease
`attached`, which it touches, makes the box wait with powering off until the model is here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sojourn.errors import UserError
from sojourn.remote.box.report import MARK
from sojourn.remote.box_client import Box
from sojourn.remote.hosts import Host
from sojourn.remote.job import TERMINAL, BoxPaths

_LEASE = 5.0  # seconds between two touches; the supervisor takes 30 s without one as a laptop that went away
_WAIT = 2.0  # seconds that the box waits for new bytes before it answers

_STANDS_STILL = 15.0  # seconds without a new status, after which the box is asked whether its supervisor lives

Show = Callable[[bytes], None]


def read_report(box: Box, host: Host, run: str, python: str | None = None) -> dict[str, Any]:
    """Where the job stands, from box/report.py there. Raises UserError where the box knows no such job."""
    paths = BoxPaths(host)
    done = box.run([python or host.python or "python3", f"{paths.tools}/report.py", host.home, run], timeout=60)
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            jobs: list[dict[str, Any]] = json.loads(line[len(MARK) :])["jobs"]
            if jobs:
                return jobs[0]
            raise UserError(
                f"{host.name} knows no run called {run}; it may have been removed there (see: sojourn runs)"
            )
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    raise UserError(
        f"{host.name}: its jobs could not be read: {last or 'no answer'}; type: sojourn host check {host.name}"
    )


@dataclass
class Follower:
    """`attached`: whether the box is to wait for this laptop at the end."""

    box: Box
    host: Host
    run: str
    show: Show
    attached: bool = False
    offsets: dict[str, int] = field(default_factory=dict)
    _touched: float = 0.0

    def until(self, is_over: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Shows the logs until the report satisfies `is_over`; returns it."""
        while True:
            report = read_report(self.box, self.host, self.run)
            over = is_over(report)
            self.show_new(str(report["phase"]), wait=0.0 if over else _WAIT)
            if over:
                return report
            self._watch_status(report, is_over)

    def _watch_status(self, report: dict[str, Any], is_over: Callable[[dict[str, Any]], bool]) -> None:
        """Reads status.json alone, which costs the box next to nothing, until it may be over or stands still."""
        path, seen, since = f"{BoxPaths(self.host, self.run).job}/status.json", None, time.monotonic()
        while time.monotonic() - since < _STANDS_STILL:
            self.touch()
            self.show_new(str(report["phase"]), wait=_WAIT)
            status = _parse_object(self.box.read_bytes(path))
            if is_over({**report, **status}) or status.get("phase") != report["phase"]:
                return
            if status.get("updated") != seen:
                seen, since = status.get("updated"), time.monotonic()

    def touch(self) -> None:
        if self.attached and time.monotonic() - self._touched > _LEASE:
            self.box.write_bytes(f"{BoxPaths(self.host, self.run).job}/attached", b"")
            self._touched = time.monotonic()

    def show_new(self, phase: str, wait: float = 0.0) -> None:
        """Everything that the phases so far have written since the last call. `wait`: for the current one, which has
        no name before the first starts."""
        logs, current = f"{BoxPaths(self.host, self.run).job}/logs", phase or "train"
        for name in dict.fromkeys(("prepare", "rehearse", "train", current)):
            left = wait if name == current else 0.0
            while data := self.box.tail(f"{logs}/{name}.log", self.offsets.get(name, 0), left):
                self.offsets[name] = self.offsets.get(name, 0) + len(data)
                self.show(data)
                left = 0.0


def _parse_object(data: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(data or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def is_terminal(report: dict[str, Any]) -> bool:
    return report["state"] in TERMINAL


def describe_end(run: str, host: str, report: dict[str, Any]) -> str:
    """One line about a run that is over."""
    money = f", {report['money']:.2f} {report['currency']}".rstrip() if report["money"] else ""
    step = f"step {report['step']:,} of {report['total_steps']:,}" if report["total_steps"] else "no step yet"
    why = report["message"] or report["train_message"]
    again = f"; go on: the same launch again, or sojourn move {run} --to HOST" if report["state"] == "stopped" else ""
    reason = f": {why}" if why and report["state"] != "done" else ""
    return f"{run} on {host}: {report['state']}, {step}{money}{reason}{again}"
