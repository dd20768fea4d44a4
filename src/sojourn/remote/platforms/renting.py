"""Rent exactly one machine, and wait until its SSH server answers."""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from sojourn.errors import UserError
from sojourn.remote.platforms.base import Cloud, Instance, NotFound, Offer, Say
from sojourn.remote.platforms.http_api import ApiError, HttpApi, OutcomeUnknown, Sleep

_LOOKS = (1.0, 3.0, 6.0, 10.0, 15.0)  # seconds before each look for an instance whose order had no answer
_POLL = 5.0
_TRANSIENT = {0, 429, 500, 502, 503, 504}


def unique_name(wanted: str) -> str:
    """A name that no other instance of the account has, from what the user typed."""
    plain = re.sub(r"[^a-z0-9-]+", "-", wanted.lower()).strip("-")[:40] or "box"
    return f"sojourn-{plain}-{secrets.token_hex(4)}"


def create_once(api: HttpApi, name: str, order: Callable[[], str], list_instances: Callable[[], list[Instance]]) -> str:
    """The id of the one instance that carries `name`.

    When the answer is lost, the order may have been carried out: the instance is looked for by its name, for longer
    than a platform takes to list it, before the order is given again; and there is one second order at most.
    """
    for last in (False, True):
        try:
            made = order()
        except OutcomeUnknown as error:
            if (found := _look_for(api, name, list_instances)) is not None:
                return found
            if last:
                hint = f"no instance called {name} is listed; look at the console before you create another one"
                raise UserError(f"{error}; {hint}") from None
        else:
            if last:
                _refuse_twins(name, made, list_instances)
            return made
    raise AssertionError("unreachable")


def _refuse_twins(name: str, made: str, list_instances: Callable[[], list[Instance]]) -> None:
    """The first order may have been carried out after we had looked for it."""
    others = [one for one in list_instances() if one.name == name and one.id != made and one.state != "released"]
    if others:
        raise UserError(
            f"{name} was created twice, as {made} and as {others[0].id}, since the platform did not answer in time; "
            f"release one of them: sojourn cloud release {others[0].platform} {others[0].id}"
        )


def _look_for(api: HttpApi, name: str, list_instances: Callable[[], list[Instance]]) -> str | None:
    problem: ApiError | None = None
    for seconds in _LOOKS:
        api.sleep(seconds)
        try:
            mine = [one for one in list_instances() if one.name == name and one.state != "released"]
        except ApiError as error:
            problem = error
            continue
        problem = None
        if mine:
            return mine[0].id
    if problem is not None:  # without a list, a second order could be a second machine
        raise UserError(
            f"{problem}; an instance called {name} may have been created: look at the console before you try again"
        )
    return None


def rent(
    cloud: Cloud,
    offer: Offer,
    name: str,
    disk_gb: int,
    image: str | None,
    public_key: str | None,
    *,
    say: Say,
    sleep: Sleep | None = None,
    patience: float = 1200.0,
    answers: Callable[[str, int], bool] | None = None,
) -> Instance:
    """A machine whose SSH server answers. From the order on it costs money, so each way out names how to release it."""
    own = unique_name(name)
    try:
        made = cloud.create(offer, own, disk_gb, image, public_key)
    except KeyboardInterrupt:
        say(f"{own} may have been created, and would cost money: see sojourn cloud status {cloud.name}")
        raise
    release = f"sojourn cloud release {cloud.name} {made.id}"
    say(f"{cloud.title}: created {made.id} ({made.name}); it costs money from now on; to end it: {release}")
    try:
        return wait_until_ready(
            cloud,
            made,
            say=say,
            sleep=time.sleep if sleep is None else sleep,
            patience=patience,
            answers=answers or ssh_answers,
        )
    except UserError as error:
        raise UserError(f"{error}; it still exists: {release}") from None
    except KeyboardInterrupt:
        say(f"{made.id} still exists and costs money; to end it: {release}")
        raise


def wait_until_ready(
    cloud: Cloud,
    made: Instance,
    *,
    say: Say,
    sleep: Sleep,
    patience: float,
    answers: Callable[[str, int], bool],
) -> Instance:
    waited, said, now, problem = 0.0, "", made, ""
    while waited <= patience:
        try:
            now, problem = cloud.status(made.id), ""
        except NotFound as error:
            problem = str(error)  # a platform may list a new instance late
        except ApiError as error:
            if error.status not in _TRANSIENT:
                raise
            problem = str(error)
        if now.state in ("failed", "released", "stopped") and not problem:
            raise UserError(f"{cloud.title}: {made.id} is {now.message or now.state} and will not start by itself")
        if now.state == "running" and now.address and answers(now.address, now.port):
            return replace(
                now, name=now.name or made.name, gpu=now.gpu or made.gpu, count=now.count or made.count,
                price_per_hour=now.price_per_hour or made.price_per_hour,
            )  # fmt: skip
        state = "running, SSH does not answer yet" if now.state == "running" else now.message or now.state
        if state != said:
            say(f"{made.id}: {state}")
            said = state
        sleep(_POLL)
        waited += _POLL
    raise UserError(problem or f"{cloud.title}: {made.id} was not ready after {patience / 60:.0f} minutes ({said})")


def ssh_answers(address: str, port: int, timeout: float = 5.0) -> bool:
    """Whether an SSH server greets there; a forwarded port can be open long before one does."""
    try:
        with socket.create_connection((address, port), timeout=timeout) as link:
            link.settimeout(timeout)
            return link.recv(4).startswith(b"SSH-")
    except OSError:
        return False
