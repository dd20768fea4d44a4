"""A mirror in a private repository on the hub: one commit for each entry, so that half an upload is never seen, and
the hub's own hashes compared with ours before it counts as copied."""

from __future__ import annotations

import hashlib
import importlib
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sojourn.config.words import shown
from sojourn.errors import UserError
from sojourn.storage import disk
from sojourn.storage.files import sha256
from sojourn.storage.mirror import (
    SEAL,
    Facts,
    MirrorFailed,
    absent,
    check_manifest,
    check_same,
    files_in,
    read_seal,
    seal_of,
)
from sojourn.storage.path_mirror import check_free_space, replace
from sojourn.storage.stage import staged

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_TOKEN = re.compile(r"hf_\w{10,}|Bearer \S+")
_LOG_IN = "run: hf auth login (or set HF_TOKEN)"
_NO_WAY = "check the network, or where the hub is closed: export HF_ENDPOINT=https://hf-mirror.com HF_HUB_DISABLE_XET=1"


@dataclass
class HubMirror:
    """`repo` is USER/REPOSITORY, made on first use; every run has a folder of its own in it."""

    repo: str
    run_name: str
    _made: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.repo):
            raise UserError(f"hub:{shown(self.repo)}: not a repository's name; write save.mirror=hub:USER/REPOSITORY")

    @property
    def where(self) -> str:
        return f"the hub repository {self.repo}"

    def put(self, folder: Path, name: str) -> None:
        base = self._at(name)
        with self._told("write"):
            facts = {file: Facts((folder / file).stat().st_size, sha256(folder / file)) for file in files_in(folder)}
            check_manifest(folder, facts)
            contents: dict[str, Path | bytes] = {file: folder / file for file in facts}
            contents[SEAL] = seal_of(facts)
            self._make()
            there = self._files(base)
            if _fault(there, contents, facts) is None:
                return
            stale = [f"{base}/{file}" for file in there if file not in contents]
            commit = self._commit({f"{base}/{file}": data for file, data in contents.items()}, stale, name)
            self._check(name, _fault(self._files(base, commit), contents, facts))

    def put_file(self, file: Path, name: str) -> None:
        path = self._at(name)
        with self._told("write"):
            data = file.read_bytes()
            self._make()
            if _fault(self._info(path), {path: data}) is None:
                return
            commit = self._commit({path: data}, [], name)
            self._check(name, _fault(self._info(path, commit), {path: data}))

    def names(self, under: str) -> list[str]:
        base = self._at(under)
        with self._told("read"), tempfile.TemporaryDirectory() as box:
            from huggingface_hub.errors import RepositoryNotFoundError

            try:
                head = self._head()
            except RepositoryNotFoundError as error:
                if error.response.status_code == 404:  # not made yet; 401 would mean that nobody is logged in
                    return []
                raise
            there = self._files(base, head)
            sealed = [file.split("/")[0] for file in there if file.split("/")[1:] == [SEAL]]
            return sorted(name for name in sealed if self._is_whole(base, name, there, head, Path(box)))

    def fetch(self, name: str, into: Path) -> None:
        base = self._at(name)
        with self._told("read"):
            head = self._head()
            into.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=into.parent, prefix=".stage-") as box:
                if f"{base}/{SEAL}" in self._info(f"{base}/{SEAL}", head):
                    self._download(f"{base}/{SEAL}", head, Path(box))
                    self._fetch_folder(name, read_seal(Path(box, base)), into, head)
                elif info := self._info(base, head):
                    file = self._download(base, head, Path(box))
                    if (fault := _fault(info, {base: file})) is not None:
                        raise MirrorFailed(f"hub:{self.repo}: {fault} after the download; try again")
                    replace(into, file.read_bytes())
                else:
                    raise absent(self, name)

    def remove(self, name: str) -> None:
        base = self._at(name)
        with self._told("write"):
            found = [f"{base}/{file}" for file in self._files(base)] or list(self._info(base))
            if found:
                self._commit({}, found, f"remove {name}")

    def _at(self, name: str) -> str:
        return f"{self.run_name}/{name}".rstrip("/")

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi()

    def _make(self) -> None:
        if not self._made:
            self._api().create_repo(self.repo, repo_type="model", private=True, exist_ok=True)
            self._made = True

    def _head(self) -> str:
        """The newest commit, so that all that is asked next is of one state."""
        return str(self._api().repo_info(self.repo).sha)

    def _commit(self, adds: dict[str, Path | bytes], deletes: list[str], what: str) -> str:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        operations: list[Any] = [CommitOperationDelete(path, is_folder=False) for path in deletes]
        operations += [CommitOperationAdd(path, data) for path, data in adds.items()]
        commit = self._api().create_commit(self.repo, operations=operations, commit_message=f"{self.run_name}: {what}")
        return str(commit.oid)

    def _check(self, name: str, fault: str | None) -> None:
        """What did not arrive as it was sent is taken away again."""
        if fault is None:
            return
        advice = "try again"
        try:
            self.remove(name)
        except MirrorFailed:
            advice = "remove it there"
        raise MirrorFailed(f"hub:{self.repo}: {name}: {fault} after the upload; {advice}")

    def _files(self, base: str, revision: str = "main") -> dict[str, Any]:
        """What the hub says of each file below `base`, by its path from there."""
        from huggingface_hub.errors import EntryNotFoundError

        try:
            rows = list(self._api().list_repo_tree(self.repo, base, recursive=True, revision=revision))
        except EntryNotFoundError:
            return {}
        return {row.path.removeprefix(f"{base}/"): row for row in rows if hasattr(row, "blob_id")}

    def _info(self, path: str, revision: str = "main") -> dict[str, Any]:
        """The same of one file; empty where there is none."""
        rows = self._api().get_paths_info(self.repo, [path], revision=revision)
        return {row.path: row for row in rows if hasattr(row, "blob_id")}

    def _download(self, path: str, revision: str, box: Path) -> Path:
        return Path(self._api().hf_hub_download(self.repo, path, revision=revision, local_dir=box))

    def _is_whole(self, base: str, name: str, there: dict[str, Any], head: str, box: Path) -> bool:
        self._download(f"{base}/{name}/{SEAL}", head, box)
        facts = read_seal(box / base / name)
        rows = {file: there.get(f"{name}/{file}") for file in facts or ()}
        return facts is not None and all(
            row is not None
            and row.size == facts[file].size
            and (row.lfs is None or row.lfs.sha256 == facts[file].sha256)
            for file, row in rows.items()
        )

    def _fetch_folder(self, name: str, facts: dict[str, Facts] | None, into: Path, head: str) -> None:
        if facts is None:
            raise MirrorFailed(f"hub:{self.repo}: the seal of {name} cannot be read; take an older one, or remove it")
        check_free_space(into, sum(fact.size for fact in facts.values()), name)
        with staged(into) as stage:
            box, found = stage / ".box", {}
            for file in facts:
                arrived = self._download(f"{self._at(name)}/{file}", head, box)
                disk.sync_file(arrived)
                found[file] = Facts(arrived.stat().st_size, sha256(arrived))
                (stage / file).parent.mkdir(parents=True, exist_ok=True)
                disk.rename(arrived, stage / file)
            check_same(f"hub:{self.repo}: {name}", facts, found)
            disk.remove_folder(box)

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """The library's errors as one line of ours. A token, which some of them quote, is never passed on."""
        try:
            yield
        except UserError:
            raise
        except ImportError:
            raise MirrorFailed(
                f"hub:{self.repo}: needs a library that is missing; pip install huggingface_hub"
            ) from None
        except Exception as error:
            says = _says(error, doing)
            if says is None:
                raise
            raise MirrorFailed(f"hub:{self.repo}: {_TOKEN.sub('…', says)}") from None


def _fault(
    there: dict[str, Any], contents: dict[str, Path | bytes], known: dict[str, Facts] | None = None
) -> str | None:
    """What the hub has otherwise than we do, or None. Large files it names by their SHA-256, small ones as git does."""
    known = known or {}
    for name, content in contents.items():
        row = there.get(name)
        if row is None:
            return f"{name} is missing"
        if row.lfs is not None:
            ours = known[name].sha256 if name in known else _sha256(content)
            theirs = row.lfs.sha256
        else:
            data = content.read_bytes() if isinstance(content, Path) else content
            ours = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
            theirs = row.blob_id
        if ours != theirs:
            return f"{name} is different"
    return None


def _sha256(content: Path | bytes) -> str:
    return sha256(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest()


def _says(error: BaseException, doing: str) -> str | None:
    from huggingface_hub import errors

    while isinstance(error, (RuntimeError, errors.LocalEntryNotFoundError)) and error.__cause__ is not None:
        error = error.__cause__  # the library wraps what happened in what it was about
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"cannot be reached while HF_HUB_OFFLINE is set; run: unset HF_HUB_OFFLINE (to {doing} there)"
    if isinstance(error, errors.HfHubHTTPError):
        status, words = error.response.status_code, shown(error.server_message or "", 150)
        if status in (401, 403):
            return f"not allowed to {doing}{f' ({words})' if words else ''}; {_LOG_IN}"
        if isinstance(error, errors.RepositoryNotFoundError):
            return f"there is no such repository, or it is another's; check the name, or {_LOG_IN}"
        return f"the hub answers HTTP {status}{f' ({words})' if words else ''}; try again later"
    if isinstance(error, errors.LocalTokenNotFoundError):
        return f"not allowed to {doing}; {_LOG_IN}"
    if isinstance(error, (ConnectionError, TimeoutError, *_transport_errors())):
        return f"cannot be reached ({type(error).__name__}); {_NO_WAY}"
    if isinstance(error, OSError) and error.errno:
        return f"could not {doing}, because of this machine: {shown(error, 200)}; mend that and try again"
    if isinstance(error, (OSError, ValueError, RuntimeError, KeyError)) or _is_theirs(error):
        return f"could not {doing} there: {shown(error, 200) or type(error).__name__}; try again"
    return None


def _is_theirs(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] in ("huggingface_hub", "hf_xet", "httpx", "httpx2")


def _transport_errors() -> Iterator[type[Exception]]:
    for client in ("httpx", "httpx2"):  # which one depends on the library's version
        with suppress(ImportError):
            yield importlib.import_module(client).TransportError
