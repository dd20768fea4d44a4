"""`sojourn host add|list|check|remove`: the machines that runs can be launched on; `sojourn host secret`: tokens."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sojourn.config.quantities import Money
    from sojourn.remote.add_host import Added
    from sojourn.remote.box_facts import BoxFacts
    from sojourn.remote.first_contact import PasswordSource
    from sojourn.remote.hosts import Host

host_app = typer.Typer(help="Rented machines: add one by its ssh line, list, check, remove.", no_args_is_help=True)
secret_app = typer.Typer(
    help="Tokens of platforms and hubs, kept in the OS keyring or a private file.", no_args_is_help=True
)
host_app.add_typer(secret_app, name="secret")

_Name = Annotated[str, typer.Argument(help="Name of a host: see sojourn host list.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@host_app.command("add", context_settings={"ignore_unknown_options": True})
def add(
    name: Annotated[str, typer.Argument(help="What to call it, like my4090.")],
    line: Annotated[
        list[str],
        typer.Argument(
            help='The ssh line as the platform shows it, "ssh -p 12345 root@ADDRESS", or a name of ~/.ssh/config.'
        ),
    ],
    price: Annotated[
        str | None, typer.Option(help="What it costs per hour, like ¥2.5 or $0.4. Default: the catalogue's.")
    ] = None,
    home: Annotated[
        str | None, typer.Option(help="Folder on the box that survives a stop. Default: the platform's.")
    ] = None,
    platform: Annotated[str | None, typer.Option(help="Name of the platform, where it is recognised wrongly.")] = None,
    password_stdin: Annotated[
        bool, typer.Option("--password-stdin", help="Read the password from standard input.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Change the host of that name.")] = False,
    accept_new_key: Annotated[
        bool,
        typer.Option("--accept-new-key", help="Pin the host key that the box shows now, instead of the known one."),
    ] = False,
    json: _Json = False,
) -> None:
    """Add a host: its key is pinned, the password is asked for once, our key is installed, the box is looked at."""
    import shlex

    from sojourn.config.messages import did_you_mean, printable
    from sojourn.errors import UserError
    from sojourn.remote.add_host import add_host
    from sojourn.remote.describe_host import Given

    def say(text: str) -> None:
        print(text, file=sys.stderr if json else sys.stdout, flush=True)

    typed = line[0] if len(line) == 1 else shlex.join(line)  # people forget the quotes
    if len(line) > 1 and " " in line[0].strip():
        known = ["--price", "--home", "--platform", "--password-stdin", "--replace", "--accept-new-key", "--json"]
        raise UserError(f"unexpected after the ssh line: {printable(line[1])}{did_you_mean(line[1], known)}")
    given = Given(platform, home, _money(price))
    passwords = _passwords(password_stdin)
    added = add_host(name, typed, passwords, given, replace_old=replace, accept_new_key=accept_new_key, say=say)
    if json:
        _print_json({**_as_dict(added.host), "notes": added.described.notes})
        return
    for note in added.described.notes:
        print(f"note: {note}")
    print(_summary(added))
    print(f"launch a run there: sojourn launch RUN --on {name}")


@host_app.command("list")
def list_hosts(json: _Json = False) -> None:
    """List the hosts, without asking them anything."""
    from sojourn.remote.hosts import load_hosts

    hosts = list(load_hosts().values())
    if json:
        _print_json([_as_dict(host) for host in hosts])
        return
    if not hosts:
        print('no hosts yet; add one: sojourn host add NAME "ssh -p PORT USER@ADDRESS"')
        return
    from sojourn.cli.runs import _width

    rows = [("NAME", "PLATFORM", "GPU", "PRICE", "ADDRESS", "HOME"), *(_row(host) for host in hosts)]
    widths = [max(_width(row[column]) for row in rows) for column in range(6)]
    for row in rows:
        cells = [cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


@host_app.command("check")
def check(name: _Name, json: _Json = False) -> None:
    """Connect to a host: is it there, what is free, what has changed since it was added."""
    import contextlib
    import time

    from sojourn.config.messages import printable
    from sojourn.remote.add_host import refreshed
    from sojourn.remote.box_facts import probe
    from sojourn.remote.connect import connect
    from sojourn.remote.hosts import get_host, save_host

    host = get_host(name)
    started = time.monotonic()
    with contextlib.closing(connect(host)) as connection:
        answered = time.monotonic() - started
        facts = probe(connection, host.home)
    ahead = facts.found["clock"] - time.time()
    now, changes = refreshed(host, facts)
    if now != host:
        save_host(now, replace=True)
    if json:
        measured = {"connect_seconds": round(answered, 3), "clock_ahead_seconds": round(ahead, 1)}
        _print_json({**_as_dict(now), "changes": changes, **measured, "found": facts.found})
        return
    print(f"{name}: {_where(now)} answers, after {answered:.1f} s")
    for text in _check_lines(now, facts, ahead):
        print(f"  {printable(text, 300)}")
    print("\n".join(f"  changed: {change}" for change in changes) or "  nothing has changed since it was added")


@host_app.command("remove")
def remove(
    name: _Name,
    force: Annotated[bool, typer.Option("--force", help="Also when runs there have no copy here.")] = False,
) -> None:
    """Forget a host: only what is kept here. The box itself goes on, and so does its bill."""
    from sojourn.errors import UserError
    from sojourn.remote.add_host import forget_host
    from sojourn.remote.hosts import get_host
    from sojourn.remote.job import runs_on

    host = get_host(name)
    left = [job.run for job in runs_on(name) if not job.pulled]
    if left and not force:
        raise UserError(
            f"{name} has runs without a copy here: {', '.join(left[:5])}; bring them home: sojourn pull {left[0]}, or "
            "forget them: --force"
        )
    forget_host(host)
    print(f"{name} is forgotten here; the box itself goes on and is billed until you stop it on the platform's page")


@secret_app.command("set")
def set_secret(name: Annotated[str, typer.Argument(help="Like hf_token, autodl_token, runpod_api_key.")]) -> None:
    """Keep a secret; its value is asked for, or read from standard input."""
    from getpass import getpass

    from sojourn.remote import secrets

    value = getpass(f"value of {name} (not shown): ") if sys.stdin.isatty() else sys.stdin.readline()
    print(f"{name} is kept in {secrets.set(name, value)}")


@secret_app.command("delete")
def delete_secret(name: Annotated[str, typer.Argument(help="As it was set.")]) -> None:
    """Remove a secret from the keyring and the file."""
    from sojourn.remote import secrets

    secrets.delete(name)
    print(f"{name} is removed")


def _passwords(from_stdin: bool) -> PasswordSource:
    """The variable is taken out of the environment, so that no child inherits it."""
    import os

    from sojourn.remote.first_contact import PasswordSource

    given = os.environ.pop("SOJOURN_SSH_PASSWORD", None)
    if from_stdin:
        return PasswordSource(lambda _: sys.stdin.readline().rstrip("\r\n"))
    if given is not None:
        return PasswordSource(lambda _: given)
    return PasswordSource(_prompt, tries=3)


def _prompt(text: str) -> str | None:
    if not sys.stdin.isatty():
        return None
    from getpass import getpass

    return getpass(text)


def _money(text: str | None) -> Money | None:
    from sojourn.config.quantities import Money
    from sojourn.errors import UserError

    if text is None:
        return None
    try:
        return Money.parse(text)
    except ValueError as error:
        raise UserError(f"--price {text}: {error}") from None


def _as_dict(host: Host) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(host)


def _print_json(value: object) -> None:
    from json import dumps

    print(dumps(value))


def _where(host: Host) -> str:
    from sojourn.remote.ssh_line import join_address

    return join_address(host.user, host.address, host.port)


def _price(host: Host) -> str:
    from decimal import Decimal

    from sojourn.config.quantities import Money

    if host.price_per_hour is None:
        return "-"
    return f"{Money(Decimal(f'{host.price_per_hour:g}'), host.currency)}/h"


def _gpu(host: Host) -> str:
    if not host.gpu:
        return "-"
    return host.gpu if host.gpus == 1 else f"{host.gpus} x {host.gpu}"


def _row(host: Host) -> tuple[str, str, str, str, str, str]:
    return host.name, host.platform, _gpu(host), _price(host), _where(host), host.home


def _summary(added: Added) -> str:
    from sojourn.catalog.platforms import platforms

    host, price = added.host, added.described.price
    title = next((row.title for row in platforms() if row.name == host.platform), host.platform)
    source = f" ({price.source}, {price.month})" if price else ""
    gpu = "no GPU" if not host.gpu else _gpu(host)
    cost = "price not known" if host.price_per_hour is None else _price(host) + source
    return f"{host.name} is added: {title}, {gpu}, {cost}, runs in {host.home}"


def _check_lines(host: Host, facts: BoxFacts, ahead: float) -> list[str]:
    gib = 1024**3
    lines = []
    for row in facts.gpus:
        total, used = row.get("memory_mib"), row.get("used_mib")
        free = (
            f"{(total - used) / 1024:.1f} of {total / 1024:.1f} GiB free"
            if isinstance(total, int) and isinstance(used, int)
            else ""
        )
        lines.append(f"GPU {row.get('index', 0)}: {row['name']}, {free}".rstrip(", "))
    if not facts.gpus:
        lines.append(f"GPU: {facts.gpu_error or 'none is visible'}")
    if disk := facts.disk(host.home):
        lines.append(f"disk {host.home}: {disk['free'] / gib:.1f} of {disk['size'] / gib:.1f} GiB free")
    else:
        lines.append(f"disk {host.home}: this folder is not there")
    if facts.pythons:
        best = facts.pythons[0]
        torch = best.get("torch") or {}
        with_torch = f"torch {torch['version']}" if torch else "without torch"
        lines.append(f"Python {'.'.join(map(str, best['version']))} ({best['path']}), {with_torch}")
    if abs(ahead) < 5:
        lines.append("clock: as here")
    else:
        lines.append(
            f"clock: {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}; deadlines count by the box's own"
        )
    lines.append(f"sojourn there: {', '.join(facts.found['sojourn']) or 'not installed yet (launch does it)'}")
    if jobs := facts.found["jobs"]:
        lines.append("runs there: " + ", ".join(f"{run} ({job['state']})" for run, job in sorted(jobs.items())))
    return lines
