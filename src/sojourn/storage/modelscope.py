"""Models on ModelScope, through its own package."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sojourn.config.messages import printable
from sojourn.errors import RunFailed, UserError
from sojourn.storage.hub_upload import Uploaded

Say = Callable[[str], None]

TOKEN_VARIABLE = "MODELSCOPE_API_TOKEN"  # noqa: S105
_INSTALL = "ModelScope needs its own package; run: pip install modelscope"


def upload_to_modelscope(
    repo: str, folder: Path, files: Mapping[str, Path], digests: Mapping[str, str], private: bool,
    revision: str | None, say: Say,
) -> Uploaded:  # fmt: skip
    """The package itself skips what is there already, and goes on after an interruption."""
    api = _api()
    say(f"sending {len(files)} files to {repo} on ModelScope")
    try:
        if not api.repo_exists(repo, "model"):
            api.create_repo(repo, "model", visibility="private" if private else "public")
        api.upload_folder(
            repo, "model", folder, commit_message="Uploaded by sojourn", revision=revision,
            allow_patterns=list(files), disable_tqdm=True,
        )  # fmt: skip
        rows = {row.path: row for row in api.list_repo_files(repo, "model", revision=revision)}
    except Exception as error:
        raise _failed(repo, error) from None
    for name, path in files.items():
        row = rows.get(name)
        if row is None or row.size != path.stat().st_size or (row.sha256 and row.sha256 != digests[name]):
            raise RunFailed(f"{repo}: {name} is {'different' if row else 'missing'} after the upload; run it again")
    return Uploaded(f"https://www.modelscope.cn/models/{repo}", "", private, tuple(files))


def download_from_modelscope(repo: str, revision: str | None, patterns: list[str], into: Path) -> None:
    try:
        from modelscope import snapshot_download
    except ImportError:
        raise UserError(_INSTALL) from None
    try:
        snapshot_download(repo, revision=revision, allow_patterns=patterns, local_dir=str(into), token=_token())
    except Exception as error:
        raise _failed(repo, error) from None


def _api() -> Any:
    try:
        from modelscope_hub.api import HubApi
    except ImportError:
        raise UserError(_INSTALL) from None
    return HubApi(token=_token())


def _token() -> str | None:
    """None: the package then takes that of its own login."""
    return os.environ.get(TOKEN_VARIABLE) or None


def _failed(repo: str, error: Exception) -> RunFailed:
    text = printable(" ".join(str(error).split()), 200)
    token = _token()
    return RunFailed(
        f"{repo}: ModelScope answers: {text.replace(token, '…') if token else text}; check {TOKEN_VARIABLE} and the "
        "name, then run the same command again"
    )
