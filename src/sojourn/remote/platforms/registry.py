"""The platforms with an API by name, and where the token of each comes from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module

from sojourn.config.messages import did_you_mean
from sojourn.errors import UserError
from sojourn.remote.platforms.base import Cloud
from sojourn.remote.platforms.http_api import Sleep


@dataclass(frozen=True)
class _Entry:
    """`secret`: the token's name in the store of secrets; `console`: where the user makes one."""

    module: str
    class_name: str
    secret: str
    variable: str
    console: str


_CLOUDS = {
    "autodl": _Entry("autodl", "AutoDL", "autodl_token", "SOJOURN_AUTODL_TOKEN", "https://www.autodl.com/console"),
    "runpod": _Entry("runpod", "RunPod", "runpod_api_key", "RUNPOD_API_KEY", "https://console.runpod.io/user/settings"),
    "vast": _Entry("vast", "Vast", "vast_api_key", "VAST_API_KEY", "https://cloud.vast.ai/manage-keys"),
    "lambda": _Entry("lambda_cloud", "LambdaCloud", "lambda_api_key", "LAMBDA_API_KEY", "https://cloud.lambda.ai/api-keys"),
}  # fmt: skip

CLOUD_NAMES = tuple(_CLOUDS)


def open_cloud(name: str, *, base_url: str | None = None, sleep: Sleep | None = None, timeout: float = 30.0) -> Cloud:
    """The platform's client. SOJOURN_NAME_URL (SOJOURN_RUNPOD_URL) takes the place of its address."""
    entry = _entry(name)
    token = token_of(name)
    if not token:
        raise UserError(f"{name}: no token; make one at {entry.console} and set {entry.variable}")
    kind = getattr(import_module(f"sojourn.remote.platforms.{entry.module}"), entry.class_name)
    address = base_url or os.environ.get(f"SOJOURN_{name.upper()}_URL") or None
    cloud: Cloud = kind(token, address, sleep=sleep, timeout=timeout)
    return cloud


def token_of(name: str) -> str | None:
    """From the environment, the keyring or the file of secrets."""
    from sojourn.remote import secrets

    entry = _entry(name)
    found = (secrets.get(entry.secret) or "").strip()
    if not (found.isascii() and found.isprintable()):
        raise UserError(f"{secrets.where(entry.secret)}: not a token: it has characters that no token has")
    return found or None


def with_token() -> list[str]:
    """The platforms that can be asked."""
    return [name for name in _CLOUDS if token_of(name)]


def token_variable(name: str) -> str:
    return _entry(name).variable


def token_hint() -> str:
    """What to type where no platform can be asked."""
    variables = ", ".join(f"{token_variable(name)} ({name})" for name in CLOUD_NAMES)
    return f"no platform's token is known; set one of {variables}, or keep it: sojourn host secret set NAME"


def _entry(name: str) -> _Entry:
    if name not in _CLOUDS:
        raise UserError(
            f"no platform '{name}' with an API{did_you_mean(name, _CLOUDS)}; there are {', '.join(_CLOUDS)}"
        )
    return _CLOUDS[name]
