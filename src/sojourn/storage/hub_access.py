"""Tells whether the hub can be reached, and its errors in one line: so that who brings data need not know how."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from sojourn.catalog.facts import datasets
from sojourn.config.words import closest, shown
from sojourn.errors import RunFailed, UserError

Say = Callable[[str], None]

_OFFLINE_SWITCHES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_MIRROR = "export HF_ENDPOINT=https://hf-mirror.com HF_HUB_DISABLE_XET=1"
_silent: dict[str, str] = {}  # hubs that gave no answer and why: none is asked twice by one process


def offline_reason(say: Say | None) -> str:
    """Why nothing can be fetched, or nothing."""
    endpoint = _endpoint()
    if endpoint not in _silent:
        for name in _OFFLINE_SWITCHES:
            if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
                return f"{name} is set (unset it to download)"
        if not (problem := _probe(endpoint)):
            return ""
        _silent[endpoint] = f"{_host()} cannot be reached ({problem})"
        os.environ["HF_HUB_OFFLINE"] = "1"
        for name in ("huggingface_hub.constants", "datasets.config"):  # which read the variable when imported
            if module := sys.modules.get(name):
                module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        if say:
            say(f"{_silent[endpoint]}: only the local cache is used")
    return _silent[endpoint]


def silence_logging(*libraries: Any) -> None:
    """No log lines, for what fails is raised as well; progress bars only for a person who watches."""
    for library in libraries:
        library.logging.set_verbosity(library.logging.CRITICAL)
        if not sys.stderr.isatty():
            library.disable_progress_bars()


@contextmanager
def hub_errors_as_user_errors(name: str, page: str, revision: str | None) -> Iterator[None]:
    """The libraries' errors as ours, each with what to type."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        told = _told(error, name, page, revision)
        if told is None:
            raise
        raise told from None


def absent(what: str, offline: str) -> UserError:
    """For what can be neither fetched nor found here."""
    ways = (
        f"connect to the network, or where the hub is slow or closed {_MIRROR}, or copy its files and name their path"
    )
    return UserError(f"{what} is not in the local cache and {offline}: {ways}")


def gated(name: str, page: str) -> UserError:
    """For what its owner gives only to those who accept the terms."""
    return UserError(f"{name} is gated: accept its terms on https://huggingface.co/{page}, then export HF_TOKEN=…")


def unreadable(name: str, error: BaseException) -> UserError:
    """For what arrived and is no table."""
    return UserError(f"{name} cannot be read as a table ({shown(error, 200)}): copy its files and name their path")


def _endpoint() -> str:
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    if urlsplit(endpoint).scheme not in ("http", "https"):
        raise UserError("HF_ENDPOINT must begin with https://, like https://hf-mirror.com")
    return endpoint


def _host() -> str:
    return urlsplit(_endpoint()).netloc.rpartition("@")[2]


def _probe(endpoint: str, seconds: float = 3) -> str:
    """What is wrong with the way to the hub, or nothing. Any answer will do: even an error comes from somebody."""
    import httpx

    outcome: list[str] = []

    def knock() -> None:
        try:
            httpx.head(endpoint, timeout=seconds)
            outcome.append("")
        except Exception as error:  # whatever a proxy, a resolver or a certificate may raise, there is no way through
            outcome.append(shown(error, 80) or type(error).__name__)

    # In a thread, because looking up a name knows no time limit.
    thread = Thread(target=knock, daemon=True)
    thread.start()
    thread.join(2 * seconds)
    return outcome[0] if outcome else "no answer"


def _told(error: Exception, name: str, page: str, revision: str | None) -> UserError | None:
    from huggingface_hub import errors

    cached = "or export HF_HUB_OFFLINE=1 to take what the local cache has"
    if isinstance(error, errors.GatedRepoError):
        return gated(name, page)
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{name} has no revision {shown(revision)}; leave it out to take the newest")
    if isinstance(error, errors.RepositoryNotFoundError):
        guess = closest(name, [row.hub for row in datasets()]) if page != name else ""
        return UserError(f"there is no {page} on {_host()}{guess}; if it is private, export HF_TOKEN=…")
    if isinstance(error, errors.HFValidationError):
        return UserError(f"{shown(name)}: not a name on the hub, which is ORG/NAME")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return UserError(f"{name}: {_host()} refuses the token (HTTP {status}): export HF_TOKEN=…")
        return RunFailed(f"{name}: {_host()} answers HTTP {status}: try again later, {cached}")
    if isinstance(error, (ConnectionError, TimeoutError, errors.LocalEntryNotFoundError, *_transport_errors())):
        why = f"the connection to {_host()} broke ({type(error).__name__})"
        return RunFailed(f"{name}: {why}: try again, what has arrived is kept, {cached}")
    if isinstance(error, FileNotFoundError) or type(error).__module__.startswith("datasets."):
        return unreadable(name, error.__cause__ or error)
    return RunFailed(f"{name} cannot be fetched: {shown(error, 200)}") if isinstance(error, OSError) else None


def _transport_errors() -> Iterator[type[Exception]]:
    for client in ("httpx", "httpx2"):  # which one depends on the library's version
        with suppress(ImportError):
            yield importlib.import_module(client).TransportError
