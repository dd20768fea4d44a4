"""One interface to the platforms that rent GPUs by API: offers, instances, what can go wrong with an account."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from sojourn.catalog.gpus import find_gpu
from sojourn.errors import UserError

State = Literal["creating", "running", "stopping", "stopped", "released", "failed", "unknown"]
Say = Callable[[str], None]


class WrongToken(UserError):
    """The platform does not accept the token."""


class OutOfStock(UserError):
    """Nobody can rent this there now; another offer may do."""


class AccountBlocked(UserError):
    """The account may not rent: identity not verified, quota used up, no money."""


class NotFound(UserError):
    """The platform has no such instance."""


@dataclass(frozen=True)
class Offer:
    """What can be rented. `id` is the platform's own word for it; `available`: None where the platform does not say.

    `price_per_hour` is for all `count` GPUs; None where the platform tells the price only of a running instance.
    """

    platform: str
    id: str
    gpu: str
    count: int
    price_per_hour: float | None
    currency: str
    region: str = ""
    spot: bool = False
    available: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Instance:
    """A rented machine. `message`: the platform's own word for the state, or why it failed."""

    platform: str
    id: str
    name: str
    state: State
    user: str = "root"
    address: str | None = None
    port: int = 22
    password: str | None = field(default=None, repr=False)
    price_per_hour: float | None = None
    currency: str = ""
    gpu: str | None = None
    count: int = 0
    message: str = ""

    @property
    def ssh_line(self) -> str | None:
        return f"ssh -p {self.port} {self.user}@{self.address}" if self.address else None


@dataclass(frozen=True)
class Balance:
    """`note`: what is not in `amount`, such as vouchers. `amount` is None where the platform's API does not tell it."""

    amount: float | None
    currency: str
    note: str = ""


class Cloud(Protocol):
    """A platform with an API. `deletes` says what stop and release delete: shown before either happens."""

    name: str
    title: str
    currency: str
    deletes: str
    can_stop: bool

    def offers(self, gpu: str | None = None, count: int = 1, spot: bool = False) -> list[Offer]:
        """`spot`: only those that the platform may take back at any time."""

    def create(
        self, offer: Offer, name: str, disk_gb: int, image: str | None = None, public_key: str | None = None
    ) -> Instance:
        """Rents `offer` once, under `name`, which nothing else there may have: it is how an instance is found again
        when the answer to the request was lost. `public_key` may log in."""

    def start(self, instance_id: str) -> None: ...

    def stop(self, instance_id: str) -> None: ...

    def release(self, instance_id: str) -> None:
        """For good, with its disks. An instance that is gone already is no error."""

    def status(self, instance_id: str) -> Instance: ...

    def balance(self) -> Balance: ...

    def list_instances(self) -> list[Instance]: ...


def catalogue_name(name: str, memory_gib: float | None = None) -> str:
    """The catalogue's name of a GPU, so that offers and plans mean the same card; the platform's where it has none."""
    name = re.sub(r"\b(\d+) (GB|GiB)\b", r"\1\2", name)
    with suppress(UserError):
        return find_gpu(name, memory_gib).name
    with suppress(UserError):
        return find_gpu(f"{name} {memory_gib:.0f}GB" if memory_gib else name).name
    return name


def is_named(gpu: str, wanted: str | None) -> bool:
    """Whether the user's word means this card: "4090" is the RTX 4090, but not the RTX 4090D."""
    if wanted is None or wanted.casefold() == gpu.casefold():
        return True
    with suppress(UserError):
        return find_gpu(wanted).name == gpu
    return wanted.casefold().replace(" ", "") in gpu.casefold().replace(" ", "").replace("-", "")


def wrong_token(title: str, console: str, variable: str) -> WrongToken:
    return WrongToken(f"{title} does not accept the token; make one at {console} and give it as {variable}")


def as_number(value: Any) -> float:
    """0 for whatever is no number. A platform's answer may have anything anywhere."""
    found = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
    return float(value) if found else 0.0


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_dicts(value: Any) -> list[dict[str, Any]]:
    """The objects of a list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def as_text(value: Any) -> str:
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""


def as_port(value: Any) -> int:
    text = as_text(value)
    return int(text) if text.isascii() and text.isdigit() and 0 < int(text) < 65536 else 22
