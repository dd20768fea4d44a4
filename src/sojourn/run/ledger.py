"""Time, money and energy that a run has cost, so that neither a kill nor a damaged file makes a budget forget them.

ledger.json is rewritten in place four times a second: the kernel keeps what was written when the process is killed, so
a kill forgets less than a second and bills nothing that was not used. Every ten seconds it is also synced, which a
power cut needs. The record has a fixed width: a write needs no space on the disk and replaces the old record whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard

from sojourn.config.quantities import Money
from sojourn.errors import UserError
from sojourn.machine.gpu_energy import EnergyMeter
from sojourn.run.identity import Identity, is_foreign
from sojourn.storage.files import CannotRead, NotValid, load_json, open_regular, write_text

_INTERVAL = 0.25  # seconds
_WRITES_PER_SYNC = 40
_WIDTH = 256  # bytes of a record
_MOST = 1e11  # seconds, money or joules: more is no figure of a run

Cost = tuple[float, float]  # seconds, money


def is_amount(value: Any) -> TypeGuard[float]:
    """Whether it can be a run's seconds, money or joules."""
    return type(value) in (int, float) and 0 <= value < _MOST and math.isfinite(value)


@dataclass
class Ledger:
    """`before` and `paid`: seconds and money of earlier calls of `train`; this one started at `began`, so that opening
    the model and reading data count. `path` is None on ranks other than 0. `mark`: the run's identity. `may_write`:
    whether this process still owns the run. `energy_before`: joules of earlier calls, and the seconds in which they
    were measured; `energy`: what measures those of this call."""

    path: Path | None
    price: Money | None = None
    before: float = 0.0
    paid: float = 0.0
    currency: str = ""
    began: float = field(default_factory=time.monotonic)
    mark: dict[str, str] = field(default_factory=dict)
    may_write: Callable[[], bool] = lambda: True
    energy_before: tuple[float, float] = (0.0, 0.0)
    energy: EnergyMeter = field(default_factory=lambda: EnergyMeter([]))
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        price: Money | None,
        began: float,
        is_main_process: bool,
        at_least: Cost = (0.0, 0.0),
        identity: Identity | None = None,
    ) -> Ledger:
        """`at_least`: seconds and money that the run's checkpoints know of."""
        before, paid, currency, energy = _read(path, at_least, identity)
        if price is not None and paid and currency and price.currency and currency != price.currency:
            raise UserError(
                f"limits.price_per_hour: in {price.currency}, but this run has already cost {paid:.2f} {currency}; "
                f"give the price in {currency}"
            )
        known = currency or (price.currency if price is not None else "")
        mark = {} if identity is None else identity.mark
        return cls(path if is_main_process else None, price, before, paid, known, began, mark, energy_before=energy)

    def __enter__(self) -> Ledger:
        self.energy.__enter__()
        self.write()
        self._thread = threading.Thread(target=self._write_regularly, name="ledger", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self.energy.__exit__()
        self.write()

    @property
    def elapsed(self) -> float:
        """Seconds of this call."""
        return time.monotonic() - self.began

    @property
    def seconds(self) -> float:
        """Seconds of this run, all calls together."""
        return self.before + self.elapsed

    @property
    def spent(self) -> float | None:
        """Money, all calls together; None where the price is unknown."""
        return None if self.price is None else self.paid + float(self.price.amount) * self.elapsed / 3600

    def add(self, seconds: float) -> None:
        """Time that another process used for this run."""
        self.before += seconds
        if self.price is not None:
            self.paid += float(self.price.amount) * seconds / 3600
        self.write()

    def catch_up(self, seconds: float, money: float) -> None:
        """Raises both to those of a checkpoint, which may come from another machine."""
        self.before = max(self.before, seconds - self.elapsed)
        self.paid = max(self.paid, money - ((self.spent or self.paid) - self.paid))

    def write(self, sync: bool = True) -> None:
        """Skipped where the disk fails."""
        if self.path is None or not self.path.parent.is_dir() or not self.may_write():
            return
        with contextlib.suppress(OSError, NotValid, CannotRead):
            _write_in_place(self.path, self._record(), sync)

    def _record(self) -> str:
        money = self.spent if self.spent is not None else self.paid
        facts = {"seconds": round(self.seconds, 3), "money": round(money, 6), "currency": self.currency}
        joules, seconds = self.energy_before[0] + self.energy.joules, self.energy_before[1] + self.energy.seconds
        measured = {"energy_joules": round(joules, 1), "energy_seconds": round(seconds, 1)} if seconds else {}
        return json.dumps(facts | measured | self.mark)

    def _write_regularly(self) -> None:
        writes = 0
        while not self._stopped.wait(_INTERVAL):
            writes += 1
            self.write(sync=writes % _WRITES_PER_SYNC == 0)


def _read(path: Path, at_least: Cost, identity: Identity | None) -> tuple[float, float, str, tuple[float, float]]:
    """Seconds, money, currency, and energy with its seconds. What is another run's, or cannot be a run's, is replaced
    by the checkpoints', who do not know the energy."""
    found: Any = {}
    try:
        found = load_json(path)
        wrong = [] if isinstance(found, dict) else ["not a ledger"]
    except FileNotFoundError:
        wrong = []
    except NotValid as error:
        wrong = [str(error)]
    if is_foreign(found, identity):
        wrong, found = ["of another run"], {}
    facts = {key: value for key, value in found.items() if value is not None} if isinstance(found, dict) else {}
    seconds, money, currency = facts.get("seconds", 0.0), facts.get("money", 0.0), facts.get("currency", "")
    if not is_amount(seconds):
        wrong, seconds = [*wrong, f"seconds is {_shorten(seconds)}"], 0.0
    if not is_amount(money):
        wrong, money = [*wrong, f"money is {_shorten(money)}"], 0.0
    if not isinstance(currency, str) or not re.fullmatch(r"\w{0,8}", currency):
        wrong, currency = [*wrong, f"currency is {_shorten(currency)}"], ""
    seconds, money = max(seconds, at_least[0]), max(money, at_least[1])
    if wrong:
        print(
            f"warning: {path}: {', '.join(wrong)}; with what the checkpoints know, this run has taken {seconds:.0f} s "
            f"and cost {money:.2f} {currency}".rstrip(),
            flush=True,
        )
    joules, measured = facts.get("energy_joules"), facts.get("energy_seconds")
    energy = (joules, measured) if is_amount(joules) and is_amount(measured) else (0.0, 0.0)
    return float(seconds), float(money), currency, energy


def _shorten(value: Any) -> str:
    return json.dumps(value)[:40]


def _write_in_place(path: Path, record: str, sync: bool) -> None:
    """One write of one block, or a new file where there is none of this width."""
    data = f"{record:<{_WIDTH - 1}}\n".encode()
    with contextlib.suppress(FileNotFoundError, NotValid), open_regular(path, write=True) as file:
        if os.fstat(file.fileno()).st_size == len(data):
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            os.write(file.fileno(), data)
            if sync:
                os.fsync(file.fileno())
            return
    write_text(path, data.decode())
