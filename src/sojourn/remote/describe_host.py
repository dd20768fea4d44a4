"""What a host is (platform, GPUs, price, Python, persistent folder), by its address, the probe and the catalogue."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from sojourn.catalog.gpus import find_gpu
from sojourn.catalog.platforms import PlatformFacts, platforms
from sojourn.catalog.prices import Price, prices_of
from sojourn.config.messages import did_you_mean, printable
from sojourn.config.quantities import Money
from sojourn.errors import UserError
from sojourn.machine.platform import Platform, find_home
from sojourn.remote.box_facts import BoxFacts
from sojourn.remote.hosts import Host

_MIB_PER_GIB = 1024
_OLDEST_PYTHON = (3, 8)  # of the programs that run on the box


@dataclass(frozen=True)
class Given:
    """What the user said about the host; None: find out."""

    platform: str | None = None
    home: str | None = None
    price: Money | None = None

    def check(self) -> None:
        """Before the box is asked anything."""
        names = [row.name for row in platforms()]
        if self.platform is not None and self.platform not in names:
            known = did_you_mean(self.platform, names) or f"; there are: {', '.join(names)}"
            raise UserError(f"no platform called '{printable(self.platform)}'{known}")
        if self.home is not None and not (self.home.startswith(("/", "~/")) and self.home.isprintable()):
            raise UserError(f"--home {printable(self.home)}: give a folder on the box, like /root/data or ~/data")


@dataclass
class Described:
    host: Host
    price: Price | None = None
    notes: list[str] = field(default_factory=list)


def platform_of_address(address: str) -> PlatformFacts | None:
    """By the catalogue's patterns."""
    name = address.lower().rstrip(".")
    return next((row for row in platforms() if any(fnmatchcase(name, pattern) for pattern in row.addresses)), None)


def describe(host: Host, facts: BoxFacts, given: Given) -> Described:
    """The host with what was found; the notes are for the user."""
    found = Described(host)
    row = _platform(found, facts, given)
    gpu, count = _gpus(found, facts)
    usable = (row["path"] for row in facts.pythons if tuple(row["version"]) >= _OLDEST_PYTHON)
    python = next((str(path) for path in usable if str(path).isprintable()), None)
    home = expand_home(given.home, facts) if given.home else _home(found, facts, row)
    amount, currency = _price(found, row, gpu, count, given)
    found.host = replace(
        host,
        platform=row.name,
        home=home,
        price_per_hour=amount,
        currency=currency,
        gpu=gpu,
        gpus=count,
        python=python,
    )
    return found


def _platform(found: Described, facts: BoxFacts, given: Given) -> PlatformFacts:
    """As given; else as the box itself shows it; else by its address."""
    rows = {row.name: row for row in platforms()}
    if given.platform:
        return rows[given.platform]
    by_address, by_probe = platform_of_address(found.host.address), facts.platform
    if not by_probe.is_known:
        if by_address is not None:
            found.notes.append(f"{by_address.title} by its address; nothing on the box itself confirms it")
        return by_address or rows["generic"]
    if by_address is not None and by_address.name != by_probe.name:
        other = f"its address is one of {by_address.title}; if that is right: --platform {by_address.name}"
        found.notes.append(f"{by_probe.facts.title} by {by_probe.detected_by} there, although {other}")
    return by_probe.facts


def _gpus(found: Described, facts: BoxFacts) -> tuple[str | None, int]:
    """The catalogue's name of the GPU, else the driver's, and how many there are."""
    if facts.gpu_error:
        found.notes.append(f"nvidia-smi fails there: {printable(facts.gpu_error, 150)}")
    if not facts.gpus:
        free = (
            " (AutoDL's no-GPU mode? check again after starting it with one)" if found.host.platform == "autodl" else ""
        )
        found.notes.append(f"no GPU is visible there{free}")
        return None, 0
    names = {str(row["name"]) for row in facts.gpus}
    if len(names) > 1:
        found.notes.append(f"different GPUs there: {printable(', '.join(sorted(names)), 200)}; the first one counts")
    first = facts.gpus[0]
    memory = first.get("memory_mib")
    try:
        return find_gpu(str(first["name"]), memory / _MIB_PER_GIB if isinstance(memory, int) else None).name, len(
            facts.gpus
        )
    except UserError:
        return printable(first["name"]), len(facts.gpus)


def expand_home(path: str, facts: BoxFacts) -> str:
    """From the root of the box."""
    if path.startswith("~/"):
        path = facts.found["user_home"].rstrip("/") + path[1:]
    return str(PurePosixPath(path))


def _home(found: Described, facts: BoxFacts, row: PlatformFacts) -> str:
    writable = {disk["path"] for disk in facts.found["disks"] if disk["writable"]}
    home = find_home(Platform(row, "the catalogue"), is_writable=lambda place: place in writable)
    if home.path is not None:
        if home.warning:
            found.notes.append(f"{home.warning}; {home.fix}")
        return home.path.as_posix()
    own = expand_home("~/sojourn", facts)
    why = home.warning or "which folder survives a stop there is not known"
    found.notes.append(f"{why}; runs go to {own}; another folder: --home PATH")
    return own


def _price(found: Described, row: PlatformFacts, gpu: str | None, count: int, given: Given) -> tuple[float | None, str]:
    """Per hour for the whole box."""
    currency = row.currency or ""
    if given.price is not None:
        currency = given.price.currency or currency
        if not currency:
            raise UserError(f"--price {given.price}: say in which currency, like ¥{given.price} or ${given.price}")
        return float(given.price.amount), currency
    found.price = next((price for price in _prices(gpu) if price.platform == row.name), None)
    if found.price is None or found.price.per_hour is None:
        found.notes.append(
            "its price per hour is not known, so a budget cannot be kept; say it: --replace --price ¥2.5"
        )
        return None, currency
    return round(found.price.per_hour / found.price.count * count, 4), found.price.currency


def _prices(gpu: str | None) -> tuple[Price, ...]:
    if gpu is None:
        return ()
    try:
        return prices_of(find_gpu(gpu))
    except UserError:
        return ()
