"""A budget of CPU seconds per test. `make test` fails a test that uses more than three times its recorded seconds.

CPU time of the test process and of its children, not wall time: a busy machine does not change it. No test is charged
for fixtures that several tests share, for what is made in `shared_cost()`, or for imports. The record (`budget.json`)
lists the tests that use more than `RECORD_ABOVE` seconds; any other test may use `DEFAULT` seconds. It also has the
seconds of a fixed computation on the machine that made it, while the tests ran, so that a slower machine, or one that
has become slower, gets proportionally more; and the wall seconds of each file: xdist gives whole files to its workers,
the longest first.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).with_name("budget.json")
DEFAULT = 6.0
RECORD_ABOVE = 2.0
FACTOR = 3
SECONDS_PER_IMPORT = 0.01

_servers: list[int] = []  # processes that outlive a test and work for it: fork servers
_shared = 0.0


def count_server(pid: int) -> None:
    """From now on, a test's CPU time includes what this process and its ended children use."""
    _servers.append(pid)


def cpu_seconds() -> float:
    """Of this process, its ended children, and the fork servers."""
    total = sum(os.times()[:4])
    for pid in _servers:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # no /proc, or the server has ended
            continue
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


@contextmanager
def shared_cost() -> Iterator[None]:
    """What is made here is used by several tests; the one that happens to be first is not charged for it."""
    global _shared
    before, already = cpu_seconds(), _shared
    try:
        yield
    finally:
        _shared = already + cpu_seconds() - before  # nested costs are inside the outer one


def longest_file_first(items: list[pytest.Item]) -> None:
    """Sorts tests, so that no worker is left alone with a long file at the end; a file without a record may be long."""
    files = json.loads(RECORD.read_text(encoding="utf-8")).get("file_seconds", {}) if RECORD.exists() else {}
    items.sort(key=lambda item: (-files.get(_file(item.nodeid), math.inf), _file(item.nodeid)))


def _file(test: str) -> str:
    return test.partition("::")[0]


def machine_seconds(choose: Callable[[Iterable[float]], float] = min) -> float:
    """CPU seconds of a fixed computation: the best of five, or as `choose` says. Some CPUs have instructions for SHA,
    and would look three times as fast as they are; none has any for BLAKE2."""

    def once() -> float:
        began = time.process_time()
        digest = b""
        for number in range(20_000):
            digest = hashlib.blake2b(digest + str(number).encode()).digest()
        return time.process_time() - began

    return choose(once() for _ in range(5))


class Budget:
    """The pytest plugin. `mode` is `check` or `record`."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        self.recorded: dict[str, float] = record.get("cpu_seconds", {})
        self.recorded_files: dict[str, float] = record.get("file_seconds", {})
        self.machine_seconds = record.get("machine_seconds", math.inf)
        self.slowdown = max(1.0, self._slowdown(min))
        self.found: dict[str, float] = {}
        self.wall: Counter[str] = Counter()
        self.speeds: list[float] = []  # `machine_seconds` now and then while tests run

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        if fixturedef.scope == "function":
            return (yield)
        with shared_cost():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[Any]:
        item.stash[_STARTED] = (cpu_seconds() - _shared, len(sys.modules))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[Any]:
        report = yield
        if call.when == "call":
            seconds, modules = item.stash[_STARTED]
            used = cpu_seconds() - _shared - seconds - SECONDS_PER_IMPORT * (len(sys.modules) - modules)
            item.user_properties.append(("cpu_seconds", round(max(used, 0.0), 2)))
            report.user_properties = list(item.user_properties)
            if self.mode == "check" and self.recorded and report.passed and used > self.allowed(item.nodeid):
                self.slowdown = max(self.slowdown, self._slowdown(max))  # a shared machine changes its speed
            allowed = self.allowed(item.nodeid)
            if self.mode == "check" and self.recorded and report.passed and used > allowed:
                report.outcome = "failed"
                report.longrepr = (
                    f"{item.nodeid} used {used:.1f} s of CPU time; its budget is {allowed:.1f} s. Make it cheaper, or "
                    "record a new budget with: make test-budget"
                )
        return report

    def _slowdown(self, choose: Callable[[Iterable[float]], float]) -> float:
        """How many times slower this machine is now than the one that made the record."""
        return machine_seconds(choose) / self.machine_seconds

    def allowed(self, test: str) -> float:
        return max(DEFAULT, FACTOR * self.recorded.get(test, 0.0)) * self.slowdown

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.wall[_file(report.nodeid)] += report.duration
        seconds = dict(report.user_properties).get("cpu_seconds")
        if report.when == "call" and seconds is not None:
            self.found[report.nodeid] = seconds
            if self.mode == "record" and len(self.found) % 100 == 1:
                self.speeds.append(machine_seconds())

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if hasattr(config, "workerinput") or not self.found:
            return
        files: Counter[str] = Counter()
        for test, seconds in self.found.items():
            files[_file(test)] += seconds
        terminalreporter.write_sep("-", f"CPU time of tests: {sum(files.values()):.0f} s")
        for file, seconds in files.most_common(10 if self.mode == "check" else None):
            terminalreporter.write_line(f"{seconds:7.1f} s  {file}")
        if self.mode == "record":
            self.write()

    def write(self) -> None:
        """Files of which no test ran keep their record."""
        costs = {test: seconds for test, seconds in self.recorded.items() if _file(test) not in self.wall}
        costs |= {test: seconds for test, seconds in self.found.items() if seconds > RECORD_ABOVE}
        files = self.recorded_files | {file: round(seconds, 1) for file, seconds in self.wall.items()}
        record = {
            "machine_seconds": round(statistics.median(self.speeds), 4),
            "file_seconds": dict(sorted(files.items())),
            "cpu_seconds": dict(sorted(costs.items())),
        }
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


_STARTED = pytest.StashKey[tuple[float, int]]()
