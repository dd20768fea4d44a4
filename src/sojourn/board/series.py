"""The metrics of runs as columns, read as the files grow, and thinned out for a chart.

metrics.jsonl is append-only. A step that comes again after a restart replaces what came after it before. Of many points
the smallest and the largest of each stretch are kept, so that no spike is lost. Only the runs looked at last are held.
"""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from math import isfinite
from operator import lt
from pathlib import Path
from time import sleep
from typing import Any, BinaryIO, TypeGuard

from sojourn.board.freed_memory import give_back
from sojourn.storage.files import NotValid, open_regular, parse_json

X_AXES = ("step", "time", "tokens", "money")
_X_KEYS = {"tokens": "tokens", "money": "spent"}  # in metrics.jsonl
_NOT_DRAWN = frozenset(("kind", "step", "time", "best", "prompt", "text"))
_TEXTS = frozenset(("kind", "best", "prompt", "text"))
_NUMBERS = (float, int)
_KINDS = ("train", "eval")
_READ_BYTES = 256 << 10  # parsed at a time: nothing else in this process runs meanwhile
_PAUSE = 0.002  # seconds between two such blocks of a long file: requests come first
_MOST_VALUES = 6_000_000  # held of all runs together: about 100 MB
_MOST_LINE = 1 << 20
_SPARKLINE_LINE = 2048  # bytes in which a line is found
_LONG_BYTES = 2 << 20  # a file that takes longer to read than a page should wait
_OVERVIEW = 600  # lines of such a file that are read first


@dataclass
class _Column:
    """`gaps`: the first row of each stretch in which the value was NaN."""

    rows: array[int] = field(default_factory=lambda: array("I"))
    values: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[int] = field(default_factory=lambda: array("I"))


@dataclass
class _Table:
    """Lines of one kind (train, eval): their steps and times, and a column for each key."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    times: array[float] = field(default_factory=lambda: array("d"))
    columns: dict[str, _Column] = field(default_factory=dict)

    def add(self, step: float, time: float, values: dict[str, Any]) -> None:
        steps = self.steps
        if steps and step <= steps[-1]:
            self._forget_from(bisect_left(steps, step))
        row, columns = len(steps), self.columns
        steps.append(step)
        self.times.append(max(time, self.times[-1]) if self.times else time)  # a clock may be set back
        for key, value in values.items():
            column = columns.get(key)
            if value is None and column is not None and column.rows and column.rows[-1] == row - 1:
                column.gaps.append(row)
            if key in _NOT_DRAWN or type(value) not in _NUMBERS or value - value != 0:  # infinite or NaN
                continue
            if column is None:
                column = columns[key] = _Column()
            column.rows.append(row)
            column.values.append(value)

    def extend(self, columns: dict[str, array[float]]) -> None:
        first, count = len(self.steps), len(columns["step"])
        self.steps.extend(columns["step"])
        last = self.times[-1] if self.times else columns["time"][0]
        self.times.extend(accumulate(columns["time"], max, initial=last))
        del self.times[first]
        for key in (key for key in columns if key not in _NOT_DRAWN):
            column = self.columns.setdefault(key, _Column())
            column.rows.extend(range(first, first + count))
            column.values.extend(columns[key])

    def _forget_from(self, row: int) -> None:
        del self.steps[row:], self.times[row:]
        for column in self.columns.values():
            first = bisect_left(column.rows, row)
            del column.rows[first:], column.values[first:], column.gaps[bisect_left(column.gaps, row) :]


class RunSeries:
    """The metrics of one run. Used by one thread at a time (`lock`). `cache`: where it is held."""

    def __init__(self, path: Path, cache: SeriesCache | None = None) -> None:
        self._path, self._offset, self._inode = path, 0, 0
        self._cache = cache
        self._tables: dict[str, _Table] = {}
        self.is_partial = False  # a first impression
        self.lock = threading.Lock()

    @property
    def version(self) -> int:
        """Grows with the file."""
        return self._offset

    @property
    def size(self) -> int:
        return sum(len(one.values) for table in self._tables.values() for one in table.columns.values())

    @property
    def last_step(self) -> int:
        return int(max((table.steps[-1] for table in self._tables.values() if table.steps), default=0))

    def keys(self) -> list[str]:
        return [_full_name(kind, key) for kind, table in self._tables.items() for key in table.columns]

    def open_quickly(self) -> None:
        """A long file that nobody has read yet is answered from lines spread over it, until the cache has read all."""
        if self._cache is None or self._offset or self.is_partial or not _is_long(self._path):
            self.update()
            return
        self.is_partial = True
        with open_regular(self._path) as file:
            size = os.fstat(file.fileno()).st_size
            self._add_lines([line for block in _spread(file, size, _OVERVIEW) for line in block.splitlines()[-1:]])
        self._cache.read_soon(self)

    def read_all(self) -> None:
        whole = RunSeries(self._path)
        whole.update(_PAUSE)
        with self.lock:
            self._offset, self._inode, self._tables = whole._offset, whole._inode, whole._tables
            self.is_partial = False

    def update(self, pause: float = 0.0) -> None:
        """Reads what has been appended, with a pause of so many seconds now and then."""
        if self.is_partial:
            return
        try:
            with open_regular(self._path) as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:  # another file
                    self._offset, self._inode, self._tables = 0, stat.st_ino, {}
                file.seek(self._offset)
                while block := file.read(_READ_BYTES):
                    end = block.rfind(b"\n") + 1
                    if end == 0:
                        if len(block) >= _MOST_LINE:  # no line is so long: what is no text is passed over
                            self._offset += len(block)
                            continue
                        return
                    self._add_lines(block[:end].splitlines())
                    self._offset += end
                    file.seek(self._offset)
                    if pause:
                        sleep(pause)
        except (FileNotFoundError, NotValid, OSError):
            return

    def _add_lines(self, lines: list[bytes]) -> None:
        try:
            parsed = parse_json(b"[" + b",".join(lines) + b"]")  # twice as fast as line by line
        except NotValid:
            parsed = map(_parse, lines)
        for keys, same in groupby(parsed, _keys):
            rows = list(same)
            if not self._add_rows(keys, rows):
                self._add_one_by_one(rows)

    def _add_rows(self, keys: tuple[str, ...], rows: list[dict[str, Any]]) -> bool:
        """Column by column, which is faster than row by row. False where the rows are not plain: of one kind, with
        steps that go up, and numbers in every column."""
        kind = rows[0].get("kind") if keys else None
        if kind not in _KINDS or any(row["kind"] != kind for row in rows) or not {"step", "time"} <= set(keys):
            return False
        try:
            drawn = [key for key in keys if key not in _TEXTS and type(rows[0][key]) is not bool]
            columns = {key: array("d", [row[key] for row in rows]) for key in drawn}
        except (TypeError, OverflowError):  # null where a metric was NaN
            return False
        table = self._tables.setdefault(kind, _Table())
        steps = columns["step"]
        goes_up = all(map(lt, steps, steps[1:])) and (not table.steps or table.steps[-1] < steps[0])
        if not goes_up or not all(isfinite(sum(column)) for column in columns.values()):
            return False
        table.extend(columns)
        return True

    def _add_one_by_one(self, rows: list[Any]) -> None:
        for values in rows:
            if not isinstance(values, dict):
                continue
            kind, step, time = values.get("kind"), values.get("step"), values.get("time")
            if kind not in _KINDS or not _is_number(step) or not _is_number(time):
                continue
            table = self._tables.get(kind)
            if table is None:
                table = self._tables[kind] = _Table()
            table.add(step, time, values)

    def chart(
        self, name: str, x: str, points: int, low: float | None = None, high: float | None = None
    ) -> tuple[list[float], list[float]]:
        """At most about `points` points of a key between `low` and `high` on an axis of X_AXES."""
        kind, _, key = name.rpartition("/")
        table = self._tables.get(kind or "train")
        column = table.columns.get(key) if table is not None else None
        if table is None or column is None:
            return [], []
        places, start = self._places(table, x), self._start(x)
        if places is None:
            return [], []
        xs = places if len(column.rows) == len(places) else array("d", (places[row] for row in column.rows))
        first = 0 if low is None else max(0, bisect_left(xs, low + start) - 1)
        last = len(xs) if high is None else min(len(xs), bisect_right(xs, high + start) + 1)
        chosen = thin_out(column.values, first, last, points)
        return [xs[i] - start for i in chosen], [column.values[i] for i in chosen]

    def gaps(self, name: str, x: str, points: int, low: float, high: float) -> list[float]:
        """Where between `low` and `high` a key was NaN; of neighbours the first."""
        kind, _, key = name.rpartition("/")
        table = self._tables.get(kind or "train")
        places = self._places(table, x) if table is not None else None
        if table is None or places is None or key not in table.columns:
            return []
        start = self._start(x)
        found = (places[row] - start for row in table.columns[key].gaps[-points:])
        return [place for place in found if low < place < high]

    def place(self, x: str, step: Any, time: Any) -> float | None:
        """Where on an axis of X_AXES something happened."""
        train = self._tables.get("train")
        if x == "step" or train is None or not train.steps:
            return step if x == "step" and _is_number(step) else None
        if x == "time":
            return max(0.0, time - self._start(x)) if _is_number(time) else None
        places = self._places(train, x)
        if places is None or not _is_number(step):
            return None
        row = bisect_right(train.steps, step) - 1
        return places[row] if row >= 0 else 0.0

    def _start(self, x: str) -> float:
        """Time is counted from the first line."""
        return min(one.times[0] for one in self._tables.values() if one.times) if x == "time" else 0.0

    def _places(self, table: _Table, x: str) -> array[float] | None:
        """Where each line is on the axis; None where the run has not logged that."""
        if x in ("step", "time"):
            return table.steps if x == "step" else table.times
        train = self._tables.get("train")
        column = train.columns.get(_X_KEYS[x]) if train is not None else None
        if train is None or column is None:
            return None
        if table is train and len(column.rows) == len(train.steps):
            return column.values
        steps = array("d", (train.steps[row] for row in column.rows))
        found = (bisect_right(steps, step) - 1 for step in table.steps)  # evaluations are at steps of their own
        return array("d", (column.values[max(0, one)] for one in found))


def thin_out(values: Sequence[float], first: int, last: int, points: int) -> list[int]:
    """Indices: the smallest and the largest of each of points/2 stretches, the first and the last."""
    count = last - first
    if count <= points:
        return list(range(first, last))
    stretches = max(1, points // 2)
    chosen = {first, last - 1}
    for number in range(stretches):
        start, end = first + count * number // stretches, first + count * (number + 1) // stretches
        part = values[start:end]
        chosen.add(start + part.index(min(part)))
        chosen.add(start + part.index(max(part)))
    return sorted(chosen)


def _keys(values: Any) -> tuple[str, ...]:
    """Rows with the same keys are added together."""
    return tuple(values) if isinstance(values, dict) else ()


def _full_name(kind: str, key: str) -> str:
    return key if kind == "train" else f"{kind}/{key}"


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in _NUMBERS and value - value == 0 and abs(value) < 1e300


class SeriesCache:
    """The runs looked at last. Long files are read in one thread, one after the other, the one asked for last first:
    Python computes one thing at a time, and each further thread would keep memory of its own."""

    def __init__(self, most_values: int = _MOST_VALUES) -> None:
        self._most, self._held = most_values, OrderedDict[Path, RunSeries]()
        self._lock, self._waiting, self._is_reading = threading.Lock(), list[RunSeries](), False

    def open(self, path: Path) -> RunSeries:
        """Up to date. The caller holds its lock while reading."""
        with self._lock:
            found = self._held.pop(path, None) or RunSeries(path, self)
            self._held[path] = found
        with found.lock, contextlib.suppress(OSError, NotValid):
            found.open_quickly()
        self.forget_oldest()
        return found

    def read_soon(self, series: RunSeries) -> None:
        with self._lock:
            self._waiting.append(series)
            if not self._is_reading:
                self._is_reading = True
                threading.Thread(target=self._read_waiting, name="metrics", daemon=True).start()

    def _read_waiting(self) -> None:
        try:
            while (series := self._next_waiting()) is not None:
                series.read_all()
                self.forget_oldest()
                give_back()
        except BaseException:
            self._is_reading = False
            raise

    def _next_waiting(self) -> RunSeries | None:
        """Those that nobody looks at any more are passed over."""
        with self._lock:
            while self._waiting:
                series = self._waiting.pop()
                if any(one is series for one in self._held.values()):
                    return series
            self._is_reading = False  # before the lock is free: what is asked for next starts a thread
            return None

    def forget_oldest(self) -> None:
        with self._lock:
            total = sum(one.size for one in self._held.values())
            while total > self._most and len(self._held) > 1:
                total -= self._held.popitem(last=False)[1].size


class Sparklines:
    """A few losses of each run, read at places spread over its file, without reading all of it."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], list[float]]] = {}

    def of(self, path: Path, points: int = 60) -> list[float]:
        try:
            stat = path.stat()
            stamp = (stat.st_size, stat.st_mtime_ns)
            known = self._known.get(path)
            if known is not None and known[0] == stamp:
                return known[1]
            losses = _sample_losses(path, stat.st_size, points)
        except (OSError, NotValid):
            return []
        self._known[path] = (stamp, losses)
        return losses


def _sample_losses(path: Path, size: int, points: int) -> list[float]:
    found: dict[int, float] = {}
    with open_regular(path) as file:
        blocks = [file.read(size)] if size <= points * _SPARKLINE_LINE else list(_spread(file, size, points))
    for block in blocks:
        for line in reversed(block.splitlines()):
            values = _parse(line)
            if values.get("kind") == "train" and _is_number(values.get("step")) and _is_number(values.get("loss")):
                found[int(values["step"])] = float(values["loss"])
                if len(blocks) > 1:
                    break
    losses = [found[step] for step in sorted(found)]
    return [losses[i] for i in thin_out(losses, 0, len(losses), points)]


def _is_long(path: Path) -> bool:
    try:
        return path.stat().st_size > _LONG_BYTES
    except OSError:
        return False


def _spread(file: BinaryIO, size: int, count: int) -> Iterator[bytes]:
    """Whole lines at places spread over the file; the last are its end."""
    for number in range(count):
        file.seek(max(0, size * (number + 1) // count - _SPARKLINE_LINE))
        yield file.read(_SPARKLINE_LINE).partition(b"\n")[2].rpartition(b"\n")[0]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except NotValid:
        return {}
    return value if isinstance(value, dict) else {}
