"""`sojourn cloud`: rent GPUs through a platform's API: offers, create, start, stop, release, status, balance."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from sojourn.cli.confirm import YesOption, confirm

if TYPE_CHECKING:
    from collections.abc import Callable

    from sojourn.remote.hosts import Host
    from sojourn.remote.platforms.base import Cloud, Instance

cloud_app = typer.Typer(
    help="Rent GPUs by API (autodl, runpod, vast, lambda): offers, create, start, stop, release, status, balance.",
    no_args_is_help=True,
)

_Platform = Annotated[str, typer.Argument(help="autodl, runpod, vast or lambda.")]
_MaybePlatform = Annotated[
    str | None, typer.Argument(help="autodl, runpod, vast or lambda. Default: all whose token is known.")
]
_Id = Annotated[str, typer.Argument(help="The instance's id: see sojourn cloud status.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Gpu = Annotated[str | None, typer.Option("--gpu", help="Only this GPU, like 4090 or A100 80GB.")]
_Count = Annotated[int, typer.Option("--count", min=1, help="GPUs in one machine.")]
_Spot = Annotated[bool, typer.Option("--spot", help="Machines that may be taken back at any time (Vast).")]


@cloud_app.command("offers")
def offers(
    platform: _MaybePlatform = None,
    gpu: _Gpu = None,
    count: _Count = 1,
    spot: _Spot = False,
    every: Annotated[bool, typer.Option("--all", help="Every offer, not the 20 cheapest of each platform.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Let sojourn plan use these prices for a day.")] = False,
    json: _Json = False,
) -> None:
    """List what can be rented now and what it costs, cheapest first."""
    from dataclasses import asdict

    from sojourn.cli.cloud_tables import offer_lines
    from sojourn.errors import UserError
    from sojourn.remote.platforms.market import ask, keep
    from sojourn.remote.platforms.registry import open_cloud

    if save and (count != 1 or spot):
        raise UserError("--save keeps prices of one GPU on demand: leave out --count and --spot")
    market = ask(_platforms(platform), open_cloud, gpu, count, spot)
    if not market.asked:
        raise UserError("; ".join(market.problems))
    for problem in market.problems:
        print(f"note: {problem}", file=sys.stderr)
    saved = keep(market) if save else None
    if json:
        _print_json([asdict(offer) for offer in market.offers])
    else:
        print("\n".join(offer_lines(market.offers, market.asked, gpu, every)))
    if saved is not None:
        path, number = saved
        print(f"{number} prices are in {path}; sojourn plan uses them for 24 hours", file=sys.stderr if json else None)


@cloud_app.command("create")
def create(
    platform: _Platform,
    offer: Annotated[
        str | None, typer.Argument(help="An offer's id. Default: the cheapest that --gpu and --count allow.")
    ] = None,
    gpu: _Gpu = None,
    count: _Count = 1,
    spot: _Spot = False,
    disk: Annotated[
        int, typer.Option("--disk", min=0, help="GB of disk for runs (AutoDL: beyond the 30 it has).")
    ] = 50,
    image: Annotated[str | None, typer.Option("--image", help="The platform's name of an image.")] = None,
    add: Annotated[str | None, typer.Option("--add", metavar="NAME", help="Add it as a host of this name.")] = None,
    yes: YesOption = False,
    json: _Json = False,
) -> None:
    """Rent a machine, wait until SSH answers there, and print its ssh line or add it as a host. It costs money."""
    from dataclasses import asdict

    from sojourn.cli.cloud_tables import describe_offer
    from sojourn.errors import UserError
    from sojourn.remote.keys import our_public_key
    from sojourn.remote.platforms.market import choose
    from sojourn.remote.platforms.registry import open_cloud
    from sojourn.remote.platforms.renting import rent

    def say(text: str) -> None:
        print(text, file=sys.stderr if json else sys.stdout, flush=True)

    if offer is None and gpu is None:
        raise UserError("name an offer or a GPU: sojourn cloud create vast --gpu 4090; see sojourn cloud offers")
    _check_new_host(add)
    cloud = open_cloud(platform)
    chosen = choose(cloud.offers(gpu, count, spot), offer)
    confirm(f"rent {describe_offer(chosen)} on {cloud.title}", "it costs money until you release it", yes)
    made = rent(cloud, chosen, add or "box", disk, image, our_public_key(), say=say)
    host = _add_host(add, made, say) if add else None
    if json:
        _print_json({key: value for key, value in asdict(made).items() if key != "password"} | {"ssh": made.ssh_line})
        return
    if host is not None:
        print(f"launch a run there: sojourn launch RUN --on {host.name}")
        return
    key = " (its password is on the platform's page)" if made.password else ""
    print(f"{cloud.title}: {made.id} is ready: {made.ssh_line}{key}")
    print(f'add it: sojourn host add NAME "{made.ssh_line}"')


@cloud_app.command("start")
def start(platform: _Platform, instance: _Id, yes: YesOption = False) -> None:
    """Start a stopped machine. It costs money again."""
    from sojourn.remote.platforms.registry import open_cloud

    cloud = open_cloud(platform)
    confirm(f"start {instance} on {cloud.title}", "it costs money until you stop or release it", yes)
    cloud.start(instance)
    print(f"{instance} starts; its address may be another one: sojourn cloud status {platform} {instance}")


@cloud_app.command("stop")
def stop(platform: _Platform, instance: _Id, yes: YesOption = False) -> None:
    """Stop a machine, so that its GPU costs nothing; its disk may cost on."""
    from sojourn.remote.platforms.registry import open_cloud
    from sojourn.remote.platforms.still_needed import still_needed

    cloud = open_cloud(platform)
    end(cloud, instance, "stop", still_needed(cloud, "power_off"), yes)


@cloud_app.command("release")
def release(platform: _Platform, instance: _Id, yes: YesOption = False) -> None:
    """Give a machine back, with everything on it. Refused while a run there goes on or has no copy here."""
    from sojourn.remote.platforms.registry import open_cloud
    from sojourn.remote.platforms.still_needed import still_needed

    cloud = open_cloud(platform)
    end(cloud, instance, "release", still_needed(cloud, "release"), yes)


@cloud_app.command("status")
def status(
    platform: _MaybePlatform = None,
    instance: Annotated[str | None, typer.Argument(help="One instance. Default: all.")] = None,
    json: _Json = False,
) -> None:
    """Show your machines on the platforms, also those that are no hosts here."""
    from dataclasses import asdict

    from sojourn.cli.cloud_tables import instance_lines

    answers = _each(platform, lambda cloud: [cloud.status(instance)] if instance else cloud.list_instances())
    found = [one for some in answers.values() for one in some]
    if json:
        _print_json([{**asdict(one), "password": None, "ssh": one.ssh_line} for one in found])
    else:
        print("\n".join(instance_lines(found)) if found else f"no machines on {', '.join(answers)}")


@cloud_app.command("balance")
def balance(platform: _MaybePlatform = None, json: _Json = False) -> None:
    """Show the money left in the accounts."""
    from dataclasses import asdict

    from sojourn.cli.cloud_tables import money

    found = _each(platform, lambda cloud: cloud.balance())
    if json:
        _print_json({name: asdict(one) for name, one in found.items()})
        return
    for name, one in found.items():
        print(f"{name}: {' '.join(part for part in (money(one.amount, one.currency), one.note) if part)}")


def end(
    cloud: Cloud, instance_id: str, action: str, may_release: Callable[[str], str | None], yes: bool = False
) -> None:
    """Stop or release, unless `may_release` gives a reason not to."""
    from sojourn.errors import UserError

    reason = may_release(instance_id)
    if reason is not None:
        raise UserError(
            f"{cloud.title}: {instance_id} is not {'released' if action == 'release' else 'stopped'}: {reason}"
        )
    if action == "stop" and not cloud.can_stop:
        cloud.stop(instance_id)  # says why not
    if cloud.status(instance_id).state == "released":  # a mistyped id is an error: the machine meant would cost on
        raise UserError(f"{cloud.title}: {instance_id} is released already")
    confirm(f"{action} {instance_id} on {cloud.title}", cloud.deletes, yes)
    if action == "stop":
        cloud.stop(instance_id)
        print(f"{instance_id} stops; start it again: sojourn cloud start {cloud.name} {instance_id}")
    else:
        cloud.release(instance_id)
        print(f"{instance_id} is released")


Found = TypeVar("Found")


def _each(named: str | None, call: Callable[[Cloud], Found]) -> dict[str, Found]:
    """What each platform answers; one that does not answer does not hide the others."""
    from sojourn.errors import UserError
    from sojourn.remote.platforms.registry import open_cloud

    found: dict[str, Found] = {}
    problems = []
    for name in _platforms(named):
        try:
            found[name] = call(open_cloud(name))
        except UserError as error:
            problems.append(str(error))
    if not found:
        raise UserError("; ".join(problems))
    for problem in problems:
        print(f"note: {problem}", file=sys.stderr)
    return found


def _platforms(named: str | None) -> list[str]:
    from sojourn.errors import UserError
    from sojourn.remote.platforms.registry import token_hint, with_token

    if named is not None:
        return [named]
    if found := with_token():
        return found
    raise UserError(token_hint())


def _check_new_host(name: str | None) -> None:
    """Before anything costs money."""
    from sojourn.remote.hosts import check_name, load_hosts, taken

    if name is None:
        return
    check_name(name)
    if name in load_hosts():
        raise taken(name)


def _add_host(name: str, made: Instance, say: Callable[[str], None]) -> Host:
    """The platform's own price counts, and the instance's id is kept with the host."""
    from dataclasses import replace
    from decimal import Decimal

    from sojourn.config.quantities import Money
    from sojourn.errors import UserError
    from sojourn.remote.add_host import add_host
    from sojourn.remote.describe_host import Given
    from sojourn.remote.first_contact import PasswordSource
    from sojourn.remote.hosts import save_host

    per_hour = made.price_per_hour
    price = Money(Decimal(f"{per_hour:g}"), made.currency) if per_hour is not None else None
    line = made.ssh_line or ""
    try:
        given = Given(made.platform, None, price)
        added = add_host(name, line, PasswordSource(lambda _: made.password), given, say=say)
    except UserError as error:
        release = f"sojourn cloud release {made.platform} {made.id}"
        raise UserError(
            f'{error}; it still exists: add it with sojourn host add {name} "{line}", or {release}'
        ) from None
    host = replace(added.host, instance=made.id)
    save_host(host, replace=True)
    say(f"{name} is added: {line}")
    return host


def _print_json(value: object) -> None:
    from sojourn.run.output import print_json

    print_json(value)
