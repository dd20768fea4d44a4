"""As much of the hub's protocol as keeping folders in a repository takes: commits, large files, trees, downloads."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


@dataclass
class Stored:
    """A file of a commit. `oid` is set for large files, which the hub keeps apart under their SHA-256."""

    data: bytes
    oid: str | None = None

    @property
    def row(self) -> dict[str, Any]:
        data = self.data if self.oid is None else f"oid sha256:{self.oid}\n".encode()
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        row: dict[str, Any] = {"type": "file", "size": len(self.data), "oid": blob}
        if self.oid is not None:
            row["lfs"] = {"oid": self.oid, "size": len(self.data), "pointerSize": len(data)}
        return row


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, Stored]] = field(default_factory=lambda: {"0" * 40: {}})

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    @property
    def files(self) -> dict[str, Stored]:
        return self.commits[self.head]


@dataclass
class Hub:
    """What is kept, and how it misbehaves: `fail` names verbs answered by a status, `spoil` a file that is stored
    otherwise than it was sent, `rot` one that is given back otherwise than it is listed. `fail_times`: statuses of a
    verb's next answers. `cut_after`: of how many bytes of a large file the connection breaks, once. `stored`: large
    files as they arrived. `branches`: those made, by repository. `listed`: rows that no file stands behind."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    fail: dict[str, int] = field(default_factory=dict)
    spoil: str = ""
    rot: str = ""
    asked: list[str] = field(default_factory=list)
    fail_times: dict[str, list[int]] = field(default_factory=dict)
    cut_after: int | None = None
    stored: list[str] = field(default_factory=list)
    branches: dict[str, list[str]] = field(default_factory=dict)
    listed: list[dict[str, Any]] = field(default_factory=list)

    def commit(self, repository: Repository, lines: list[dict[str, Any]]) -> str:
        files = dict(repository.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "file":
                files[value["path"]] = Stored(self._kept(value["path"], base64.b64decode(value["content"])))
            elif line["key"] == "lfsFile":
                data = self._kept(value["path"], self.large[value["oid"]])
                files[value["path"]] = Stored(data, hashlib.sha256(data).hexdigest())
        oid = hashlib.sha1(json.dumps([repository.head, sorted(files)]).encode(), usedforsecurity=False).hexdigest()
        repository.commits[oid] = files
        return oid

    def _kept(self, path: str, data: bytes) -> bytes:
        return bytes([data[0] ^ 1]) + data[1:] if self.spoil and path.endswith(self.spoil) else data


class Door(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def answer(self, body: Any = b"", code: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[0] == "large" and self.hub.cut_after is not None:
            self.rfile.read(self.hub.cut_after)
            self.hub.cut_after, self.close_connection = None, True
            return self.connection.shutdown(SHUT_RDWR)
        body = self.body()
        if parts[0] == "large":  # a signed address: it needs no token
            self.hub.large[parts[1]] = body
            self.hub.stored.append(parts[1])
            return self.answer()
        if parts == [""]:  # whether anybody is there
            return self.answer()
        if parts == ["api", "validate-yaml"]:  # of a model card
            return self.answer({"errors": [], "warnings": []})
        verb, repo = self.verb_and_repo(parts)
        self.hub.asked.append(verb)
        if self.hub.fail_times.get(verb):
            return self.answer({"error": "busy"}, self.hub.fail_times[verb].pop(0), Retry_After="0")
        if verb in self.hub.fail:
            return self.answer({"error": "as the test wants it"}, self.hub.fail[verb])
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid username or password."}, 401)
        if verb == "create":
            return self.create(json.loads(body))
        repository = self.hub.repositories.get(repo)
        if repository is None:
            return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        return getattr(self, f"on_{verb}")(repository, repo, parts, body)

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    @staticmethod
    def verb_and_repo(parts: list[str]) -> tuple[str, str]:
        if parts[:3] == ["api", "repos", "create"]:
            return "create", ""
        if parts[0] == "api":
            return (parts[4].replace("-", "_") if len(parts) > 4 else "facts"), "/".join(parts[2:4])
        return ("batch" if parts[-1] == "batch" else parts[2]), "/".join(parts[:2]).removesuffix(".git")

    def create(self, wanted: dict[str, Any]) -> None:
        if wanted["organization"] != "me":
            return self.answer({"error": "You don't have the rights to create a model there"}, 403)
        repo = f"{wanted['organization']}/{wanted['name']}"
        url = {"url": f"{self.hub.url}/{repo}"}
        if repo in self.hub.repositories:
            return self.answer({**url, "error": "You already created this model repo"}, 409)
        self.hub.repositories[repo] = Repository(private=wanted.get("visibility") == "private")
        return self.answer(url)

    def on_facts(self, repository: Repository, repo: str, parts: list[str], body: bytes) -> None:
        siblings = [{"rfilename": path} for path in repository.files]
        self.answer({"id": repo, "sha": repository.head, "private": repository.private, "siblings": siblings})

    def on_branch(self, repository: Repository, repo: str, parts: list[str], body: bytes) -> None:
        self.hub.branches.setdefault(repo, []).append(parts[5])
        self.answer({})

    def on_revision(self, repository: Repository, repo: str, parts: list[str], body: bytes) -> None:
        self.on_facts(repository, repo, parts, body)

    def on_preupload(self, repository: Repository, repo: str, parts: list[str], body: bytes) -> None:
        rows = []
        for file in json.loads(body)["files"]:
            old = repository.files.get(file["path"])
            mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
            row = {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
            rows.append({**row, **({"oid": old.oid or old.row["oid"]} if old else {})})
        self.answer({"files": rows})

    def on_batch(self, repository: Repository, repo: str, parts: list[str], body: bytes) -> None:
        objects = []
        for wanted in json.loads(body)["objects"]:
            actions = {"actions": {"upload": {"href": f"{self.hub.url}/large/{wanted['oid']}"}}}
            objects.append({**wanted, **({} if wanted["oid"] in self.hub.large else actions)})
        self.answer({"transfer": "basic", "objects": objects})

    def on_commit(self, repository: Repository, repo: str, parts: list[str], body: bytes) -> None:
        oid = self.hub.commit(repository, [json.loads(line) for line in body.splitlines()])
        self.answer({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{oid}"})

    def on_tree(self, repository: Repository, repo: str, parts: list[str], body: bytes) -> None:
        folder = "/".join(parts[6:])
        rows = self.rows(repository, parts[5])
        found = [row for row in rows if not folder or row["path"].startswith(f"{folder}/")] + self.hub.listed
        if not found and folder:
            return self.answer({"error": "not there"}, 404, X_Error_Code="EntryNotFound")
        return self.answer(found)

    def on_paths_info(self, repository: Repository, repo: str, parts: list[str], body: bytes) -> None:
        wanted = parse_qs(body.decode())["paths"]
        self.answer([row for row in self.rows(repository, parts[5]) if row["path"] in wanted])

    def on_resolve(self, repository: Repository, repo: str, parts: list[str], body: bytes) -> None:
        path = "/".join(parts[4:])
        commit = parts[3] if parts[3] in repository.commits else repository.head
        file = repository.commits[commit].get(path)
        if file is None:
            return self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        rotten = bool(self.hub.rot) and path.endswith(self.hub.rot)
        data = bytes([file.data[0] ^ 1]) + file.data[1:] if rotten else file.data
        return self.answer(data, ETag=f'"{file.oid or file.row["oid"]}"', X_Repo_Commit=commit)

    @staticmethod
    def rows(repository: Repository, revision: str) -> list[dict[str, Any]]:
        files = repository.commits.get(revision, repository.files)
        folders = {"/".join(path.split("/")[:n]) for path in files for n in range(1, path.count("/") + 1)}
        rows = [{"path": path, **file.row} for path, file in files.items()]
        return rows + [{"type": "directory", "path": path, "oid": "1" * 40} for path in sorted(folders)]


@contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Door", (Door,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def only_hub(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub of our own, and a library that knows no other. `folder`: for its cache."""
    from huggingface_hub import close_session, constants

    with serve() as found:
        for name in list(os.environ):
            if name.lower().endswith("_proxy"):
                patch.delenv(name)
        template = f"{found.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "ENDPOINT", found.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no token"))
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub cache"))
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("HF_ENDPOINT", found.url)
        patch.setenv("HF_HUB_OFFLINE", "0")
        close_session()
        yield found
        close_session()
