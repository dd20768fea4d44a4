"""Hosts that the user has added: how each is reached, what it is, where its runs live. Kept in hosts.json."""

from __future__ import annotations

import json
import os
import re
import shlex
import typing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.remote.private_files import described, locked, read_object, write_private

_NAME = re.compile(r"\w[\w.-]{0,63}")
_REPAIR = "correct it, or move it away and add your hosts again"


@dataclass(frozen=True)
class Host:
    """`config_name`: its name in ~/.ssh/config. `jump`: an address for each machine on the way (user@address:port,
    nearest first). `transport`: who speaks SSH. `options`: Key=Value for `ssh -o`, with transport openssh only.
    `home`: the folder on the box that persists; runs are in `home`/runs. `instance`: its id at the platform's API."""

    name: str
    user: str
    address: str
    port: int = 22
    jump: tuple[str, ...] = ()
    config_name: str | None = None
    transport: Literal["asyncssh", "openssh"] = "asyncssh"
    options: tuple[str, ...] = ()
    key: str | None = None
    platform: str = "generic"
    home: str = ""
    price_per_hour: float | None = None
    currency: str = ""
    gpu: str | None = None
    gpus: int = 0
    python: str | None = None
    instance: str | None = None

    @property
    def ssh_line(self) -> str:
        """What `sojourn host add` takes."""
        if self.config_name:
            return f"ssh {self.config_name}"
        jump = f" -J {','.join(self.jump)}" if self.jump else ""
        key = f" -i {shlex.quote(self.key)}" if self.key else ""
        options = "".join(f" -o {shlex.quote(option)}" for option in self.options)
        return f"ssh{options}{jump}{key} -p {self.port} {self.user}@{self.address}"


def config_folder() -> Path:
    """Where hosts, keys and secrets are kept: SOJOURN_CONFIG, else the user's configuration folder."""
    from platformdirs import user_config_dir

    given = os.environ.get("SOJOURN_CONFIG")
    return expand_user(given) if given else Path(user_config_dir("sojourn", appauthor=False))


def hosts_file() -> Path:
    return config_folder() / "hosts.json"


def load_hosts() -> dict[str, Host]:
    """Every host by name, in the order in which they were added."""
    path = hosts_file()
    return {name: _host(path, name, row) for name, row in _rows(_read(path), path).items()}


def get_host(name: str) -> Host:
    hosts = load_hosts()
    if name not in hosts:
        raise _unknown(name, hosts)
    return hosts[name]


def save_host(host: Host, *, replace: bool = False) -> None:
    """Adds a host. One with the same name is an error, unless `replace`."""
    check_name(host.name)
    path = hosts_file()
    with locked(path):
        content = _read(path)
        rows = _rows(content, path)
        if host.name in rows and not replace:
            raise taken(host.name)
        write_private(path, _text({**content, "version": 1, "hosts": {**rows, host.name: asdict(host)}}))


def remove_host(name: str) -> None:
    path = hosts_file()
    with locked(path):
        content = _read(path)
        rows = _rows(content, path)
        if name not in rows:
            raise _unknown(name, rows)
        rest = {key: row for key, row in rows.items() if key != name}
        write_private(path, _text({**content, "hosts": rest}))


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"'{printable(name)}' cannot be a host's name: use letters, digits, '.', '-' and '_' (at most 64), "
            "like my4090"
        )


def taken(name: str) -> UserError:
    return UserError(f"there is a host called {name} already; choose another name, or add --replace to change it")


def _unknown(name: str, known: typing.Iterable[str]) -> UserError:
    known = list(known)
    hint = '; add one: sojourn host add NAME "ssh -p PORT USER@ADDRESS"'
    if known:
        hint = did_you_mean(name, known) or f"; yours are {printable(', '.join(known), 200)}"
    return UserError(f"no host called '{printable(name)}'{hint}")


def _read(path: Path) -> dict[str, Any]:
    return read_object(path, _REPAIR)


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _rows(content: dict[str, Any], path: Path) -> dict[str, Any]:
    rows = content.get("hosts", {})
    if not isinstance(rows, dict):
        raise UserError(f"{path}: `hosts` is not an object; {_REPAIR}")
    return rows


def _host(path: Path, name: str, row: Any) -> Host:
    """Keys that a newer version wrote are ignored here, and kept in the file."""
    where = f"{path}: host '{printable(name)}'"
    if not isinstance(row, dict):
        raise UserError(f"{where} is not an object; {_REPAIR}")
    hints = typing.get_type_hints(Host)
    values = {}
    for field in fields(Host):
        if field.name in row:
            values[field.name] = _checked(row[field.name], hints[field.name], f"{where}: `{field.name}`")
    try:
        return Host(**{**values, "name": name})
    except TypeError:
        raise UserError(f"{where}: `user` and `address` are needed; {_REPAIR}") from None


def _checked(value: Any, hint: Any, where: str) -> Any:
    options = typing.get_args(hint) or (hint,)
    if typing.get_origin(hint) is Literal:
        good = value in options
    elif hint == tuple[str, ...]:
        good = isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value)
        value = tuple(value) if good else value
    else:
        allowed = tuple(int if kind is float else kind for kind in options) + options
        good = isinstance(value, allowed) and not isinstance(value, bool)
    if not good:
        raise UserError(f"{where} is {described(value)}, which it cannot be; {_REPAIR}")
    return value
