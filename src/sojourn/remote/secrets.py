"""Tokens and passwords: environment, else the OS keyring, else secrets.json (mode 0600); and their removal from texts.

A secret's name is like `hf_token`; in the environment it is SOJOURN_HF_TOKEN, else HF_TOKEN. Values never go into
command lines, logs or run folders: what is printed or logged goes through `redact`.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sojourn.config.messages import printable
from sojourn.errors import UserError
from sojourn.remote.hosts import config_folder
from sojourn.remote.private_files import locked, read_object, refuse_if_others_can_read, write_private

_SERVICE = "sojourn"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SECRET_VARIABLE = re.compile(r"(TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_KEY|SENDKEY|WEBHOOK)(_ID|_URL)?$")
_LEAST_LENGTH = 6  # of a value of the environment: shorter ones are words such as "true"
_REPAIR = "correct it, or move it away and set your secrets again"
_seen: builtins.set[str] = builtins.set()  # values that passed through this process


def secrets_file() -> Path:
    return config_folder() / "secrets.json"


def get(name: str) -> str | None:
    """The secret, or None where there is none. Raises UserError where its file can be read by others."""
    name = _checked(name)
    for variable in variables(name):
        if value := os.environ.get(variable):
            return remember(value)
    if value := _from_keyring(name):
        return remember(value)
    value = _read_file().get(name)
    return remember(value) if isinstance(value, str) and value else None


def where(name: str) -> str | None:
    """Where `get` finds it, for messages."""
    name = _checked(name)
    if found := next((variable for variable in variables(name) if os.environ.get(variable)), None):
        return f"the variable {found}"
    if _from_keyring(name):
        return "the OS keyring"
    return str(secrets_file()) if _read_file().get(name) else None


def set(name: str, value: str) -> str:
    """Keeps it in the OS keyring, else in the file; returns which."""
    name = _checked(name)
    value = value.strip()
    if not value or not value.isprintable():
        raise UserError(f"the secret {name} is empty or has characters that cannot be printed; nothing was kept")
    remember(value)
    if (keyring := _keyring()) is not None:
        with contextlib.suppress(Exception):  # a locked or read-only keyring: the file is the other way
            keyring.set_password(_SERVICE, name, value)
            if keyring.get_password(_SERVICE, name) == value:
                _change_file(name, None)
                return "the OS keyring"
    _change_file(name, value)
    return str(secrets_file())


def delete(name: str) -> None:
    """From the keyring and the file."""
    name = _checked(name)
    found = name in _read_file()
    if (keyring := _keyring()) is not None and _from_keyring(name):
        keyring.delete_password(_SERVICE, name)
        found = True
    _change_file(name, None)
    if not found:
        raise UserError(f"there is no secret called {name}{_in_environment(name)}")


def variables(name: str) -> tuple[str, ...]:
    """The environment variables that give this secret, in order."""
    upper = name.upper()
    return (upper,) if upper.startswith("SOJOURN_") else (f"SOJOURN_{upper}", upper)


def remember(value: str) -> str:
    """Notes a value, so that `redact` removes it."""
    _seen.add(value)
    return value


def redact(text: str) -> str:
    """The text with every known secret replaced, also where it is quoted for a URL or JSON, or in base64."""
    spellings = {spelling for value in _known_values() for spelling in _spellings(value)}
    for spelling in sorted(spellings, key=len, reverse=True):
        text = text.replace(spelling, "[secret]")
    return text


def _known_values() -> builtins.set[str]:
    values = {value for value in _seen if value}
    for variable, value in os.environ.items():
        if len(value) >= _LEAST_LENGTH and _SECRET_VARIABLE.search(variable.upper()):
            values.add(value)
    with contextlib.suppress(UserError, OSError):  # redacting must work whatever the file is like
        values |= {value for value in read_object(secrets_file(), _REPAIR).values() if isinstance(value, str) and value}
    return values


def _spellings(value: str) -> builtins.set[str]:
    encoded = base64.b64encode(value.encode(errors="surrogateescape")).decode()
    return {value, quote(value, safe=""), json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], encoded}


def _checked(name: str) -> str:
    plain = name.strip().lower().replace("-", "_")
    if not _NAME.fullmatch(plain):
        raise UserError(f"'{printable(name)}' cannot be a secret's name: use letters, digits and '_', like hf_token")
    return plain


def _in_environment(name: str) -> str:
    found = next((variable for variable in variables(name) if os.environ.get(variable)), None)
    return f"; it comes from the variable {found}: unset {found}" if found else ""


def _read_file() -> dict[str, Any]:
    path = secrets_file()
    refuse_if_others_can_read(path)
    return read_object(path, _REPAIR)


def _change_file(name: str, value: str | None) -> None:
    path = secrets_file()
    if value is None and not path.exists():
        return
    with locked(path):
        content = {key: kept for key, kept in _read_file().items() if key != name}
        if value is not None:
            content[name] = value
        write_private(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _keyring() -> Any:
    """The keyring package where it is installed and has a place to keep things; else None."""
    try:
        import keyring
        from keyring.backends import fail, null

        backend = keyring.get_keyring()
        unusable = (fail.Keyring, null.Keyring)
        return None if isinstance(backend, unusable) or backend.priority <= 0 else keyring
    except Exception:  # not installed, or its backends fail to load: the file is the other way
        return None


def _from_keyring(name: str) -> str | None:
    keyring = _keyring()
    if keyring is None:
        return None
    try:
        value = keyring.get_password(_SERVICE, name)
    except Exception:  # locked, or no desktop session
        return None
    return str(value) if value else None
