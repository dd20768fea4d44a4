"""API keys: who may use the server, and how much.

Keys are in a TOML file that only its owner can read, one table a key, or in the environment (SOJOURN_API_KEY). Only
their SHA-256 is kept in memory, and comparing takes the same time whatever is given.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import importlib
import os
import re
import secrets
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sojourn.errors import UserError

_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ENVIRONMENT = "SOJOURN_API_KEY"
_FEWEST_CHARACTERS = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Quota:
    """None: no limit. `tokens_per_day`: of prompts and answers together, from midnight UTC."""

    requests_per_minute: int | None = None
    concurrency: int | None = None
    tokens_per_day: int | None = None


@dataclass(frozen=True)
class ApiKey:
    """`digest`: SHA-256 of the key. `admin`: may load adapters and checkpoints."""

    name: str
    digest: bytes
    quota: Quota = Quota()
    admin: bool = False


LOCAL = ApiKey("local", b"", admin=True)  # whoever comes without a key to a server that asks for none


class KeyRing:
    """All keys. Without any, everybody on this machine may do everything."""

    def __init__(self, keys: list[ApiKey]) -> None:
        self.keys = keys

    def find(self, authorization: str | None) -> ApiKey | None:
        """Whose header this is; None where it is nobody's."""
        if not self.keys:
            return LOCAL
        digest = _digest(_presented(authorization or ""))
        found = None
        for key in self.keys:  # all of them: the time does not tell which one
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def _presented(authorization: str) -> str:
    """The key of `Bearer KEY`, or of `Basic`, where it is the password: what a browser asks for."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def load_keys(file: Path | None, default: Quota) -> KeyRing:
    """`default`: for what a key's table does not limit."""
    keys = [] if file is None else _read(file, default)
    given = os.environ.get(ENVIRONMENT)
    if given:
        if len(given) < _FEWEST_CHARACTERS:
            raise UserError(f"{ENVIRONMENT}: a key needs at least {_FEWEST_CHARACTERS} characters")
        keys.append(ApiKey("environment", _digest(given), default, admin=True))
    return KeyRing(keys)


def _read(file: Path, default: Quota) -> list[ApiKey]:
    try:
        mode = file.stat().st_mode
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"{file}: no such file; make it with: sojourn serve --new-api-key NAME --api-key-file {file}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    if os.name == "posix" and mode & 0o077:
        raise UserError(f"{file}: others can read it; type: chmod 600 {file}")
    try:
        tables = _toml.loads(text)
    except _toml.TOMLDecodeError as error:
        raise UserError(f"{file}: not valid TOML: {error}") from None
    keys = [_key(file, name, table, default) for name, table in tables.items()]
    if len({key.digest for key in keys}) < len(keys):
        raise UserError(f"{file}: two names have the same key")
    return keys


def _key(file: Path, name: str, table: Any, default: Quota) -> ApiKey:
    where = f"{file}: [{name}]"
    if not isinstance(table, dict):
        raise UserError(f'{file}: {name}: expected a table: [{name}] with key = "…"')
    table = dict(table)
    key, digest, admin = table.pop("key", None), table.pop("sha256", None), table.pop("admin", False)
    if (key is None) == (digest is None):
        raise UserError(f"{where}: give either key or sha256")
    if key is not None and (not isinstance(key, str) or len(key) < _FEWEST_CHARACTERS):
        raise UserError(f"{where}: key: text of at least {_FEWEST_CHARACTERS} characters")
    if digest is not None and not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
        raise UserError(f"{where}: sha256: 64 hexadecimal digits")
    limits = [one.name for one in fields(Quota)]
    for wrong in table.keys() - set(limits):
        raise UserError(f"{where}: unknown: {wrong}; allowed: key, sha256, admin, {', '.join(limits)}")
    if not isinstance(admin, bool) or any(type(value) is not int or value < 1 for value in table.values()):
        raise UserError(f"{where}: limits are whole numbers of 1 or more, admin is true or false")
    return ApiKey(name, _digest(key) if key else bytes.fromhex(str(digest)), replace(default, **table), admin)


def add_key(file: Path, name: str, admin: bool = False) -> str:
    """A new key, of which the file gets the SHA-256."""
    if not _NAME.fullmatch(name):
        raise UserError(f"--new-api-key {name}: letters, digits, - _ . only, at most 64")
    known = _read(file, Quota()) if file.exists() else []
    if name in {key.name for key in known}:
        raise UserError(f"{file}: [{name}] is there already; choose another name, or remove its table")
    key = "sk-" + secrets.token_urlsafe(32)
    table = f'["{name}"]\nsha256 = "{_digest(key).hex()}"\n' + ("admin = true\n" if admin else "")
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "a", encoding="utf-8") as opened:
        opened.write(("\n" if known else "") + table)
    return key
