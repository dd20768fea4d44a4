"""`sojourn catalog refresh`: newer rows from a catalogue file, and exchange rates of the European Central Bank."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sojourn.catalog.download import DownloadFailed, download_text, host_of
from sojourn.catalog.prices import currencies
from sojourn.catalog.staleness import age_in_days
from sojourn.catalog.tables import (
    KINDS,
    Table,
    date_key,
    flat_rows,
    load_rows,
    name_key,
    parse_tables,
    refreshed_file,
)
from sojourn.catalog.user_rows import row_text, write_checked
from sojourn.config.messages import printable
from sojourn.errors import RunFailed, UserError
from sojourn.expand_user import expand_user

RATES_URL = "https://www.ecb.europa.eu/stats/eurofxref/eurofxref-daily.xml"
_HEAD = "# Written by `sojourn catalog refresh`: rows newer than the built-in ones. Your own go into catalog.toml.\n"


@dataclass
class Refreshed:
    """Names of rows by what became of them, as KIND NAME."""

    new: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    older: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        words = {"new": self.new, "changed": self.changed, "here already": self.same, "older than here": self.older}
        counted = ", ".join(f"{len(names)} {word}" for word, names in words.items() if names) or "nothing"
        return [f"{name}: {word}" for word in ("new", "changed") for name in words[word]] + [counted]

    def joined(self, other: Refreshed) -> Refreshed:
        return Refreshed(
            self.new + other.new, self.changed + other.changed, self.same + other.same, self.older + other.older
        )


def refresh_from(place: str) -> Refreshed:
    """Takes the rows of a catalogue file on disk or at a URL that are newer than those here."""
    text = _read(place)
    tables = parse_tables(text, place)
    rows = {kind: flat_rows(kind, table, place) for kind, table in tables.items()}
    for kind, some in rows.items():
        for name, row in some.items():
            if age_in_days(str(row.get(date_key(kind), ""))) is None or not row.get("source"):
                raise UserError(
                    f'{place}: {kind}."{printable(name)}" needs `source` and `{date_key(kind)}`, like "2026-11-09"'
                )
    if not any(rows.values()):
        raise UserError(f"{place}: no rows; it has tables like those of catalog.toml: {', '.join(KINDS)}")
    return keep_rows(rows)


def refresh_rates() -> Refreshed:
    """Of the currencies that the catalogue has, from the European Central Bank."""
    try:
        text = download_text(RATES_URL)
    except DownloadFailed as error:
        raise RunFailed(f"exchange rates: {host_of(RATES_URL)} cannot be reached ({error})") from None
    day = re.search(r"time=['\"](\d{4}-\d\d-\d\d)['\"]", text)
    pairs = re.findall(r"currency=['\"]([A-Z]{3})['\"]\s+rate=['\"](\d+(?:\.\d+)?)['\"]", text)
    per_euro = {name: float(rate) for name, rate in pairs}
    if day is None or not per_euro.get("CNY"):
        raise RunFailed(f"exchange rates: the answer of {host_of(RATES_URL)} has no rates in CNY")
    per_euro["EUR"] = 1.0
    facts = {"source": "European Central Bank, euro reference rates", "date": day[1]}
    cny = per_euro["CNY"]
    known = [name for name in currencies() if name != "CNY" and per_euro.get(name)]
    return keep_rows({"currency": {name: {"cny": float(f"{cny / per_euro[name]:.5g}"), **facts} for name in known}})


def keep_rows(rows: dict[str, dict[str, Table]]) -> Refreshed:
    """Writes those that are newer; a row that is wrong is an error, and nothing is written."""
    outcome, kept = Refreshed(), _kept()
    for kind, some in rows.items():
        when, here = date_key(kind), {name_key(name): (name, row) for name, (row, _) in load_rows(kind).items()}
        for typed, row in some.items():
            name, old = here.get(name_key(typed), (typed, None))
            label = f"{kind} {name}"
            if old is None:
                outcome.new.append(label)
            elif all(old.get(key) == value for key, value in row.items()):
                outcome.same.append(label)
                continue
            elif str(row[when]) < str(old.get(when, "")):
                outcome.older.append(label)
                continue
            else:
                outcome.changed.append(label)
            kept.setdefault(kind, {})[name] = row
    if outcome.new or outcome.changed:
        _write(kept)
    return outcome


def _kept() -> dict[str, dict[str, Table]]:
    path = refreshed_file()
    if not path.is_file():
        return {}
    tables = parse_tables(path.read_text(encoding="utf-8"), str(path))
    return {kind: dict(flat_rows(kind, table, str(path))) for kind, table in tables.items()}


def _write(kept: dict[str, dict[str, Table]]) -> None:
    path = refreshed_file()
    blocks = [
        row_text(kind, name, {key: value for key, value in row.items() if key not in ("platform", "gpu")})
        for kind, some in kept.items()
        for name, row in some.items()
    ]
    write_checked(path, "\n".join([_HEAD, *blocks]))


def _read(place: str) -> str:
    if re.match(r"https?://", place):
        try:
            return download_text(place)
        except DownloadFailed as error:
            raise RunFailed(f"--from {printable(place, 200)}: cannot be read ({error})") from None
    try:
        return expand_user(place).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"--from {printable(place, 200)}: cannot be read ({reason})") from None
