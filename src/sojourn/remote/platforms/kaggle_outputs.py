"""Outputs of a Kaggle session: what it listed at its end, and its files, verified, resumable at the byte."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from sojourn.errors import RunFailed
from sojourn.remote.box.kaggle_boot import RESULT
from sojourn.remote.platforms.kaggle_api import KaggleApi
from sojourn.remote.portability import Say
from sojourn.storage.files import NotValid, parse_json, sha256

_TRIES = 6
_MOST_RESULT = 64 << 20


def read_result(api: KaggleApi, kernel: str) -> dict[str, Any]:
    """What the session wrote at its end; empty where it did not get there."""
    for file in api.outputs(kernel):
        if file.name == RESULT:
            try:
                found = parse_json(_fetch(file.url))
            except NotValid:
                return {}
            return found if isinstance(found, dict) else {}
    return {}


def download_outputs(api: KaggleApi, kernel: str, run: str, folder: Path, say: Say) -> None:
    """The run's files to `folder`. Each appears under its name when it is whole and has the listed SHA-256."""
    listed = read_result(api, kernel).get("files")
    if not isinstance(listed, dict) or not listed:
        raise RunFailed(f"Kaggle: {kernel} has no list of its files: the session did not end by itself; see its log")
    addresses = {file.name: file.url for file in api.outputs(kernel)}
    missing = [name for name in listed if name not in addresses]
    if missing:
        raise RunFailed(f"Kaggle: {len(missing)} outputs of {kernel} are missing, such as {missing[0]}")
    prefix = f"runs/{run}/"
    for name, facts in sorted(listed.items()):
        below = PurePosixPath(name.removeprefix(prefix))
        if not name.startswith(prefix) or below.is_absolute() or ".." in below.parts or not isinstance(facts, dict):
            raise RunFailed(f"Kaggle: {kernel} lists {name!r}, which is not a file of {run}")
        _download(addresses[name], folder / below, int(facts["size"]), str(facts["sha256"]))
    say(f"{len(listed)} files of {run} are in {folder}, verified")


def _download(url: str, target: Path, size: int, digest: str) -> None:
    if target.is_file() and target.stat().st_size == size and sha256(target) == digest:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    for _ in range(_TRIES):
        if part.exists() and part.stat().st_size > size:
            part.unlink()
        _append(url, part)
        if part.stat().st_size == size:
            if sha256(part) == digest:
                part.replace(target)
                return
            part.unlink()  # damaged on the way: from the start
    raise RunFailed(f"Kaggle: {target.name} did not arrive whole in {_TRIES} tries; run the same command again")


def _append(url: str, part: Path) -> None:
    """Continues at the end of what is there; a broken connection leaves what has arrived."""
    import httpx

    at = part.stat().st_size if part.exists() else 0
    try:
        with httpx.stream("GET", url, headers={"Range": f"bytes={at}-"} if at else {}, timeout=60.0) as answer:
            if answer.status_code not in (200, 206):
                return
            with part.open("ab" if answer.status_code == 206 else "wb") as file:
                for block in answer.iter_bytes(1 << 20):
                    file.write(block)
    except httpx.HTTPError:
        part.touch()


def _fetch(url: str) -> bytes:
    import httpx

    for attempt in range(_TRIES):
        try:
            answer = httpx.get(url, timeout=60.0)
            if answer.status_code == 200:
                return answer.content[:_MOST_RESULT]
        except httpx.HTTPError:
            pass
        if attempt == _TRIES - 1:
            break
    raise RunFailed("Kaggle: the result of the session cannot be downloaded; try again")
