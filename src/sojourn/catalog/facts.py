"""What the catalogue knows: GPUs, platforms, prices and data sets as typed rows, each with its source and date."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sojourn.catalog.tables import rows, to_row
from sojourn.config.words import closest
from sojourn.errors import UserError

_PCIE_LANE_GBS = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # one lane, one direction


@dataclass(frozen=True)
class Gpu:
    """One GPU. TFLOP/s are dense with 32-bit accumulation; None where the hardware or the vendor gives none."""

    name: str
    memory_gib: float
    bandwidth_gbs: float
    source: str
    date: str
    usable_gib: float | None = None
    fp32_tflops: float | None = None
    tf32_tflops: float | None = None
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    fp8_tflops: float | None = None
    capability: tuple[int, int] | None = None
    nvlink_gbs: float | None = None
    nvlink_peers: int | None = None
    pcie_gen: int | None = None
    pcie_lanes: int = 16
    unified: bool = False
    note: str = ""

    @property
    def plan_gib(self) -> float:
        """Memory a plan may count on: what torch sees, or 75 % of memory shared with the CPU."""
        if self.usable_gib is not None:
            return self.usable_gib
        return self.memory_gib * (0.75 if self.unified else 0.97)

    @property
    def pcie_gbs(self) -> float | None:
        """GB/s to the host or another card, one direction, as the bus could do it at most."""
        lane = _PCIE_LANE_GBS.get(self.pcie_gen or 0)
        return None if lane is None else lane * self.pcie_lanes


@dataclass(frozen=True)
class Disk:
    """A folder of a platform and what it outlives: a `session` (nothing), a `stop` of the machine, or its `release`."""

    path: str
    survives: str
    size_gb: float | None = None
    free_gb: float | None = None
    kept_hours: float | None = None
    inodes: int | None = None


@dataclass(frozen=True)
class PlatformFacts:
    """One place to train: how it is recognised, what survives there, when it ends. See platforms.toml for the keys."""

    name: str
    source: str
    date: str
    title: str = ""
    grade: str = "C"
    limits: str = "none known"
    wiped: str = "nothing known"
    stop: str = "not known"
    reach: str = "ssh"
    env: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    home: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    persistent: tuple[str, ...] = ()
    volatile: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    disks: tuple[Disk, ...] = ()
    session_hours: float | None = None
    idle_minutes: float | None = None
    weekly_gpu_hours: float | None = None
    released_after_days: float | None = None
    currency: str | None = None
    no_gpu_per_hour: float | None = None
    stop_command: str | None = None
    mount_hint: str | None = None
    turbo: str | None = None
    region: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Price:
    """What `count` GPUs of one kind cost per hour on one platform, who said so, and in which month.

    `per_hour` is in `currency`; `cny_per_hour` is the same by the catalogue's rate, to compare with others.
    """

    platform: str
    gpu: str
    cny_per_hour: float
    source: str
    month: str
    count: int = 1
    note: str = ""
    currency: str = "CNY"
    per_hour: float | None = None


@dataclass(frozen=True)
class Currency:
    """How many CNY one unit of a currency is, roughly."""

    name: str
    cny: float
    source: str
    date: str


@dataclass(frozen=True)
class DatasetFacts:
    """A short name for a data set on the hub: where it is, which part of it, and our names for its columns."""

    name: str
    hub: str
    source: str
    date: str
    config: str | None = None
    split: str = "train"
    eval_split: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    lines: bool = False
    description: str = ""


def gpus(user: Path | None = None) -> tuple[Gpu, ...]:
    """Every GPU of the catalogue and of the user's own file."""
    return tuple(_gpu(name, row, f'{where}: gpu."{name}"') for name, (row, where) in rows("gpu", user).items())


def _gpu(name: str, row: dict[str, Any], where: str) -> Gpu:
    found = to_row(Gpu, {"name": name, **row}, where, "GPU")
    for key in ("memory_gib", "bandwidth_gbs"):
        if getattr(found, key) == 0:
            raise UserError(f"{where}: `{key}` is 0: no GPU has that")
    if found.usable_gib is not None and not 0 < found.usable_gib <= found.memory_gib:
        raise UserError(f"{where}: `usable_gib` is {found.usable_gib:g}: it must be between 0 and memory_gib")
    if found.pcie_gen is not None and found.pcie_gen not in _PCIE_LANE_GBS:
        raise UserError(f"{where}: `pcie_gen` is {found.pcie_gen}: known are {', '.join(map(str, _PCIE_LANE_GBS))}")
    return found


def peak_flops(gpu_name: str, precision: str, memory_gib: float | None = None) -> float | None:
    """The most FLOP/s of a GPU as torch names it, in bf16 or fp16 (dense); None where the catalogue cannot tell."""
    from sojourn.catalog.names import gpu

    try:
        row = gpu(gpu_name, memory_gib)
    except UserError:
        return None
    tflops = {"bf16": row.bf16_tflops, "fp16": row.fp16_tflops}.get(precision)
    return None if tflops is None else 1e12 * tflops


def platforms(user: Path | None = None) -> tuple[PlatformFacts, ...]:
    """Every platform, in the order in which they are looked for; `generic` matches nothing and means none of them."""
    return tuple(
        _platform(name, row, f"{where}: platform.{name}") for name, (row, where) in rows("platform", user).items()
    )


def _platform(name: str, row: dict[str, Any], where: str) -> PlatformFacts:
    found = to_row(PlatformFacts, {"name": name, "title": name, **row}, where, "platform")
    for disk in found.disks:
        if disk.survives not in (known := ("session", "stop", "release")):
            raise UserError(f"{where}: `disks`: `survives` is {disk.survives!r}: it must be one of {', '.join(known)}")
    return found


def currencies(user: Path | None = None) -> dict[str, Currency]:
    """Every currency with a rate, by its three letters; CNY is what the others are told in."""
    found = {
        name.upper(): to_row(Currency, {"name": name.upper(), **row}, f"{where}: currency.{name}", "currency")
        for name, (row, where) in rows("currency", user).items()
    }
    return {"CNY": Currency("CNY", 1.0, "the catalogue's own unit", ""), **found}


def prices(user: Path | None = None) -> tuple[Price, ...]:
    """Every price, platform by platform; a user's price for a card that we price too takes our price's place."""
    found, rates = rows("price", user), currencies(user)
    by_place: dict[tuple[str, str], Price] = {}
    for row, where in found.values():
        place = f'{where}: price.{row["platform"]}."{row["gpu"]}"'
        price = _price(row if where == "prices.toml" else _called_as_ours(row, place, user), place, rates)
        by_place[price.platform, price.gpu] = price
    return tuple(by_place.values())


def _called_as_ours(row: dict[str, Any], where: str, user: Path | None) -> dict[str, Any]:
    """A user's price under the catalogue's names of its platform and GPU."""
    from sojourn.catalog.names import gpu

    known = [place.name for place in platforms(user)]
    if row["platform"] not in known:
        mend = closest(row["platform"], known) or f"; add [platform.{row['platform']}] to name it"
        raise UserError(f"{where}: no platform called '{row['platform']}'{mend}")
    try:
        return {**row, "gpu": gpu(row["gpu"], user=user).name}
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _price(row: dict[str, Any], where: str, rates: dict[str, Currency]) -> Price:
    if "per_hour" in row and "cny_per_hour" in row:
        raise UserError(f"{where}: `per_hour` and `cny_per_hour` are both there; keep one of them")
    if "per_hour" not in row:
        price = to_row(Price, row, where, "price")
        if price.currency != "CNY":
            raise UserError(f"{where}: `currency` goes with `per_hour`; `cny_per_hour` is in CNY")
        return to_row(Price, {**row, "per_hour": price.cny_per_hour}, where, "price")
    price = to_row(Price, {**row, "cny_per_hour": row["per_hour"]}, where, "price")
    rate = rates.get(price.currency)
    if rate is None:
        add = f"add [currency.{price.currency}] with `cny`, or take one of {', '.join(rates)}"
        raise UserError(f"{where}: `currency` is {price.currency!r}, which has no rate; {add}")
    return to_row(Price, {**row, "cny_per_hour": rate.cny * (price.per_hour or 0.0)}, where, "price")


def datasets(user: Path | None = None) -> tuple[DatasetFacts, ...]:
    """Every data set that has a short name."""
    return tuple(
        _dataset(name, row, f"{where}: dataset.{name}") for name, (row, where) in rows("dataset", user).items()
    )


def _dataset(name: str, row: dict[str, object], where: str) -> DatasetFacts:
    from sojourn.config.data import Columns

    facts = to_row(DatasetFacts, {"name": name, **row}, where, "data set")
    for key in facts.columns:
        if key not in Columns.model_fields:
            raise UserError(f"{where}: `columns`: unknown name `{key}`{closest(key, Columns.model_fields)}")
    return facts
