"""The config.json of a model on the hub, and nothing else of it: from the hub's cache here, our own, or the network."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

from sojourn.catalog.download import DownloadFailed, download_text, host_of
from sojourn.config.messages import printable
from sojourn.errors import RunFailed, UserError
from sojourn.expand_user import expand_user
from sojourn.storage.hub_access import hub_endpoint, offline_switch
from sojourn.storage.hub_cache import cached_snapshot

_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # ORG/NAME
_VALID_SECONDS = 30 * 86400
_FOLDER = "or give a folder with the model's config.json"


def is_hub_name(word: str) -> bool:
    return len(word) < 200 and _ON_HUB.fullmatch(word) is not None


def hub_config(name: str) -> Path:
    """The file; it is fetched where no copy of the last 30 days is here. An older copy counts where nothing answers."""
    if (cached := _in_hub_cache(name)) is not None:
        return cached
    kept = _folder() / name / "config.json"
    if kept.is_file() and time.time() - kept.stat().st_mtime < _VALID_SECONDS:
        return kept
    try:
        text = _fetch(name)
    except UserError:
        if kept.is_file():
            return kept
        raise
    kept.parent.mkdir(parents=True, exist_ok=True)
    written = kept.with_name(f".config.json.{os.getpid()}")
    written.write_text(text, encoding="utf-8")
    written.replace(kept)
    return kept


def _fetch(name: str) -> str:
    missing = f"{printable(name)} is not in the catalogue"
    if switch := offline_switch():
        raise UserError(f"{missing}, and {switch} is set; unset it, {_FOLDER}")
    where = hub_endpoint()
    token = os.environ.get("HF_TOKEN", "").strip()
    headers = {"Authorization": f"Bearer {token}"} if token.isascii() and token.isprintable() and token else {}
    try:
        text = download_text(f"{where}/{name}/resolve/main/config.json", headers)
        json.loads(text)
    except DownloadFailed as error:
        raise _as_user_error(error, name, missing, host_of(where)) from None
    except (ValueError, RecursionError):
        raise RunFailed(f"{missing}, and what {host_of(where)} sends is not its config.json; {_FOLDER}") from None
    return text


def _as_user_error(error: DownloadFailed, name: str, missing: str, host: str) -> UserError:
    if error.status in (401, 403):
        return UserError(
            f"{missing}, and {host} shows it to nobody without a token: check the name, or accept its terms there and "
            "export HF_TOKEN=…"
        )
    if error.status == 404:
        return UserError(
            f"there is no config.json of {printable(name)} on {host}; a GGUF file or an adapter has none: plan the "
            "model it is made from"
        )
    mirror = "" if "mirror" in host else "; where it is slow or blocked: export HF_ENDPOINT=https://hf-mirror.com"
    return RunFailed(f"{missing}, and {host} cannot be reached ({error}){mirror}; {_FOLDER}")


def _in_hub_cache(name: str) -> Path | None:
    """Where huggingface_hub keeps what was downloaded before."""
    snapshot = cached_snapshot(name)
    return snapshot / "config.json" if snapshot and (snapshot / "config.json").is_file() else None


def _folder() -> Path:
    from platformdirs import user_cache_dir

    home = os.environ.get("SOJOURN_HOME")
    return (expand_user(home) if home else Path(user_cache_dir("sojourn", appauthor=False))) / "hub-configs"
