"""Adds a host: reads the ssh line, makes the first contact, looks at the box, and keeps the record."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

from sojourn.config.quantities import Money
from sojourn.errors import UserError
from sojourn.remote.box_facts import BoxFacts, probe
from sojourn.remote.connection import Connection, ConnectionLost
from sojourn.remote.describe_host import Described, Given, describe
from sojourn.remote.first_contact import PasswordSource, Say, log_in, pinned_host_keys, steps
from sojourn.remote.hosts import Host, check_name, load_hosts, remove_host, save_host, taken
from sojourn.remote.keys import unpin
from sojourn.remote.ssh_config import apply_config
from sojourn.remote.ssh_line import SshLine, parse_ssh_line

_RUNPOD_PROXY = "ssh.runpod.io"
_MAKE_HOME = 'mkdir -p -- "$1" && test -w "$1"'


@dataclass(frozen=True)
class Added:
    """The host, what the probe found, and notes for the user that were not said yet."""

    described: Described
    facts: BoxFacts

    @property
    def host(self) -> Host:
        return self.described.host


_WAITS = (0.5, 2.0, 4.0)  # seconds before another try, where the connection is lost


def add_host(
    name: str,
    line: str,
    passwords: PasswordSource,
    given: Given,
    *,
    replace_old: bool = False,
    accept_new_key: bool = False,
    say: Say = print,
) -> Added:
    """Nothing is kept where any step fails."""
    check_name(name)
    given.check()
    old = load_hosts().get(name)
    if old is not None and not replace_old:
        raise taken(name)
    parsed = apply_config(parse_ssh_line(line))
    for note in parsed.notes:
        say(f"note: {note}")
    host = _host(name, parsed)
    with pinned_host_keys(host, accept_new_key, say):
        for seconds in (*_WAITS, None):
            try:
                added = _look(host, passwords, given, old, say)
                break
            except ConnectionLost as error:
                if seconds is None:
                    raise
                say(f"{error}; trying again")
                time.sleep(seconds)
        save_host(added.described.host, replace=replace_old)
    return added


def _look(host: Host, passwords: PasswordSource, given: Given, old: Host | None, say: Say) -> Added:
    """Logs in, installs our key where needed, and finds out what the box is. May be repeated."""
    host, connection = log_in(host, passwords, say)
    with contextlib.closing(connection):
        facts = probe(connection, given.home or "")
        described = _described(host, facts, given, old)
        _make_home(connection, described.host)
    return Added(described, facts)


def _described(host: Host, facts: BoxFacts, given: Given, old: Host | None) -> Described:
    """The same box added anew keeps its folder, since runs are there, and its price while it has the same GPUs."""
    if old is None or (host.user, host.address, host.port) != (old.user, old.address, old.port):
        return describe(host, facts, given)
    host = replace(host, instance=old.instance)
    given = replace(given, home=given.home or old.home or None)
    found = describe(host, facts, given)
    same = (found.host.platform, found.host.gpu, found.host.gpus) == (old.platform, old.gpu, old.gpus)
    if given.price is None and same and old.price_per_hour not in (None, found.host.price_per_hour):
        found = describe(host, facts, replace(given, price=Money(Decimal(f"{old.price_per_hour:g}"), old.currency)))
    return found


def forget_host(host: Host) -> None:
    """Removes the record, and the pins that no other host needs."""
    remove_host(host.name)
    needed = {place[1:] for other in load_hosts().values() for place in steps(other)}
    for _, address, port in steps(host):
        if (address, port) not in needed:
            unpin(address, port)


def _host(name: str, line: SshLine) -> Host:
    if line.address == _RUNPOD_PROXY:
        raise UserError(
            "the ssh.runpod.io line gives a terminal only, neither commands nor files; copy the line below "
            '"SSH over exposed TCP", like ssh root@1.2.3.4 -p 12345'
        )
    if line.key and not Path(line.key).is_file():
        raise UserError(f"the key {line.key} does not exist; correct -i, or leave it out")
    return Host(
        name=name,
        user=line.user or "root",
        address=line.address,
        port=line.port or 22,
        jump=line.jump,
        config_name=line.config_name,
        transport=line.transport,
        options=line.options,
        key=line.key,
    )


def _make_home(connection: Connection, host: Host) -> None:
    done = connection.run(["sh", "-c", _MAKE_HOME, "sh", host.home], timeout=30)
    if done.code != 0:
        raise UserError(f"{host.name}: {host.home} cannot be written there; give another folder: --home PATH")


def refreshed(host: Host, facts: BoxFacts) -> tuple[Host, list[str]]:
    """The host as the box is now, and what has changed; what the user said stays."""
    now = describe(host, facts, Given(platform=host.platform, home=host.home)).host
    keep_price = host.price_per_hour is not None
    if keep_price:
        now = replace(now, price_per_hour=host.price_per_hour, currency=host.currency)
    changes = []
    for field in ("gpu", "gpus", "python", "price_per_hour"):
        old, new = getattr(host, field), getattr(now, field)
        if old != new and not (field in ("gpu", "gpus") and not facts.gpus):
            changes.append(f"{field.replace('_', ' ')}: {old if old is not None else 'none'} → {new}")
    if not facts.gpus:  # switched to a mode without its GPU, or its driver fails: it is still that box
        now = replace(now, gpu=host.gpu, gpus=host.gpus)
    if facts.platform.is_known and facts.platform.name != host.platform:
        changes.append(
            f"platform: {host.platform} → {facts.platform.name} by {facts.platform.detected_by} (not changed)"
        )
    return now, changes
