"""Whether the hub can be reached, and its libraries' errors as one line each."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from sojourn.catalog.datasets import datasets
from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import RunFailed, UserError

Say = Callable[[str], None]

_OFFLINE_SWITCHES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_USE_MIRROR = "export HF_ENDPOINT=https://hf-mirror.com HF_HUB_DISABLE_XET=1"
_unreachable: dict[str, str] = {}  # endpoints that did not answer, and why; each is probed once per process


def offline_reason(say: Say | None) -> str:
    """Why nothing can be downloaded; empty where the hub can be reached."""
    endpoint = hub_endpoint()
    if endpoint not in _unreachable:
        if switch := offline_switch():
            return f"{switch} is set (unset it to download)"
        if not (problem := _probe(endpoint)):
            return ""
        _unreachable[endpoint] = f"{_host()} cannot be reached ({problem})"
        os.environ["HF_HUB_OFFLINE"] = "1"
        for name in ("huggingface_hub.constants", "datasets.config"):  # these read the variable at import
            if module := sys.modules.get(name):
                module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        if say:
            say(f"{_unreachable[endpoint]}: only the local cache is used")
    return _unreachable[endpoint]


def offline_switch() -> str:
    """The variable by which the user forbids downloads, or an empty string."""
    given = (name for name in _OFFLINE_SWITCHES if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"))
    return next(given, "")


def silence_logging(*libraries: Any) -> None:
    """No log lines (errors are raised anyway), and progress bars only on a terminal."""
    for library in libraries:
        library.logging.set_verbosity(library.logging.CRITICAL)
        if not sys.stderr.isatty():
            library.disable_progress_bars()


@contextmanager
def hub_errors_as_user_errors(name: str, page: str, revision: str | None) -> Iterator[None]:
    """Errors of the hub's libraries as `UserError`, each with what to type."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        user_error = _as_user_error(error, name, page, revision)
        if user_error is None:
            raise
        raise user_error from None


def not_cached_error(what: str, offline: str) -> UserError:
    """For what is neither cached nor downloadable."""
    ways = f"where the hub is slow or blocked {_USE_MIRROR}, or copy its files and give their path"
    advice = f"connect to the network, or {ways}"
    return UserError(f"{what} is not in the local cache and {offline}: {advice}")


def gated_error(name: str, page: str) -> UserError:
    """For a repository whose terms must be accepted first."""
    return UserError(f"{name} is gated: accept its terms on https://huggingface.co/{page}, then export HF_TOKEN=…")


def unreadable_error(name: str, error: BaseException) -> UserError:
    """For files that are not a table."""
    return UserError(f"{name} cannot be read as a table ({printable(error, 200)}): copy its files and give their path")


def hub_endpoint() -> str:
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    if urlsplit(endpoint).scheme not in ("http", "https"):
        raise UserError("HF_ENDPOINT must begin with https://, like https://hf-mirror.com")
    return endpoint


def _host() -> str:
    return urlsplit(hub_endpoint()).netloc.rpartition("@")[2]


def _probe(endpoint: str, seconds: float = 3) -> str:
    """Why the endpoint did not answer, or an empty string. Any HTTP status counts as an answer."""
    import httpx

    outcome: list[str] = []

    def request() -> None:
        try:
            httpx.head(endpoint, timeout=seconds)
            outcome.append("")
        except Exception as error:  # a proxy, resolver or certificate may raise anything
            outcome.append(printable(error, 80) or type(error).__name__)

    # In a thread, because DNS lookups have no timeout.
    thread = Thread(target=request, daemon=True)
    thread.start()
    thread.join(2 * seconds)
    return outcome[0] if outcome else "no answer"


def _as_user_error(error: Exception, name: str, page: str, revision: str | None) -> UserError | None:
    from huggingface_hub import errors

    cached = "or export HF_HUB_OFFLINE=1 to use the local cache"
    if isinstance(error, errors.GatedRepoError):
        return gated_error(name, page)
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{name} has no revision {printable(revision)}; leave it out to use the newest")
    if isinstance(error, errors.RepositoryNotFoundError):
        guess = did_you_mean(name, [row.hub for row in datasets()]) if page != name else ""
        return UserError(f"there is no {page} on {_host()}{guess}; if it is private, export HF_TOKEN=…")
    if isinstance(error, errors.HFValidationError):
        return UserError(f"{printable(name)}: not a repository name; write ORG/NAME")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return UserError(f"{name}: {_host()} rejects the token (HTTP {status}): export HF_TOKEN=…")
        return RunFailed(f"{name}: {_host()} answers HTTP {status}: try again later, {cached}")
    if isinstance(error, (ConnectionError, TimeoutError, errors.LocalEntryNotFoundError, *transport_errors())):
        why = f"the connection to {_host()} broke ({type(error).__name__})"
        return RunFailed(f"{name}: {why}: try again (finished downloads are kept), {cached}")
    if isinstance(error, FileNotFoundError) or type(error).__module__.startswith("datasets."):
        return unreadable_error(name, error.__cause__ or error)
    return RunFailed(f"{name} cannot be downloaded: {printable(error, 200)}") if isinstance(error, OSError) else None


def transport_errors() -> Iterator[type[Exception]]:
    """Of the HTTP client that huggingface_hub uses."""
    for client in ("httpx", "httpx2"):  # which one depends on the library's version
        with suppress(ImportError):
            yield importlib.import_module(client).TransportError
