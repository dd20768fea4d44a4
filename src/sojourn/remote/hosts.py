"""Hosts that the user has added: how each is reached, what it is, where its runs live."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Host:
    """`config_name`: its name in ~/.ssh/config. `jump`: an ssh line for each machine on the way. `transport`: who
    speaks SSH. `home`: the folder on the box that persists; runs are in `home`/runs. `instance`: its id at the
    platform's API."""

    name: str
    user: str
    address: str
    port: int = 22
    jump: tuple[str, ...] = ()
    config_name: str | None = None
    transport: Literal["asyncssh", "openssh"] = "asyncssh"
    key: str | None = None
    platform: str = "generic"
    home: str = ""
    price_per_hour: float | None = None
    currency: str = ""
    gpu: str | None = None
    gpus: int = 0
    python: str | None = None
    instance: str | None = None


def config_folder() -> Path:
    """Where hosts, keys and secrets are kept: SOJOURN_CONFIG, else the user's configuration folder."""
    from platformdirs import user_config_dir

    given = os.environ.get("SOJOURN_CONFIG")
    return Path(given).expanduser() if given else Path(user_config_dir("sojourn", appauthor=False))
