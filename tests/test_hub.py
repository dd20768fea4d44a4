"""The hub: online, offline from the cache, and one line that says what to do when neither is possible."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from sojourn.catalog.datasets import datasets
from sojourn.config.data import Columns, Source
from sojourn.data.sources.hub import is_hub_name, open_table
from sojourn.errors import UserError

OLD, NEW = "a" * 40, "b" * 40
CARD = """---
configs:
- config_name: small
  default: true
  data_files:
  - {split: train, path: small/train.jsonl}
  - {split: validation, path: small/validation.jsonl}
- config_name: large
  data_files:
  - {split: train, path: large/*.jsonl}
---
"""


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]]
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        return {"main": list(self.commits)[-1], "v1": next(iter(self.commits))}.get(
            revision, revision if revision in self.commits else None
        )


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text, "note": {"n": n}}) + "\n" for n, text in enumerate(texts)).encode()


def parquet(tmp: Path) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"question": ["1+1?", "1+2?"], "answer": ["2", "3"]}), tmp / "x.parquet")
    return (tmp / "x.parquet").read_bytes()


def repositories(tmp: Path) -> dict[str, Repository]:
    old = {
        "README.md": CARD.encode(),
        "small/train.jsonl": lines("one", "two", "three"),
        "small/validation.jsonl": lines("held out"),
        "large/0.jsonl": lines("a", "b"),
        "large/1.jsonl": lines("c"),
    }
    tokenizer = {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}", "config.json": b"{}", "model.bin": b"heavy"}
    return {
        "datasets/org/Little-Set": Repository({OLD: old, NEW: {**old, "small/train.jsonl": lines("four", "five")}}),
        "datasets/org/bare": Repository({NEW: {"data/train-0.parquet": parquet(tmp)}}),
        "datasets/org/choice": Repository({NEW: {**old, "README.md": CARD.replace("  default: true\n", "").encode()}}),
        "datasets/org/default": Repository({NEW: old}),
        "datasets/org/broken": Repository({}),
        "datasets/org/damaged": Repository({NEW: {"train.jsonl": b"not json"}}),
        "datasets/org/empty": Repository({NEW: {"README.md": b"# x"}}),
        "datasets/org/outside": Repository({NEW: {"README.md": CARD.replace("small/train", "/etc/x").encode()}}),
        "datasets/org/gated": Repository({NEW: {"README.md": b"# x", "train.jsonl": lines("secret")}}, gated=True),
        "datasets/org/scripted": Repository({NEW: {"README.md": b"# x", "scripted.py": b"raise SystemExit"}}),
        "models/org/model": Repository({NEW: tokenizer}),
        "models/org/weights-only": Repository({NEW: {"config.json": b"{}"}}),
        "models/org/gated": Repository({NEW: tokenizer}, gated=True),
    }


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as loading a data set and a tokenizer takes."""

    repositories: dict[str, Repository] = {}  # noqa: RUF012
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def answer(self, body: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, why: str, code: int = 404) -> None:
        self.answer(b"", code, X_Error_Code=why, X_Error_Message=why)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        size = int(self.headers.get("Content-Length") or 0)
        form = parse_qs(self.rfile.read(size).decode())
        kind = "api" if path.startswith("api/") else "resolve"
        path = path.removeprefix("api/")
        if kind == "resolve" and not path.startswith("datasets/"):
            path = f"models/{path}"
        name, rest = "/".join(path.split("/")[:3]), path.split("/")[3:]
        repository = self.repositories.get(name)
        if repository is None:
            return self.refuse("RepoNotFound")
        if not repository.commits:
            return self.answer(b"", 503)
        verb, revision, file = [*rest, "", "", ""][0] or "revision", [*rest, "", ""][1] or "main", "/".join(rest[2:])
        commit = repository.commit(revision)
        if commit is None:
            return self.refuse("RevisionNotFound")
        files = repository.commits[commit]
        if verb == "revision":
            siblings = [{"rfilename": file} for file in files]
            gated = "auto" if repository.gated else False
            facts = {"id": name, "sha": commit, "siblings": siblings, "gated": gated, "private": False}
            return self.answer(json.dumps(facts).encode())
        if repository.gated and file != "README.md":
            return self.refuse("GatedRepo", 401)
        if verb == "resolve":
            if file not in files:
                return self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            etag = hashlib.sha256(files[file]).hexdigest()
            return self.answer(files[file], ETag=f'"{etag}"', X_Repo_Commit=commit)
        rows = [{"type": "file", "path": p, "size": len(b), "oid": commit[:8] + p} for p, b in files.items()]
        folders = {p.rpartition("/")[0] for p in files} - {""}
        rows += [{"type": "directory", "path": p, "oid": p} for p in sorted(folders)]
        if verb == "paths-info":
            rows = [row for row in rows if row["path"] in form["paths"]]
        elif file:
            rows = [row for row in rows if str(row["path"]).startswith(f"{file}/")]
            if not rows:
                return self.refuse("EntryNotFound")
        return self.answer(json.dumps(rows).encode())

    do_HEAD = do_POST = do_GET  # noqa: N815


CHILD = textwrap.dedent("""
    import json, sys
    from sojourn.config.data import Source
    from sojourn.data.sources import hub
    from sojourn.errors import UserError

    def table(evaluation=False, **source):
        found = hub.open_table(Source(**source), evaluation, notes.append)
        rows = [row for batch in found.batches(2) for row in batch]
        sizes = [len(batch) for batch in found.batches(2)]
        return dict(name=found.name, rows=rows, count=found.rows, columns=found.columns, sizes=sizes,
                    fingerprint=found.fingerprint, columns_map=found.columns_map)

    def tokenizer(**words):
        return sorted(file.name for file in hub.tokenizer_folder(**words, say=notes.append).iterdir())

    for call, words in json.loads(sys.argv[1]):
        notes = []
        try:
            result = dict(value=globals()[call](**words))
        except UserError as error:
            result = dict(error=str(error), code=error.code)
        print(json.dumps({**result, "notes": notes}), flush=True)
""")


@dataclass
class Place:
    """A machine with a cache of its own and a hub that may be there or not."""

    home: Path
    endpoint: str
    more: dict[str, str] = field(default_factory=dict)
    before: str = ""  # Python that runs first

    def ask(self, *calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
        kept = {k: v for k, v in kept.items() if not k.lower().endswith("_proxy")}
        settings = {"HF_HOME": str(self.home), "HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_XET": "1"}
        (self.home / "org" / "default").mkdir(parents=True, exist_ok=True)
        env = {**kept, "XDG_CONFIG_HOME": str(self.home), **settings, **self.more}
        command = [sys.executable, "-c", self.before + CHILD, json.dumps(calls)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env, cwd=self.home)
        assert done.returncode == 0, done.stderr
        assert not done.stderr, "the libraries' noise reached the screen"
        return [json.loads(line) for line in done.stdout.splitlines()]


def table(path: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "table", {"path": path, **more}


def tokenizer(model: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "tokenizer", {"model": model, **more}


SMALL, LARGE = table("org/Little-Set"), table("hub:org/Little-Set:large")
GOOD = (SMALL, LARGE, table("org/Little-Set", split="validation"), table("org/Little-Set", revision="v1"))
GOOD += (table("org/Little-Set", split="train[:1]", revision=OLD), table("org/bare"), table("ours"))
GOOD += (
    table("ours", evaluation=True),
    table("org/choice:large"),
    table("hub:org/default:large"),
    tokenizer("org/model"),
)
WRONG = (
    table("org/Little-Set", config="smal"),
    table("org/Little-Set", split="valid"),
    table("org/Little-Set", revision="v9"),
    table("org/Litle-Set"),
    table("org/gated"),
    table("org/scripted"),
    table("org/choice"),
    table("org/damaged"),
    table("org/empty"),
    table("org/outside"),
    table("org/Little-Set", split="train[:x]"),
    tokenizer("org/gated"),
    tokenizer("org/absent"),
    tokenizer("org/model", revision="v9"),
    tokenizer("org/weights-only"),
)
BROKEN = table("org/broken")
CATALOG = '[dataset.ours]\nhub = "org/Little-Set"\neval_split = "validation"\ncolumns = { completion = "text" }\n'


@dataclass
class Journey:
    online: list[dict[str, Any]]
    wrong: list[dict[str, Any]]
    offline: list[dict[str, Any]]
    offline_wrong: list[dict[str, Any]]
    broken: dict[str, Any]
    nowhere: list[dict[str, Any]]


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Journey]:
    """Everything is fetched once, then the hub goes away."""
    home = tmp_path_factory.mktemp("hub")
    (home / "sojourn").mkdir()
    (home / "sojourn" / "catalog.toml").write_text(CATALOG)
    Hub.repositories = repositories(home)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    place = Place(home, f"http://127.0.0.1:{server.server_port}")
    try:
        answers = place.ask(*GOOD, *WRONG, BROKEN)
    finally:
        server.shutdown()
        server.server_close()
    offline_wrong = (
        table("org/Little-Set", split="valid"),
        table("org/Little-Set", config="smal"),
        table("org/Little-Set", revision="v9"),
        table("org/choice"),
        table("org/default"),
    )
    offline = place.ask(*GOOD, *offline_wrong)
    nowhere = Place(tmp_path_factory.mktemp("fresh"), place.endpoint).ask(SMALL, tokenizer("org/model"), SMALL)
    cut = len(GOOD)
    yield Journey(answers[:cut], answers[cut:-1], offline[:cut], offline[cut:], answers[-1], nowhere)


def values(answers: list[dict[str, Any]]) -> list[Any]:
    assert not [answer["error"] for answer in answers if "error" in answer]
    return [answer["value"] for answer in answers]


def test_a_data_set_is_read_from_the_hub_that_hf_endpoint_names(journey):
    small, large, validation, tagged, sliced, bare, *_ = values(journey.online)
    assert [row["text"] for row in small["rows"]] == ["four", "five"]
    assert small["name"] == "org/Little-Set (small, train)" and small["count"] == 2
    assert small["columns"] == ["text", "note"] and small["rows"][1]["note"] == {"n": 1}
    assert [row["text"] for row in large["rows"]] == ["a", "b", "c"] and large["sizes"] == [2, 1]
    assert [row["text"] for row in validation["rows"]] == ["held out"]
    assert [row["text"] for row in tagged["rows"]] == ["one", "two", "three"]
    assert [row["text"] for row in sliced["rows"]] == ["one"]
    assert bare["rows"] == [{"question": "1+1?", "answer": "2"}, {"question": "1+2?", "answer": "3"}]
    assert not any(answer["notes"] for answer in journey.online)


def test_a_folder_of_the_same_name_is_not_taken_for_the_data_set(journey):
    assert [row["text"] for row in values(journey.online)[9]["rows"]] == ["a", "b", "c"]


def test_a_users_short_name_brings_its_split_and_its_columns(journey):
    ours, held_out = values(journey.online)[6:8]
    assert ours["columns_map"] == {"completion": "text"} and [row["text"] for row in ours["rows"]] == ["four", "five"]
    assert [row["text"] for row in held_out["rows"]] == ["held out"]


def test_offline_the_cache_gives_the_same_rows_and_the_same_fingerprints(journey):
    assert values(journey.offline) == values(journey.online)
    assert len(journey.offline[0]["notes"]) == 1 and "cannot be reached" in journey.offline[0]["notes"][0]
    assert not any(answer["notes"] for answer in journey.offline[1:])


def test_every_commit_configuration_and_split_has_a_fingerprint_of_its_own(journey):
    prints = [value["fingerprint"] for value in values(journey.online)[:6]]
    assert len(set(prints)) == len(prints)


def test_a_tokenizer_comes_without_the_weights(journey):
    assert values(journey.online)[-1] == ["config.json", "tokenizer.json", "tokenizer_config.json"]


def test_what_the_hub_does_not_have_is_one_line_that_says_what_it_has(journey):
    expected = [
        r"org/Little-Set has no config smal; did you mean small\?; there are: small, large",
        r"org/Little-Set has no split valid; did you mean validation\?; there are: train, validation$",
        "org/Little-Set has no revision v9",
        r"there is no datasets/org/Litle-Set on 127.0.0.1:\d+; .*HF_TOKEN",
        "org/gated is gated: .*datasets/org/gated.* export HF_TOKEN=…",
        "org/scripted has a loading script.*refs/convert/parquet",
        "org/choice has more than one config: write org/choice:small or another; there are: small, large",
        r"org/damaged cannot be read as a table \(.*\): copy its files",
        r"org/empty cannot be read as a table \(.*\): copy its files",
        r"org/outside cannot be read as a table \(.*\): copy its files",
        r"org/Little-Set: split train\[:x\]: ",
        "org/gated is gated: .*https://huggingface.co/org/gated.* export HF_TOKEN=…",
        r"there is no org/absent on 127.0.0.1:\d+; .*HF_TOKEN",
        "org/model has no revision v9",
        "org/weights-only has no tokenizer.json",
    ]
    for answer, pattern in zip(journey.wrong, expected, strict=True):
        assert re.search(pattern, answer["error"]), answer
        assert "\n" not in answer["error"] and answer["code"] == 2


def test_offline_wrong_names_list_what_is_in_the_cache(journey):
    split, config, revision, choice, default = [answer["error"] for answer in journey.offline_wrong]
    assert split == "org/Little-Set has no split valid; did you mean validation?; there are: train, validation"
    assert "org/Little-Set, smal (cached: large, small) is not in the local cache" in config
    assert "org/Little-Set, v9" in revision and "not in the local cache" in revision
    assert choice.startswith("org/choice has more than one config: write org/choice:small or another")
    assert default.startswith("org/default, small (cached: large) is not in the local cache")


def test_a_hub_in_trouble_is_a_failure_that_names_the_cache(journey):
    assert journey.broken["code"] == 1 and "answers HTTP 503: try again later, or export" in journey.broken["error"]


def test_without_hub_and_cache_one_line_names_the_ways_out(journey):
    for answer, what in zip(journey.nowhere, ("org/Little-Set", "the tokenizer of org/model", "org/"), strict=True):
        assert answer["code"] == 2 and "\n" not in answer["error"]
        assert answer["error"].startswith(what) and "is not in the local cache and 127.0.0.1" in answer["error"]
        assert "export HF_ENDPOINT=https://hf-mirror.com HF_HUB_DISABLE_XET=1" in answer["error"]
        assert "copy its files" in answer["error"]


def test_the_offline_switch_is_named_and_nothing_is_asked(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as never_accepts:
        endpoint = f"http://127.0.0.1:{never_accepts.getsockname()[1]}"
        (answer,) = Place(tmp_path, endpoint, {"HF_HUB_OFFLINE": "1"}).ask(SMALL)
        assert "HF_HUB_OFFLINE is set (unset it to download)" in answer["error"] and not answer["notes"]
        never_accepts.setblocking(False)
        with pytest.raises(BlockingIOError):
            never_accepts.accept()


# One second where the call gives a timeout; without one, it fails.
_LESS_PATIENT = """
from huggingface_hub import HfApi

def less_patient(*given, timeout, real=HfApi.dataset_info, **more):
    return real(*given, timeout=min(timeout, 1), **more)

HfApi.dataset_info = less_patient
"""


def test_a_hub_that_takes_the_call_and_never_answers_is_given_up(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (answer,) = Place(tmp_path, endpoint, before=_LESS_PATIENT).ask(SMALL)
    assert "cannot be reached (timed out)" in answer["error"]


@pytest.mark.parametrize(
    "path",
    [
        "wikitext2",
        "WikiText2",
        "fineweb_edu",
        "gsm8k:socratic",
        "hub:org/name",
        "hub:org/name.json",
        "org/name",
        "Org-1/na_me-v1.5",
        "org/name:config",
        "org/name:20231101.zh",
    ],
)
def test_names_of_data_sets(path):
    assert is_hub_name(path)


@pytest.mark.parametrize(
    "path",
    [
        "notes",
        "notes.txt",
        "data/train.jsonl",
        "data/train.JSONL",
        "data/*.txt",
        "data/x[0]",
        "./org/name",
        "../name",
        "~/name",
        "/org/name",
        "a/b/c",
        "a/",
        "/",
        "builtin:text",
        "builtin:text/en",
        "C:/data",
        "a//b",
        "data/train.parquet",
        "data/train.json.gz",
        ".hidden/name",
        "org/名字",
    ],
)
def test_paths_and_other_names_are_not_data_sets(path):
    assert not is_hub_name(path) and not is_hub_name("")


def test_a_name_that_cannot_be_on_the_hub_is_refused_with_a_guess():
    with pytest.raises(UserError, match=r"hub:wikitex2: not a data set's name.*ORG/NAME; did you mean wikitext2\?"):
        open_table(Source(path="hub:wikitex2"))


def test_an_endpoint_without_a_scheme_is_reported(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "hf-mirror.com")
    with pytest.raises(UserError, match="HF_ENDPOINT must begin with https://"):
        open_table(Source(path="org/name"))


@pytest.mark.parametrize("row", datasets(), ids=lambda row: row.name)
def test_every_short_name_is_a_row_that_can_be_used(row):
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", row.hub) and is_hub_name(row.hub) and is_hub_name(row.name)
    assert row.source == f"hub page {row.hub}" and re.fullmatch(r"20\d\d-\d\d", row.date)
    assert row.description and row.split != row.eval_split
    assert Columns(**row.columns).model_dump(exclude_none=True) == row.columns


def test_a_users_own_short_names_are_checked(tmp_path):
    own = tmp_path / "catalog.toml"
    own.write_text('[dataset.mine]\nhub = "me/mine"\n[dataset.gsm8k]\nconfig = "socratic"\n')
    rows = {row.name: row for row in datasets(own)}
    assert rows["mine"].split == "train" and rows["mine"].source == str(own) and rows["mine"].columns == {}
    assert rows["gsm8k"].config == "socratic" and rows["gsm8k"].hub == "openai/gsm8k"
    for line, message in (
        (
            'hub = "a/b"\ncolumns = { promt = "x" }',
            r"dataset.mine: `columns`: unknown name `promt`; did you mean prompt",
        ),
        ('hub = "a/b"\ncolumns = "x"', "must be a table of texts"),
        ('hub = "a/b"\nspilt = "x"', "unknown key `spilt`; did you mean split"),
        ('split = "x"', "`hub` is missing; every data set needs it"),
    ):
        own.write_text(f"[dataset.mine]\n{line}\n")
        with pytest.raises(UserError, match=message):
            datasets(own)
