"""What the user asks a plan for, as typed: GPUs, a budget, a deadline, a size, a platform."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from statistics import median
from unicodedata import normalize

from sojourn.catalog.gpus import Gpu, find_gpu, gpus, split_count
from sojourn.catalog.platforms import find_platform
from sojourn.config.messages import printable
from sojourn.config.quantities import Duration, Money, Size
from sojourn.errors import UserError

_GIB = 2**30
_GPUS_FLAG = re.compile(r"(?:--gpus|--nproc[-_]per[-_]node|parallel\.gpus)", re.IGNORECASE)


def named_gpus(names: list[str] | None) -> tuple[list[Gpu] | None, int | None]:
    """The cards, and how many of each where a name says so (`2xT4`); None: every card of the catalogue."""
    if not names:
        return None, None
    split = [split_count(name) for name in names]
    counts = {count for _, count in split if count is not None}
    if len(counts) > 1:
        raise UserError("--gpu: one plan has one number of GPUs; give it once, with --gpus 2")
    cards = list(dict.fromkeys(find_gpu(name) for name, _ in split))
    for card in cards:
        if card.refused:
            raise UserError(f"--gpu {card.name}: {card.refused}")
    return cards, next(iter(counts), None)


def with_gpu_count(args: list[str], count: int | None) -> tuple[list[str], list[str]]:
    """The arguments of a run where `--gpus 8` lists eight GPUs, and notes: a plan has no GPU number 8."""
    found, notes, given = list(args), list[str](), False
    for index, value in _gpus_values(found):
        given = True
        if re.fullmatch(r"[1-9][0-9]{0,2}", value):
            if count not in (None, int(value)):
                raise UserError(f"--gpus {value}: --gpu says {count}; give one number")
            listed = _listed(int(value))
            found[index] = found[index].removesuffix(value) + listed
            if int(value) > 1 and "nproc" not in found[index - 1] + found[index]:
                notes.append(f"--gpus {value} is planned as {value} GPUs; train takes their numbers: --gpus {listed}")
    if count is not None and not given:
        found += ["--gpus", _listed(count)]
    return found, notes


def _gpus_values(args: list[str]) -> Iterator[tuple[int, str]]:
    """Where the arguments give GPUs: the place of the value and the value, of `--gpus V` and of `--gpus=V`."""
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if not _GPUS_FLAG.fullmatch(name):
            continue
        if equals:
            yield index, value
        elif index + 1 < len(args):
            yield index + 1, args[index + 1]


def _listed(count: int) -> str:
    return ",".join(map(str, range(count)))


def to_budget(text: str | None, option: str = "--budget") -> Money | None:
    try:
        return None if text is None else Money.parse(text)
    except ValueError as error:
        raise UserError(f"{option}: “{printable(str(text))}”: {error}") from None


def to_seconds(text: str | None, option: str = "--deadline") -> float | None:
    if text is not None and re.fullmatch(r"\s*\d+(\.\d+)?\s*", text):
        number = printable(text)
        raise UserError(f"{option}: “{number}” has no unit; write {number}h for hours, {number}d for days")
    try:
        return None if text is None else float(Duration.parse(text))
    except ValueError as error:
        raise UserError(f"{option}: “{printable(str(text))}”: {error}") from None


def to_memory(text: str) -> tuple[int, str]:
    """Bytes that a plan may count on, and the size in words. `24GB`, `24G` and `24` are a card sold as such, which has
    less for a process; `24GiB` are bytes."""
    typed = normalize("NFKC", text).strip()
    if (sold := re.fullmatch(r"([1-9]\d{0,3})\s*(?:g|gb)?", typed, re.IGNORECASE)) and int(sold[1]) < 10_000:
        gib = _usable_gib(int(sold[1]))
        return int(gib * _GIB), f"a GPU of {sold[1]} GB ({gib:.4g} GiB of it usable)"
    try:
        size = int(Size.parse(typed))
    except ValueError as error:
        raise UserError(f"--fit: “{printable(text)}”: {error}") from None
    if size < _GIB:
        raise UserError(
            f"--fit: “{printable(text)}” is {size:,} bytes, less than a GPU needs for itself; give at least 1GiB"
        )
    return size, f"{size / _GIB:.4g} GiB" if size < 1000 * _GIB else f"{size / _GIB:,.0f} GiB"


def _usable_gib(sold: int) -> float:
    """Of a card sold as so many GB: what most of the catalogue's have for a process."""
    same = [gpu.plan_gib for gpu in gpus() if gpu.memory_gib == sold and not gpu.unified]
    return median(same) if same else 0.97 * sold


def known_platform(name: str | None) -> str | None:
    try:
        return None if name is None else find_platform(name).name
    except UserError as error:
        raise UserError(f"--platform: {error}") from None


def alone(option: str, asked: object, others: Mapping[str, object]) -> None:
    """`--fit` and `--serve` ask about memory and about nothing else; a question without a run about money and time."""
    given = [name for name, value in others.items() if value]
    if asked and given:
        raise UserError(f"{option}: has no {given[0]}; leave out one of the two")
