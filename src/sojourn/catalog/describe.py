"""The catalogue as text: what it has of each kind, and one entry with its source, date and prices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sojourn.catalog.gpus import find_gpu, split_count
from sojourn.catalog.models import find_model, models
from sojourn.catalog.platforms import find_platform
from sojourn.catalog.prices import Price, prices, prices_of
from sojourn.catalog.staleness import is_stale, with_age
from sojourn.catalog.tables import KINDS, Table, date_key, load_rows, name_key, refreshed_file, user_file
from sojourn.catalog.user_rows import READERS, row_text
from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import UserError

_DATED = ("price", "currency")  # whose age matters


@dataclass(frozen=True)
class Entry:
    """One row as it counts: with the user's and refreshed keys, and the file it is from."""

    kind: str
    name: str
    row: Table
    file: str

    @property
    def date(self) -> str:
        return str(self.row.get(date_key(self.kind), ""))

    @property
    def stale(self) -> bool:
        return self.kind in _DATED and is_stale(self.date)


def entries(kind: str) -> list[Entry]:
    READERS[kind]()  # every row is checked
    return [Entry(kind, name, row, where) for name, (row, where) in load_rows(kind).items()]


def summary_lines() -> list[str]:
    """How many rows there are of each kind, and how old prices and rates are."""
    lines = []
    for kind, plural in KINDS.items():
        found = entries(kind)
        dates = sorted(entry.date for entry in found if entry.date)
        stale = sum(entry.stale for entry in found)
        age = f", seen from {dates[0]} to {dates[-1]}" if kind in _DATED and dates else ""
        lines.append(f"{plural:<12}{len(found):>4}{age}" + (f"; {stale} stale" if stale else ""))
    files = [
        f"{title}: {path}"
        for title, path in (("yours", user_file()), ("refreshed", refreshed_file()))
        if path.is_file()
    ]
    return [*lines, *files, "next: sojourn catalog list KIND · show NAME · add · refresh"]


def list_lines(kind: str, only_stale: bool = False) -> list[str]:
    found = [entry for entry in entries(kind) if entry.stale or not only_stale]
    if not found:
        return [f"no {'stale ' if only_stale else ''}{KINDS[kind]}"]
    cells = [[*(entry.name.split("/", 1) if kind == "price" else [entry.name]), *_columns(entry)] for entry in found]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _columns(entry: Entry) -> list[str]:
    row, when = entry.row, with_age(entry.date) if entry.kind in _DATED else entry.date
    match entry.kind:
        case "gpu":
            rate = row.get("bf16_tflops") or row.get("fp16_tflops")
            untried = "refused" if row.get("refused") else "never run" if row.get("not_run") else ""
            return [
                f"{row['memory_gib']:g} GiB",
                f"{row['bandwidth_gbs']:g} GB/s",
                f"{rate:g} TFLOP/s" if rate else "",
                untried,
            ]
        case "platform":
            return [str(row.get("title", entry.name)), str(row.get("limits", ""))]
        case "price":
            count = row.get("count", 1)
            return [_amount(row), f"for {count}" if count > 1 else "", when]
        case "currency":
            return [f"{row['cny']:g} CNY", when]
        case "model":
            spec = next(model for model in models() if model.name == entry.name)
            active = f" ({spec.active_parameters / 1e9:.3g}B active)" if spec.experts else ""
            return [f"{spec.parameters / 1e9:.3g}B{active}", spec.family, spec.hub]
        case _:
            return [str(row.get("hub", "")), str(row.get("description", ""))]


def _amount(row: Table) -> str:
    return f"{row['cny_per_hour']:g} CNY/h" if "cny_per_hour" in row else f"{row['per_hour']:g} {row['currency']}/h"


def find_entries(word: str) -> list[Entry]:
    """Everything of that name: a GPU, a platform, a model, a currency, a data set."""
    known = {kind: {name_key(entry.name): entry for entry in entries(kind)} for kind in KINDS if kind != "price"}
    names: dict[str, Callable[[], str]] = {
        "gpu": lambda: find_gpu(split_count(word)[0]).name,
        "platform": lambda: find_platform(word).name,
        "model": lambda: find_model(word).name,
        "currency": lambda: word.strip().upper(),
        "dataset": lambda: word,
    }
    found, reasons = [], []
    for kind, name in names.items():
        try:
            entry = known[kind].get(name_key(name()))
        except UserError as error:
            reasons.append(str(error))
            continue
        found += [entry] if entry else []
    if not found:
        close = did_you_mean(word, [entry.name for some in known.values() for entry in some.values()])
        several = next((reason for reason in reasons if "more than one size" in reason), "")
        raise UserError(
            several or f"nothing called “{printable(word)}” in the catalogue{close}; see sojourn catalog list"
        )
    return found


def show_lines(entry: Entry) -> list[str]:
    lines = [*row_text(entry.kind, entry.name, entry.row).splitlines(), f"# from {entry.file}"]
    for price in _prices_of(entry):
        each = f"{price.per_hour:g} {price.currency}" if price.per_hour is not None else f"{price.cny_per_hour:g} CNY"
        many = f" for {price.count}" if price.count > 1 else ""
        what = price.platform if entry.kind == "gpu" else price.gpu
        lines.append(f"# {what}: {each} an hour{many} ({price.source}, {with_age(price.month)})")
    if entry.kind == "currency" and entry.stale:
        lines.append(f"# {with_age(entry.date)}: sojourn catalog refresh")
    if entry.kind == "platform" and not _prices_of(entry):
        lines.append(f"# no price known; yours: sojourn catalog add price {entry.name} GPU ¥2.5")
    return lines


def _prices_of(entry: Entry) -> tuple[Price, ...]:
    if entry.kind == "gpu":
        return prices_of(find_gpu(entry.name))
    return tuple(price for price in prices() if price.platform == entry.name) if entry.kind == "platform" else ()


def entry_values(entry: Entry) -> Table:
    """For --json."""
    return {"kind": entry.kind, "name": entry.name, "file": entry.file, **entry.row, "stale": entry.stale}
