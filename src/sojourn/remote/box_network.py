"""Where a box gets packages and models from: what answers fastest there, measured with one small page each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sojourn.catalog.platforms import PlatformFacts

PYPI = "https://pypi.org/simple"
HUB = "https://huggingface.co"
OWN = "own"  # the index of the box's own pip configuration, whose URL may carry a password and stays there
_OWN_BONUS = 0.8
_SLOW_HUB = 1.0
_MUCH_FASTER = 3.0


@dataclass(frozen=True)
class Network:
    """`indexes`: those that answer, the fastest first; none without internet. `env`: what a job there needs."""

    indexes: tuple[str, ...]
    env: dict[str, str]
    message: str
    warning: str | None = None


def to_measure(facts: PlatformFacts, seconds: float = 3.0) -> dict[str, Any]:
    """What box/install.py should time."""
    return {"indexes": [*facts.package_indexes, PYPI], "hubs": [HUB, *facts.hf_mirrors], "seconds": seconds}


def choose(measured: Mapping[str, Any]) -> Network:
    answered = {url: seconds for url, seconds in measured["indexes"].items() if seconds is not None}
    # The box's own configuration also has certificates and extra indexes: it wins when about as fast.
    ranked = sorted(answered, key=lambda url: answered[url] * (_OWN_BONUS if url == OWN else 1))
    shown = [f"{_host(url, measured)} {answered[url]:.1f} s" for url in ranked]
    closed = [_host(url, measured) for url in measured["indexes"] if url not in answered]
    message = "packages from " + ", ".join(shown) if shown else "no package index answers"
    message += f" (no answer: {', '.join(closed)})" if shown and closed else ""
    env, hub, warning = _choose_hub(measured)
    return Network(tuple(ranked), env, f"{message}; {f'models from {hub}' if hub else 'no model hub answers'}", warning)


def _choose_hub(measured: Mapping[str, Any]) -> tuple[dict[str, str], str | None, str | None]:
    """The variables that huggingface_hub reads when it is imported, the hub's name, and a warning."""
    given, seconds = measured["hf_endpoint"], measured["hubs"]
    if given:
        return _endpoint(given), given.rpartition("//")[2], None
    mirrors = {url: time for url, time in seconds.items() if url != HUB and time is not None}
    best = min(mirrors, key=lambda url: mirrors[url], default=None)
    main = seconds.get(HUB)
    if main is not None and (best is None or main <= _SLOW_HUB or main <= _MUCH_FASTER * mirrors[best]):
        return {}, "huggingface.co", None
    if best is not None:
        return _endpoint(best), best.rpartition("//")[2], None
    return {}, None, "no model hub answers from the box: models have to travel from here"


def _endpoint(url: str) -> dict[str, str]:
    """Mirrors do not have the Xet storage that newer clients ask for."""
    env = {"HF_ENDPOINT": url}
    return env if "huggingface.co" in url else {**env, "HF_HUB_DISABLE_XET": "1"}


def _host(url: str, measured: Mapping[str, Any]) -> str:
    return f"{measured['own_host']} (its own)" if url == OWN else url.partition("//")[2].partition("/")[0]
