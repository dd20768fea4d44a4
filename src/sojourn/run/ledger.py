"""Time and money that a run has cost, written every ten seconds, so that a kill does not make a budget forget them."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from sojourn.config.quantities import Money
from sojourn.errors import UserError
from sojourn.storage.files import read_json, write_json

_INTERVAL = 10.0  # seconds


@dataclass
class Ledger:
    """`before` and `paid`: seconds and money of earlier calls of `train`; this one started at `began`, so that opening
    the model and reading data count. `path` is None on ranks other than 0."""

    path: Path | None
    price: Money | None = None
    before: float = 0.0
    paid: float = 0.0
    currency: str = ""
    began: float = field(default_factory=time.monotonic)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @classmethod
    def open(cls, path: Path, price: Money | None, began: float, is_main_process: bool) -> Ledger:
        found = read_json(path)
        found = found if isinstance(found, dict) else {}
        paid, currency = float(found.get("money") or 0.0), str(found.get("currency") or "")
        if price is not None and paid and currency and price.currency and currency != price.currency:
            raise UserError(
                f"limits.price_per_hour: in {price.currency}, but this run has already cost {paid:.2f} {currency}; "
                f"give the price in {currency}"
            )
        known = currency or (price.currency if price is not None else "")
        return cls(path if is_main_process else None, price, float(found.get("seconds") or 0.0), paid, known, began)

    def __enter__(self) -> Ledger:
        self._thread = threading.Thread(target=self._write_regularly, name="ledger", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
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

    def catch_up(self, seconds: float, money: float) -> None:
        """Raises both to those of a checkpoint, which may come from another machine."""
        self.before = max(self.before, seconds - self.elapsed)
        self.paid = max(self.paid, money - ((self.spent or self.paid) - self.paid))

    def write(self) -> None:
        """Skipped where the disk is full."""
        if self.path is None or not self.path.parent.is_dir():
            return
        money = self.spent if self.spent is not None else self.paid
        facts = {"seconds": round(self.seconds, 3), "money": round(money, 6), "currency": self.currency}
        with contextlib.suppress(OSError):
            write_json(self.path, facts)

    def _write_regularly(self) -> None:
        while not self._stopped.wait(_INTERVAL):
            self.write()
