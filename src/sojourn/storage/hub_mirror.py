"""A mirror in a private repository on the hub: one commit per entry, so that nobody sees half an upload. After each
commit the hub's own hashes are compared with ours."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sojourn.config.messages import printable
from sojourn.errors import UserError
from sojourn.storage import disk
from sojourn.storage.files import sha256
from sojourn.storage.hub_errors import describe_hub_error
from sojourn.storage.hub_files import find_difference
from sojourn.storage.mirror import (
    SEAL,
    FileDigest,
    MirrorDamaged,
    MirrorFailed,
    check_manifest,
    check_unchanged,
    format_seal,
    list_files,
    missing_entry_error,
    read_seal,
)
from sojourn.storage.stage import staged
from sojourn.storage.verified_copy import check_free_space, replace_file

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass
class HubMirror:
    """`repo` is USER/REPOSITORY, made on first use; every run has a folder of its own in it."""

    repo: str
    run_name: str
    _made: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if not REPOSITORY.fullmatch(self.repo):
            raise UserError(
                f"hub:{printable(self.repo)}: not a repository's name; write save.mirror=hub:USER/REPOSITORY"
            )

    @property
    def location(self) -> str:
        return f"the hub repository {self.repo}"

    def put(self, folder: Path, name: str) -> None:
        base = self._at(name)
        with self._hub_errors_as_mirror_failed("write"):
            digests = {
                file: FileDigest((folder / file).stat().st_size, sha256(folder / file)) for file in list_files(folder)
            }
            check_manifest(folder, digests)
            contents: dict[str, Path | bytes] = {file: folder / file for file in digests}
            contents[SEAL] = format_seal(digests)
            hashes = {file: digest.sha256 for file, digest in digests.items()}
            self._make()
            files = self._files(base)
            if find_difference(files, contents, hashes) is None:
                return
            stale = [f"{base}/{file}" for file in files if file not in contents]
            commit = self._commit({f"{base}/{file}": data for file, data in contents.items()}, stale, name)
            self._check(name, find_difference(self._files(base, commit), contents, hashes))

    def put_file(self, file: Path, name: str) -> None:
        path = self._at(name)
        with self._hub_errors_as_mirror_failed("write"):
            data = file.read_bytes()
            self._make()
            if find_difference(self._info(path), {path: data}) is None:
                return
            commit = self._commit({path: data}, [], name)
            self._check(name, find_difference(self._info(path, commit), {path: data}))

    def names(self, under: str) -> list[str]:
        base = self._at(under)
        with self._hub_errors_as_mirror_failed("read"), tempfile.TemporaryDirectory() as temporary:
            head = self._head_if_made()
            if head is None:
                return []
            files = self._files(base, head)
            sealed = [file.split("/")[0] for file in files if file.split("/")[1:] == [SEAL]]
            return sorted(name for name in sealed if self._is_complete(base, name, files, head, Path(temporary)))

    def fetch(self, name: str, into: Path) -> None:
        base = self._at(name)
        with self._hub_errors_as_mirror_failed("read"):
            head = self._head()
            into.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=into.parent, prefix=".stage-") as temporary:
                if f"{base}/{SEAL}" in self._info(f"{base}/{SEAL}", head):
                    self._download(f"{base}/{SEAL}", head, Path(temporary))
                    self._fetch_folder(name, read_seal(Path(temporary, base)), into, head)
                elif info := self._info(base, head):
                    file = self._download(base, head, Path(temporary))
                    if (difference := find_difference(info, {base: file})) is not None:
                        raise MirrorFailed(f"hub:{self.repo}: {difference} after the download; try again")
                    replace_file(into, file.read_bytes())
                else:
                    raise missing_entry_error(self, name)

    def read(self, name: str) -> bytes | None:
        path = self._at(name)
        with self._hub_errors_as_mirror_failed("read"), tempfile.TemporaryDirectory() as temporary:
            head = self._head_if_made()
            info = self._info(path, head) if head is not None else {}
            if not info:
                return None
            file = self._download(path, str(head), Path(temporary))
            if (difference := find_difference(info, {path: file})) is not None:
                raise MirrorDamaged(f"hub:{self.repo}: {difference} after the download")
            return file.read_bytes()

    def set_aside(self, name: str) -> None:
        """Its seal goes; the files stay."""
        seal = f"{self._at(name)}/{SEAL}"
        with self._hub_errors_as_mirror_failed("write"):
            if self._info(seal):
                self._commit({}, [seal], f"{name} is damaged")

    def remove(self, name: str) -> None:
        base = self._at(name)
        with self._hub_errors_as_mirror_failed("write"):
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
        """The newest commit, so that all following requests see one state."""
        return str(self._api().repo_info(self.repo).sha)

    def _head_if_made(self) -> str | None:
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            return self._head()
        except RepositoryNotFoundError as error:
            if error.response.status_code == 404:  # not created yet; 401 would mean that nobody is logged in
                return None
            raise

    def _commit(self, adds: dict[str, Path | bytes], deletes: list[str], what: str) -> str:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        operations: list[Any] = [CommitOperationDelete(path, is_folder=False) for path in deletes]
        operations += [CommitOperationAdd(path, data) for path, data in adds.items()]
        commit = self._api().create_commit(self.repo, operations=operations, commit_message=f"{self.run_name}: {what}")
        return str(commit.oid)

    def _check(self, name: str, difference: str | None) -> None:
        """Removes the entry again where the hub holds something else than was sent."""
        if difference is None:
            return
        advice = "try again"
        try:
            self.remove(name)
        except MirrorFailed:
            advice = "remove it there"
        raise MirrorFailed(f"hub:{self.repo}: {name}: {difference} after the upload; {advice}")

    def _files(self, base: str, revision: str = "main") -> dict[str, Any]:
        """The hub's record of each file below `base`, by its path relative to it."""
        from huggingface_hub.errors import EntryNotFoundError

        try:
            rows = list(self._api().list_repo_tree(self.repo, base, recursive=True, revision=revision))
        except EntryNotFoundError:
            return {}
        return {row.path.removeprefix(f"{base}/"): row for row in rows if hasattr(row, "blob_id")}

    def _info(self, path: str, revision: str = "main") -> dict[str, Any]:
        """The same for one file; empty where there is none."""
        rows = self._api().get_paths_info(self.repo, [path], revision=revision)
        return {row.path: row for row in rows if hasattr(row, "blob_id")}

    def _download(self, path: str, revision: str, folder: Path) -> Path:
        return Path(self._api().hf_hub_download(self.repo, path, revision=revision, local_dir=folder))

    def _is_complete(self, base: str, name: str, files: dict[str, Any], head: str, folder: Path) -> bool:
        self._download(f"{base}/{name}/{SEAL}", head, folder)
        digests = read_seal(folder / base / name)
        rows = {file: files.get(f"{name}/{file}") for file in digests or ()}
        return digests is not None and all(
            row is not None
            and row.size == digests[file].size
            and (row.lfs is None or row.lfs.sha256 == digests[file].sha256)
            for file, row in rows.items()
        )

    def _fetch_folder(self, name: str, digests: dict[str, FileDigest] | None, into: Path, head: str) -> None:
        if digests is None:
            raise MirrorDamaged(f"hub:{self.repo}: the seal of {name} cannot be read")
        check_free_space(into, sum(digest.size for digest in digests.values()), name)
        with staged(into) as stage:
            downloads, found = stage / ".downloads", {}
            for file in digests:
                arrived = self._download(f"{self._at(name)}/{file}", head, downloads)
                disk.sync_file(arrived)
                found[file] = FileDigest(arrived.stat().st_size, sha256(arrived))
                (stage / file).parent.mkdir(parents=True, exist_ok=True)
                disk.rename(arrived, stage / file)
            check_unchanged(f"hub:{self.repo}: {name}", digests, found)
            disk.remove_folder(downloads)

    @contextmanager
    def _hub_errors_as_mirror_failed(self, doing: str) -> Iterator[None]:
        """Errors of huggingface_hub as one line each, with tokens removed."""
        try:
            yield
        except UserError:
            raise
        except ImportError:
            raise MirrorFailed(
                f"hub:{self.repo}: huggingface_hub is not installed; pip install huggingface_hub"
            ) from None
        except Exception as error:
            message = describe_hub_error(error, doing)
            if message is None:
                raise
            raise MirrorFailed(f"hub:{self.repo}: {message}") from None
