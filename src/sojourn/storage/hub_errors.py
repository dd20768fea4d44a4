"""Errors of huggingface_hub, which come from many libraries, as one line each, without tokens."""

from __future__ import annotations

import re

from sojourn.config.messages import printable
from sojourn.storage.hub_access import transport_errors

TOKEN = re.compile(r"hf_\w{10,}|Bearer \S+")
LOG_IN = "run: hf auth login (or set HF_TOKEN)"
_CHECK_NETWORK = (
    "check the network, or where the hub is closed: export HF_ENDPOINT=https://hf-mirror.com HF_HUB_DISABLE_XET=1"
)


def describe_hub_error(error: BaseException, doing: str) -> str | None:
    """`doing`: read or write. None for what is no error of the hub."""
    found = _describe(error, doing)
    return TOKEN.sub("…", found) if found is not None else None


def root_error(error: BaseException) -> BaseException:
    """huggingface_hub wraps the cause."""
    from huggingface_hub import errors

    while isinstance(error, (RuntimeError, errors.LocalEntryNotFoundError)) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _describe(error: BaseException, doing: str) -> str | None:
    from huggingface_hub import errors

    error = root_error(error)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"cannot be reached while HF_HUB_OFFLINE is set; run: unset HF_HUB_OFFLINE (to {doing} there)"
    if isinstance(error, errors.HfHubHTTPError):
        status, text = error.response.status_code, printable(error.server_message or "", 150)
        if status in (401, 403):
            return f"not allowed to {doing}{f' ({text})' if text else ''}; {LOG_IN}"
        if isinstance(error, errors.RepositoryNotFoundError):
            return f"no such repository, or it is private to somebody else; check the name, or {LOG_IN}"
        return f"the hub answers HTTP {status}{f' ({text})' if text else ''}; try again later"
    if isinstance(error, errors.LocalTokenNotFoundError):
        return f"not allowed to {doing}; {LOG_IN}"
    if isinstance(error, (ConnectionError, TimeoutError, *transport_errors())):
        return f"cannot be reached ({type(error).__name__}); {_CHECK_NETWORK}"
    if isinstance(error, OSError) and error.errno:
        return f"could not {doing}, because of an error on this machine: {printable(error, 200)}; fix it and try again"
    if isinstance(error, (OSError, ValueError, RuntimeError, KeyError)) or _is_library_error(error):
        return f"could not {doing} there: {printable(error, 200) or type(error).__name__}; try again"
    return None


def _is_library_error(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] in ("huggingface_hub", "hf_xet", "httpx", "httpx2")
