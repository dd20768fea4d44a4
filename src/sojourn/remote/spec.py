"""The job that a box is given: its phases, limits, what to do at the end. `box/supervisor.py` reads it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from sojourn.catalog.platforms import PlatformFacts, platforms
from sojourn.config.load import to_yaml, with_settings
from sojourn.config.quantities import Money
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.remote import secrets
from sojourn.remote.bootstrap import BoxPython
from sojourn.remote.box_client import Box
from sojourn.remote.hosts import Host
from sojourn.remote.job import BoxPaths, Job
from sojourn.remote.portability import Shipment

NOTIFY = ("webhook", "command", "autodl", "serverchan", "bark")
_MIN_FREE = 256 << 20


@dataclass(frozen=True)
class Terms:
    """What `launch` was asked for besides the run: money, time, and what happens at the end. Times are in seconds."""

    budget: Money | None = None
    price: Money | None = None
    deadline: float | None = None
    stop_when_done: bool = False
    notify: tuple[str, ...] = ()
    max_restarts: int = 3
    stall: float = 900.0
    hold: float = 1800.0

    def price_on(self, host: Host) -> Money | None:
        if self.price is not None:
            return self.price
        if host.price_per_hour is None:
            return None
        return Money.parse(f"{host.price_per_hour} {host.currency}".strip())

    def check(self, host: Host) -> None:
        price = self.price_on(host)
        if self.budget is not None and price is None:
            raise UserError(
                f"--budget: the price of {host.name} is not known; give it, such as --price 2.5, or for good: "
                f"sojourn host add {host.name} … --price 2.5 --replace"
            )
        if self.budget is not None and price is not None:
            ours, theirs = self.budget.currency, price.currency
            if ours and theirs and ours != theirs:
                raise UserError(f"--budget: in {ours}, but {host.name} is paid in {theirs}; give it in {theirs}")
        for kind in self.notify:
            if kind not in NOTIFY:
                raise UserError(f"--notify: “{kind[:40]}” given; allowed: {', '.join(NOTIFY)}")
            if secrets.get(f"notify_{kind}") is None:
                raise UserError(
                    f"--notify {kind}: its address or token is not set; type: sojourn host secret set notify_{kind}"
                )


def platform_facts(host: Host) -> PlatformFacts:
    found = {facts.name: facts for facts in platforms()}
    return found.get(host.platform, found["generic"])


def config_for_box(config: RunConfig, job: Job, host: Host, terms: Terms) -> RunConfig:
    """Named, and with its price; the supervisor keeps the budget over all phases, the trainer as a second guard."""
    settings: dict[str, Any] = {"name": job.run}
    price = terms.price_on(host)
    if price is not None and price.amount > 0:
        settings["limits.price_per_hour"] = str(price)
        if terms.budget is not None:
            settings["limits.budget"] = str(terms.budget)
    return with_settings(config, settings)


def make_spec(
    job: Job, host: Host, terms: Terms, python: BoxPython, shipment: Shipment, node: list[str] | None = None
) -> dict[str, Any]:
    """`node`: this box's arguments where several train together; a rehearsal there would wait for the others."""
    paths, facts, price = BoxPaths(host, job.run), platform_facts(host), terms.price_on(host)
    config = f"{paths.job}/run.yaml"
    sojourn = [python.python, "-m", "sojourn"]
    phases: list[dict[str, Any]] = [
        *([] if shipment.artefact else [{"name": "prepare", "argv": [*sojourn, "prepare", config]}]),
        *([] if node else [{"name": "rehearse", "argv": [*sojourn, "rehearse", config]}]),
        {"name": "train", "argv": [*sojourn, "train", config, *(node or ())], "restart": True},
    ]
    command = ["sh", "-c", facts.stop_command] if facts.stop_command else None
    action = "none" if command is None else "release" if facts.stop_releases else "power_off"
    return {
        "version": 1,
        "run": job.run,
        "home": host.home,
        "job": paths.job,
        "run_folder": paths.run_folder,
        "env": {"SOJOURN_HOME": host.home, "PYTHONUNBUFFERED": "1", **python.env},
        "secret_env_files": {},
        "phases": phases,
        "price_per_hour": None if price is None else float(price.amount),
        "currency": price.currency if price is not None else "",
        "budget": None if terms.budget is None else float(terms.budget.amount),
        "spent_before": job.spent_before,
        "seconds_before": job.seconds_before,
        "deadline": None if terms.deadline is None else time.time() + terms.deadline,
        "stall_minutes": terms.stall / 60,
        "min_free_bytes": _MIN_FREE,
        "max_restarts": terms.max_restarts,
        "grace_seconds": 60,
        "hold_minutes": terms.hold / 60,
        "mirror": shipment.config.save.mirror,
        "disks": [asdict(disk) for disk in facts.disks],
        "platform": facts.name,
        "stop": {"when_done": terms.stop_when_done, "action": action, "command": command},
        "notify": [],
    }


def write_job(
    box: Box, job: Job, terms: Terms, shipment: Shipment, python: BoxPython, node: list[str] | None = None
) -> None:
    """Puts run.yaml, the spec and the secrets that this run needs on the box; starts nothing."""
    host, config = box.host, shipment.config
    paths = BoxPaths(host, job.run)
    spec = make_spec(job, host, terms, python, shipment, node)
    box.write_bytes(f"{paths.job}/run.yaml", to_yaml(config_for_box(config, job, host, terms)).encode())
    for kind in terms.notify:
        name = f"secrets/notify-{kind}"
        box.write_bytes(f"{paths.job}/{name}", str(secrets.get(f"notify_{kind}")).encode(), mode=0o600)
        spec["notify"].append({"kind": kind, "secret": name})
    token = secrets.get("hf_token") if _needs_hub(config) else None
    if token is not None:
        box.write_bytes(f"{paths.job}/secrets/hf_token", token.encode(), mode=0o600)
        spec["secret_env_files"]["HF_TOKEN_PATH"] = f"{paths.job}/secrets/hf_token"
    box.write_bytes(f"{paths.job}/spec.json", json.dumps(spec, indent=2).encode())


def _needs_hub(config: RunConfig) -> bool:
    sources = [*config.data.sources, *config.data.eval_sources]
    named = [config.model.base or "", *(source.path for source in sources), config.save.mirror or ""]
    return any(word and not word.startswith(("/", "builtin:")) for word in named)
