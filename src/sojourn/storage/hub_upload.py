"""Sends a folder to a model repository on the Hugging Face hub: large files first, one by one, then one commit, then a
comparison of what the hub lists with what was sent.

Nobody sees half an upload. A large file that reached the hub is not sent again, nor is one that the repository has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sojourn.errors import RunFailed, UserError
from sojourn.storage.hub_access import silence_logging, transport_errors
from sojourn.storage.hub_errors import describe_hub_error, root_error
from sojourn.storage.hub_files import find_difference
from sojourn.storage.sizes import format_size

Say = Callable[[str], None]
Result = TypeVar("Result")

PAUSES = (2.0, 5.0, 15.0, 30.0)  # seconds before each new attempt
_TRY_AGAIN = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Uploaded:
    """`sent`: files of this call; others were there already."""

    url: str
    commit: str
    private: bool
    sent: tuple[str, ...]


def upload_folder(
    repo: str, files: Mapping[str, Path], digests: Mapping[str, str], private: bool, revision: str | None, say: Say
) -> Uploaded:
    """`files`: by their path in the repository. `digests`: their SHA-256. `revision`: a branch, made where it is not
    there. Raises `RunFailed` or `UserError`."""
    try:
        return _upload(repo, files, digests, private, revision, say)
    except UserError:
        raise
    except ImportError:
        raise UserError("push needs the package huggingface_hub; run: pip install huggingface_hub") from None
    except Exception as error:
        message = describe_hub_error(error, "write")
        if message is None:
            raise
        raise RunFailed(f"{repo}: {message}; files that arrived are not sent again") from None


def _upload(
    repo: str, files: Mapping[str, Path], digests: Mapping[str, str], private: bool, revision: str | None, say: Say
) -> Uploaded:
    from huggingface_hub import CommitOperationAdd, HfApi, utils

    silence_logging(utils)
    api, branch = HfApi(), revision or "main"
    url = str(_patiently(lambda: api.create_repo(repo, private=private, exist_ok=True), say))
    if revision is not None:
        _patiently(lambda: api.create_branch(repo, branch=branch, exist_ok=True), say)
    info = _patiently(lambda: api.repo_info(repo, revision=branch), say)
    if private and not info.private:
        raise UserError(f"{repo} is there already, and public; make it private on its page, or leave out --private")
    there = _patiently(lambda: _rows(api, repo, branch), say)
    missing = [name for name, path in files.items() if find_difference(there, {name: path}, digests) is not None]
    if missing and len(missing) < len(files):
        say(f"{len(files) - len(missing)} of {len(files)} files are there already")
    commit = str(info.sha)
    if missing:
        operations = [CommitOperationAdd(name, str(files[name])) for name in missing]
        for operation in sorted(operations, key=lambda one: -one.upload_info.size):
            size = operation.upload_info.size
            say(f"sending {operation.path_in_repo} ({format_size(size)})")
            _patiently(lambda one=operation: api.preupload_lfs_files(repo, [one], revision=branch), say)  # type: ignore[misc]
        made = _patiently(
            lambda: api.create_commit(
                repo, operations=operations, commit_message="Uploaded by sojourn", revision=branch
            ),
            say,
        )
        commit = str(made.oid)
    difference = find_difference(_patiently(lambda: _rows(api, repo, commit), say), files, digests)
    if difference is not None:
        raise RunFailed(f"{repo}: {difference} after the upload; run the same command again")
    return Uploaded(url, commit, bool(info.private), tuple(missing))


def _rows(api: Any, repo: str, revision: str) -> dict[str, Any]:
    from huggingface_hub.errors import EntryNotFoundError

    try:
        rows = list(api.list_repo_tree(repo, recursive=True, revision=revision))
    except EntryNotFoundError:  # an empty repository
        return {}
    return {row.path: row for row in rows if hasattr(row, "blob_id")}


def _patiently(call: Callable[[], Result], say: Say) -> Result:
    """Again after a pause, where the hub is busy or the connection broke."""
    for pause in PAUSES:
        try:
            return call()
        except Exception as error:
            wait = _wait(root_error(error), pause)
            if wait is None:
                raise
            reason = describe_hub_error(error, "write") or type(error).__name__
            say(f"{reason.partition(';')[0]}; trying again in {wait:.0f} s")
            time.sleep(wait)
    return call()


def _wait(error: BaseException, pause: float) -> float | None:
    """Seconds; None where another attempt cannot help."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        if error.response.status_code not in _TRY_AGAIN:
            return None
        asked = error.response.headers.get("Retry-After", "")
        return min(300.0, max(pause, float(asked))) if asked.isdigit() else pause
    return pause if isinstance(error, (ConnectionError, TimeoutError, *transport_errors())) else None
