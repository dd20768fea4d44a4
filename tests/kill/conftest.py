"""One undisturbed run of each method per worker; at the end, a table of what was survived."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fork_server import ForkServer
from kill.killed_run import Reference, make_reference


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Callable[[str], Reference]:
    """The reference of a method."""
    folder = tmp_path_factory.mktemp("kill")
    known: dict[str, Reference] = {}

    def reference(method: str) -> Reference:
        if method not in known:
            known[method] = make_reference(fork_server, folder / method, method)
        return known[method]

    return reference


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Adds a row to the table of results."""
    return lambda **row: record_property("survived", json.dumps(row))


@pytest.fixture
def explored(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Adds the states of a protocol to the table of results."""

    def add(protocol: str, states: int, transitions: int, counts: dict[str, int]) -> None:
        row = {"protocol": protocol, "states": states, "transitions": transitions, "counts": dict(counts)}
        record_property("explored", json.dumps(row))

    return add


@pytest.fixture
def aimed(record_property: Callable[[str, object], None]) -> Callable[[str, str, str, str], None]:
    """Adds a combination of conditions, and how it ended, to the table of results."""
    return lambda here, there, kill, ending: record_property("aimed", json.dumps([here, there, kill, ending]))


def _write_aimed(terminalreporter: Any) -> None:
    """A line for each condition of the run folder, a column for each of the mirror."""
    endings: dict[str, dict[str, set[str]]] = {}
    rows = [row for _, row in _reported(terminalreporter, "aimed")]
    for here, there, _, ending in rows:
        endings.setdefault(here, {}).setdefault(there, set()).add(ending)
    for here, columns in endings.items():
        cells = "  ".join(f"{there}: {' or '.join(sorted(found))}" for there, found in columns.items())
        terminalreporter.write_line(f"run folder {here:8} mirror {cells}")
    if rows:
        refused = sum(row[3] == "refused" for row in rows)
        terminalreporter.write_line(f"{len(rows)} combinations: {len(rows) - refused} resumed, {refused} refused")


def _reported(terminalreporter: Any, wanted: str) -> list[tuple[bool, Any]]:
    """What tests have reported as `wanted`, and whether they passed."""
    return [
        (report.outcome == "passed", json.loads(value))
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == wanted
    ]


def _write_explored(terminalreporter: Any) -> None:
    totals: dict[str, Counter[str]] = {}
    for _, row in _reported(terminalreporter, "explored"):
        total = totals.setdefault(row["protocol"], Counter())
        total.update({"states": row["states"], "transitions": row["transitions"], **row["counts"]})
    for protocol, total in sorted(totals.items()):
        facts = ", ".join(f"{count:,} {name}" for name, count in total.items())
        terminalreporter.write_line(f"{protocol}: {facts}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    _write_explored(terminalreporter)
    _write_aimed(terminalreporter)
    rows_of_tests = _reported(terminalreporter, "survived")
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for passed, row in rows_of_tests:
        key = row["method"], row["trouble"]
        total = rows.setdefault(key, {"method": key[0], "trouble": key[1], "times": 0, "runs": 0, "where": {}})
        total["times"] += row["times"]
        total["runs"] += row["runs"]
        for place, times in row["where"].items():
            total["where"][place] = total["where"].get(place, 0) + times
        total["identical"] = total["rows_exact"] = total.get("identical", True) and passed
    if not rows:
        return
    table = [rows[key] for key in sorted(rows)]
    terminalreporter.write_line("")
    for row in table:
        where = ", ".join(f"{place} {times}" for place, times in sorted(row["where"].items(), key=lambda i: -i[1]))
        same = "same weights, every row once an epoch" if row["identical"] else "NOT the same"
        line = f"{row['method']:9} {row['times']:4} {row['trouble']} in {row['runs']} runs: {same} ({where})"
        terminalreporter.write_line(line)
    kills = sum(row["times"] for row in table if "kill" in row["trouble"])
    terminalreporter.write_line(f"{kills} kills, {sum(row['times'] for row in table) - kills} failures of the disk")
    if os.environ.get("SOJOURN_RESULTS"):
        _write(Path(os.environ["SOJOURN_RESULTS"]), table, kills)


def _write(folder: Path, table: list[dict[str, Any]], kills: int) -> None:
    from sojourn.machine.hardware import cpu
    from sojourn.train.metrics.environment import version_of

    now, machine = datetime.datetime.now(datetime.timezone.utc), cpu()
    facts = {
        "command": "make test-kill",
        "date": now.isoformat(timespec="seconds"),
        "cpu": machine.model,
        "cores": machine.usable,
        "system": platform.platform(),
        "versions": {name: version_of(name) for name in ("sojourn", "torch", "transformers", "peft", "bitsandbytes")},
        "kills": kills,
        "table": table,
    }
    path = folder / f"kill-{machine.model.replace(' ', '_')}-{platform.machine()}-{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
