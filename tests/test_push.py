"""`sojourn push` and `sojourn pull ORG/NAME` against a local server that speaks the hub's API."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import called
from hub_server import TOKEN, Hub, Repository, Stored, only_hub
from sojourn.storage.files import sha256

KEY = "hf_" + "Ab1" * 12


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with only_hub(tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def model(tmp_path: Path, shared) -> Path:
    folder = shared.copy_base(tmp_path)
    (folder / "README.md").write_text("# a model\n")
    return folder


@pytest.fixture
def export(model: Path) -> Path:
    """As `sojourn export` leaves it."""
    files = {path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in model.iterdir()}
    record = {"version": 1, "format": "hf", "quantization": "auto", "gate": {"passed": True}, "files": files}
    (model / "sojourn_export.json").write_text(json.dumps(record))
    return model


def _push(*words: object) -> tuple[int, str, str]:
    done = called("push", *map(str, words))
    assert TOKEN not in done.stdout + done.stderr and all(TOKEN not in word for word in sys.argv)
    return done.returncode, done.stdout, done.stderr


def _refused(*words: object) -> str:
    code, _, text = _push(*words)
    assert code in (1, 2) and text.startswith("sojourn: ") and len(text.splitlines()) == 1, text
    return text


def test_a_model_arrives_and_is_not_sent_twice(hub, model):
    code, out, _ = _push(model, "me/x")
    repository = hub.repositories["me/x"]
    assert code == 0 and "files sent, verified (public)" in out
    assert {name: file.data for name, file in repository.files.items()} == {
        path.name: path.read_bytes() for path in model.iterdir()
    }
    assert repository.files["model.safetensors"].oid and not repository.files["config.json"].oid
    assert len(repository.commits) == 2, "one commit: nobody sees half of it"
    code, out, _ = _push(model, "me/x")
    assert code == 0 and "was there already" in out and len(repository.commits) == 2 and len(hub.stored) == 1
    (model / "README.md").write_text("# another card\n")
    code, out, _ = _push(model, "me/x", "--json")
    assert json.loads(out)["sent"] == ["README.md"] and len(hub.stored) == 1
    assert repository.files["README.md"].data == b"# another card\n"


def test_private_and_a_branch(hub, model):
    code, out, _ = _push(model, "me/x", "--private", "--revision", "v1")
    assert code == 0 and "(private)" in out
    assert hub.repositories["me/x"].private and hub.branches == {"me/x": ["v1"]}
    assert _push(model, "me/y")[0] == 0
    assert "public; make it private" in _refused(model, "me/y", "--private")


@pytest.mark.parametrize("token", ["", "hf_wrongwrongwrong"])
def test_a_wrong_token_is_one_line(hub, model, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    text = _refused(model, "me/x")
    assert "not allowed to write" in text and "hf auth login" in text and "hf_wrong" not in text
    assert not hub.repositories and not hub.stored


def test_a_strangers_repository_is_one_line(hub, model):
    assert "not allowed to write (You don't have the rights" in _refused(model, "you/x")
    for name in ("x", "a/b/c", "../x", "me/../x", "https://huggingface.co/me/x", ""):
        assert "not a repository's name" in _refused(model, name)
    assert "allowed: hf, modelscope" in _refused(model, "me/x", "--hub", "s3")
    assert "not a branch" in _refused(model, "me/x", "--revision", "--evil")


_VERBS = ("create", "facts", "tree", "preupload", "batch")


@pytest.mark.parametrize("verb", ["commit", *(pytest.param(verb, marks=pytest.mark.slow) for verb in _VERBS)])
def test_a_busy_hub_is_asked_again(hub, model, verb):
    hub.fail_times[verb] = [429, 500]
    code, _, text = _push(model, "me/x")
    assert code == 0, text
    assert "model.safetensors" in hub.repositories["me/x"].files


def test_a_hub_that_stays_busy_is_one_line_and_nothing_is_lost(hub, model):
    hub.fail = {"commit": 503}
    code, _, text = _push(model, "me/x")
    assert code == 1 and len(text.splitlines()) == 1 and "HTTP 503" in text and "not sent again" in text
    assert len(hub.stored) == 1 and not hub.repositories["me/x"].files
    hub.fail = {}
    assert _push(model, "me/x")[0] == 0 and len(hub.stored) == 1, "the large file had arrived"


def test_a_connection_that_breaks_within_a_file_is_survived(hub, model):
    hub.cut_after = 1000
    code, _, text = _push(model, "me/x")
    assert code == 0 and hub.cut_after is None, text
    assert hub.repositories["me/x"].files["model.safetensors"].data == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_hub_that_stores_something_else_is_noticed(hub, model, file):
    hub.spoil = file
    code, _, text = _push(model, "me/x")
    assert code == 1 and f"{file} is different after the upload" in text


def test_an_export_is_sent_as_its_gate_saw_it(hub, export):
    (export / "README.md").write_text("# a card, edited\n")
    (export / "notes.txt").write_text("mine\n")
    code, out, _ = _push(export, "me/x")
    assert code == 0 and "the export did not write it: notes.txt" in out
    assert "sojourn_export.json" in hub.repositories["me/x"].files


def test_a_changed_or_failed_export_is_refused(hub, export):
    record, config = json.loads((export / "sojourn_export.json").read_text()), (export / "config.json").read_bytes()
    (export / "config.json").write_bytes(config.replace(b"64", b"65", 1))
    assert "config.json: changed since the export" in _refused(export, "me/x")
    (export / "config.json").unlink()
    assert "config.json: gone since the export" in _refused(export, "me/x")
    (export / "config.json").write_bytes(config)
    for gate in ({"passed": False}, None, {"passed": "yes"}):
        (export / "sojourn_export.json").write_text(json.dumps({**record, "gate": gate}))
        assert "the parity gate found drift" in _refused(export, "me/x")
    (export / "sojourn_export.json").write_text("{")
    assert "sojourn_export.json" in _refused(export, "me/x")
    assert not hub.repositories, "nothing was made there"


@pytest.mark.parametrize(("name", "content"), [
    ("notes.txt", f"token = {KEY}"), (".env", ""), ("id_rsa", "x"), ("run.yaml", f"a: {KEY}"), ("sub/deep.json", KEY),
])  # fmt: skip
def test_a_file_with_a_secret_is_refused(hub, model, name, content):
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text(content)
    if name == ".env":
        assert _push(model, "me/x")[0] == 0 and ".env" not in hub.repositories["me/x"].files, "hidden files stay here"
        return
    text = _refused(model, "me/x")
    assert "it would be published" in text and KEY not in text and not hub.repositories


def test_what_is_no_file_of_the_model_stays_here(hub, model, tmp_path):
    (model / "optimizer.pt").write_bytes(b"x")
    (model / ".cache").mkdir()
    (model / ".cache" / "a").write_text("x")
    code, out, _ = _push(model, "me/x")
    assert code == 0 and "not sent (hidden, or a pickle): .cache/a, optimizer.pt" in out
    assert not {"optimizer.pt", ".cache/a"} & set(hub.repositories["me/x"].files)
    (model / "link.txt").symlink_to("/etc/passwd")
    assert "outside of the folder" in _refused(model, "me/x")


def test_a_run_is_pushed_by_its_name(hub, model, tmp_path):
    run = tmp_path / "home" / "runs" / "small"
    shutil.copytree(model, run / "final")
    (run / "run.yaml").write_text("name: small\n")
    assert _push("small", "me/small")[0] == 0
    assert "model.safetensors" in hub.repositories["me/small"].files
    assert "no run is called" in _refused("none-such", "me/x")
    assert "push sends a folder" in _refused(model / "model.safetensors", "me/x")


def test_the_token_is_in_no_file(hub, model, tmp_path):
    assert _push(model, "me/x")[0] == 0
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


def test_without_its_package_modelscope_is_one_line(hub, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope_hub.api", None)
    monkeypatch.setitem(sys.modules, "modelscope", None)
    assert "pip install modelscope" in _refused(model, "me/x", "--hub", "modelscope")
    done = called("pull", "me/x", "--hub", "modelscope")
    assert done.returncode == 2 and "pip install modelscope" in done.stderr


@pytest.fixture
def published(hub: Hub, model: Path) -> Repository:
    """The model on the hub, with files that nobody needs."""
    import hashlib

    repository = Repository(private=False)
    for path in model.iterdir():
        data = path.read_bytes()
        large = path.suffix == ".safetensors"
        repository.files[path.name] = Stored(data, hashlib.sha256(data).hexdigest() if large else None)
    repository.files.update({name: Stored(b"x" * 100) for name in ("pytorch_model.bin", "evil.py", "onnx/model.onnx")})
    hub.repositories["org/m"] = repository
    return repository


def _pull(*words: object) -> tuple[int, str, str]:
    done = called("pull", *map(str, words))
    assert TOKEN not in done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


def test_a_model_is_pulled_without_code_and_pickles(hub, published, model, tmp_path):
    code, out, text = _pull("org/m", "--to", tmp_path / "here", "--json")
    assert code == 0, text
    assert "left out: " in text and "pytorch_model.bin" in text and "--include" in text
    folder = Path(json.loads(out)["folder"])
    assert folder == tmp_path / "here"
    assert {p.name for p in folder.iterdir() if p.is_file()} == {p.name for p in model.iterdir()}
    assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    code, out, _ = _pull("org/m", "--to", tmp_path / "here", "--include", "evil.*")
    assert code == 0 and (folder / "evil.py").is_file() and not (folder / "pytorch_model.bin").exists()


def test_a_pulled_model_is_found_by_its_name(hub, published, monkeypatch):
    from sojourn.storage.hub_download import base_model_folder

    code, out, text = _pull("org/m", "--json")
    assert code == 0, text
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert base_model_folder("org/m", None) == Path(json.loads(out)["folder"])


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_download_that_is_not_what_the_hub_lists_is_refused(hub, published, tmp_path, file):
    hub.rot = file
    code, _, text = _pull("org/m", "--to", tmp_path / "here")
    assert code == 1 and f"{file} is different after the download" in text.splitlines()[-1]
    assert not (tmp_path / "here" / file).exists()
    hub.rot = ""
    code, _, text = _pull("org/m", "--to", tmp_path / "here")
    assert code == 0, text


def test_a_hostile_repository_is_one_line(hub, published, tmp_path):
    hub.listed = [{"type": "file", "path": "../../evil.json", "size": 4, "oid": "1" * 40}]
    code, _, text = _pull("org/m", "--to", tmp_path / "here", "--include", "*.json")
    assert code == 2 and "nothing of it is brought here" in text.splitlines()[-1]
    assert not list(tmp_path.rglob("evil.json"))
    hub.listed = []
    published.files["config.json"] = Stored(b'{"model_type": "llama", "num_hidden_layers": 1000000000}')
    code, _, text = _pull("org/m", "--to", tmp_path / "here")
    assert code == 2 and "which no model has" in text.splitlines()[-1]
    del published.files["model.safetensors"]
    code, _, text = _pull("org/m", "--to", tmp_path / "there")
    assert code == 2 and "no safetensors" in text and "pytorch_model.bin" in text


def test_what_is_not_there_is_one_line(hub, published, monkeypatch):
    for words, expected in (
        (["org/none"], "there is no org/none"),
        (["a/b/c"], "a run has no slash"),
        (["nosuch"], "nosuch"),
        (["org/m", "--hub", "x"], "allowed: hf, modelscope"),
    ):
        code, _, text = _pull(*words)
        assert code in (1, 2) and expected in text and len(text.splitlines()) == 1, text
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrong")
    code, _, text = _pull("org/m")
    assert code in (1, 2) and "HF_TOKEN" in text and "hf_wrong" not in text and len(text.splitlines()) == 1
