"""Lets a box go: through the shutdown gate, then by its platform's API or command; else it says where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sojourn.errors import UserError
from sojourn.remote.box_client import Box
from sojourn.remote.gate import Action, check_gate
from sojourn.remote.hosts import get_host
from sojourn.remote.job import runs_on
from sojourn.remote.platforms.registry import CLOUD_NAMES, open_cloud
from sojourn.remote.spec import platform_facts


def release_host(
    name: str, power_off: bool, confirm: Callable[[str], bool], say: Callable[[str], None]
) -> dict[str, Any]:
    host = get_host(name)
    facts = platform_facts(host)
    action: Action = "power_off" if power_off else "release"
    if facts.name == "generic":
        raise UserError(
            f"{name} is a machine of unknown kind: Sojourn never powers it off; "
            f"do it yourself, then: sojourn host remove {name}"
        )
    with Box(host, say=say) as box:
        verdict = check_gate(box, host, runs_on(name), action)
        if verdict is not None:
            raise UserError(f"{name} is kept: {verdict}")
        lost = "powered off" if power_off else "released"
        if not confirm(f"{name} ({facts.title}) is {lost}. What that deletes: {facts.wiped}. Go on?"):
            raise UserError(f"{name} is kept; nothing was changed")
        if host.instance is not None and host.platform in CLOUD_NAMES:
            cloud = open_cloud(host.platform)
            (cloud.stop if power_off else cloud.release)(host.instance)
        elif facts.stop_command and power_off != facts.stop_releases:
            box.run(["sh", "-c", facts.stop_command], timeout=30)
        else:
            raise UserError(f"{facts.title}: only its console can do that ({facts.stop}); everything on {name} is safe")
    say(f"{name} is {lost}")
    return {"host": name, "action": action}
