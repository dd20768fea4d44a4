"""What the catalogue knows: GPUs, platforms, prices and data sets as typed rows, each with its source and date."""

from dataclasses import dataclass, field
from pathlib import Path

from sojourn.catalog.tables import rows, to_row
from sojourn.config.words import closest
from sojourn.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """One GPU. TFLOP/s are dense with 32-bit accumulation; None where the hardware or the vendor gives none."""

    name: str
    memory_gib: float
    bandwidth_gbs: float
    source: str
    date: str
    usable_gib: float | None = None
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    fp8_tflops: float | None = None
    capability: tuple[int, int] | None = None
    unified: bool = False

    @property
    def plan_gib(self) -> float:
        """Memory a plan may count on: what torch sees, or 75 % of memory shared with the CPU."""
        if self.usable_gib is not None:
            return self.usable_gib
        return self.memory_gib * (0.75 if self.unified else 0.97)


@dataclass(frozen=True)
class PlatformFacts:
    """One place to train: how it is recognised, what survives there, when it ends. See platforms.toml for the keys."""

    name: str
    title: str
    grade: str
    limits: str
    wiped: str
    stop: str
    reach: str
    source: str
    date: str
    env: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    home: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    persistent: tuple[str, ...] = ()
    volatile: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    session_hours: float | None = None
    idle_minutes: float | None = None
    weekly_gpu_hours: float | None = None
    stop_command: str | None = None
    mount_hint: str | None = None
    turbo: str | None = None
    region: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Price:
    """What `count` GPUs of one kind cost per hour on one platform, who said so, and in which month."""

    platform: str
    gpu: str
    cny_per_hour: float
    source: str
    month: str
    count: int = 1
    note: str = ""


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
    return tuple(
        to_row(Gpu, {"name": name, **row}, f'{where}: gpu."{name}"', "GPU")
        for name, (row, where) in rows("gpu", user).items()
    )


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
        to_row(PlatformFacts, {"name": name, **row}, f"{where}: platform.{name}", "platform")
        for name, (row, where) in rows("platform", user).items()
    )


def prices(user: Path | None = None) -> tuple[Price, ...]:
    """Every price, platform by platform."""
    return tuple(
        to_row(Price, row, f'{where}: price.{row["platform"]}."{row["gpu"]}"', "price")
        for row, where in rows("price", user).values()
    )


def datasets(user: Path | None = None) -> tuple[DatasetFacts, ...]:
    """Every data set that has a short name."""
    return tuple(
        _dataset(name, row, f"{where}: dataset.{name}") for name, (row, where) in rows("dataset", user).items()
    )


def _dataset(name: str, row: dict[str, object], where: str) -> DatasetFacts:
    from sojourn.config.schema import Columns

    facts = to_row(DatasetFacts, {"name": name, **row}, where, "data set")
    for key in facts.columns:
        if key not in Columns.model_fields:
            raise UserError(f"{where}: `columns`: unknown name `{key}`{closest(key, Columns.model_fields)}")
    return facts
