"""Before anything travels: paths are rewritten, data prepared here is found there, secrets and laptop paths refused."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from shared import Shared
from sojourn.config.load import load_run, read_config, to_yaml
from sojourn.data.inputs import open_inputs
from sojourn.data.settings import data_settings
from sojourn.errors import UserError
from sojourn.remote.portability import Destination, Shipment, make_shipment
from sojourn.storage.file_digests import FileDigests
from sojourn.storage.secret_scan import FILE_BYTES, scan_files, secret_in

TOKEN = "hf_" + "aB3dE5gH7jK9" * 3
SMALL = ("smoke", "data.vocab_size=400", "data.max_length=64")


def _texts(path: Path, word: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": f"{word} number {i} lies on the shelf {i % 7}"}) for i in range(30)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _ship(*args: str, box: Path | str = "/root/autodl-tmp", **options: object) -> Shipment:
    to = Destination(str(box), gpus=1, disks=(str(box), "/root/autodl-fs"))
    return make_shipment(load_run([*SMALL, *args]).config, to, **options)  # type: ignore[arg-type]


def _arrive(shipment: Shipment) -> None:
    for local, remote in (*shipment.items, *shipment.last_items):
        Path(remote).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(local, remote)


def _hash_on_box(shipment: Shipment, box: Path) -> str:
    (box / "run.yaml").write_text(to_yaml(shipment.config), encoding="utf-8")
    config = read_config(box / "run.yaml")
    inputs = open_inputs(data_settings(config), print, config.advanced.split_digits)
    return inputs.artefact_hash(FileDigests(box / "digests.json"))


@pytest.fixture
def project(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an outside."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_data_prepared_here_is_found_on_the_box_although_its_files_have_other_names(
    project: Path, tmp_path: Path
) -> None:
    one = _texts(project / "my texts 中文.jsonl", "stone")
    for name, word in (("b/10.jsonl", "ten"), ("b/9.jsonl", "nine"), ("b/Ä.jsonl", "umlaut"), ("a.txt", "plain")):
        _texts(project / "folder" / name, word)
    for name in ("x2.jsonl", "x10.jsonl", "other.jsonl"):
        _texts(project / "globbed" / name, name)
    packed = project / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(one.read_bytes() + b"\n", mtime=0))
    outside = _texts(tmp_path / "elsewhere" / "x2.jsonl", "outside")
    sources = f"data.sources=[{one.name}, folder, 'globbed/x*.jsonl', packed.jsonl.gz, ../elsewhere/x2.jsonl]"
    box = tmp_path / "box"
    shipment = _ship(sources, f"data.eval_sources={outside}", box=box)
    shipment.check()
    _arrive(shipment)
    assert shipment.artefact == _hash_on_box(shipment, box)
    assert (box / "prepared" / str(shipment.artefact) / "artefact.json").is_file()
    paths = [source.path for source in shipment.config.data.sources]
    assert all(path.startswith(f"{box}/.sojourn/files/") and path.isascii() and " " not in path for path in paths)
    assert [Path(remote).name for _, remote in shipment.last_items] == ["artefact.json"]
    assert any("../elsewhere/x2.jsonl is outside this project" in note for note in shipment.notes)


def test_data_sets_of_dataset_info_tokenizer_and_template_travel(project: Path, tmp_path: Path, shared: Shared) -> None:
    base = shared.copy_base(tmp_path)
    rows = [{"q": f"Where is cat {i}?", "a": "Here."} for i in range(30)]
    (project / "lf").mkdir()
    (project / "lf" / "rows.json").write_text(json.dumps(rows))
    entry = {"mine": {"file_name": "rows.json", "columns": {"prompt": "q", "response": "a", "query": ""}}}
    (project / "lf" / "dataset_info.json").write_text(json.dumps(entry))
    template = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
    (project / "chat.jinja").write_text(template)
    words = ("data.sources=mine", "data.dataset_dir=lf", "data.template=chat.jinja")
    box = tmp_path / "box"
    shipment = _ship(*words, f"data.tokenizer={base}/tokenizer.json", box=box)
    shipment.check()
    _arrive(shipment)
    assert shipment.artefact == _hash_on_box(shipment, box)
    sent = {Path(remote).name for _, remote in shipment.items}
    assert "tokenizer_config.json" in sent and "model.safetensors" not in sent
    assert shipment.config.data.dataset_dir is None and shipment.config.data.template.endswith(".jinja")


def test_a_base_model_travels_whole_and_gguf_files_keep_their_names(
    project: Path, tmp_path: Path, shared: Shared
) -> None:
    base = shared.copy_base(tmp_path)
    (base / "pytorch_model.bin").write_bytes(b"the same weights")
    (base / ".cache").mkdir()
    (base / ".cache" / "x.json").write_text("{}")
    chats = _texts(project / "my.jsonl", "chat")
    shipment = _ship_existing(str(base), str(chats))
    shipment.check()
    sent = {remote.rpartition("/")[2] for _, remote in shipment.items}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= sent
    assert not {"pytorch_model.bin", "x.json"} & sent
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    gguf = _ship_existing(str(tmp_path / "tiny.gguf"), str(chats), prepare=False)
    assert str(gguf.config.model.base).endswith("/tiny.gguf")


def _ship_existing(base: str, data: str, **options: object) -> Shipment:
    config = load_run([f"model.base={base}", f"data.sources={data}", "data.max_length=64"]).config
    return make_shipment(config, Destination("/root/autodl-tmp"), **options)  # type: ignore[arg-type]


def test_the_same_shipment_twice_is_the_same(project: Path) -> None:
    _texts(project / "a" / "same.jsonl", "first")
    _texts(project / "b" / "same.jsonl", "second")
    words = "data.sources=[a/same.jsonl, b/same.jsonl]"
    first, second = _ship(words), _ship(words)
    assert first == second
    remote = [remote for _, remote in first.items]
    assert len(set(remote)) == len(remote) and sum("same-" in one for one in remote) == 2


def test_hub_names_and_builtin_data_stay_and_the_box_is_said_to_download_them(project: Path) -> None:
    config = load_run(["model.base=Qwen/Qwen2.5-0.5B", "data.sources=[wikitext2, tatsu-lab/alpaca]"]).config
    shipment = make_shipment(config, Destination("/root"))
    assert [one.path for one in shipment.config.data.sources] == ["wikitext2", "tatsu-lab/alpaca"]
    assert shipment.config.model.base == "Qwen/Qwen2.5-0.5B" and not shipment.refusals and not shipment.items
    assert any("the box prepares the data" in note for note in shipment.notes)
    builtin = _ship("data.sources=[{path: 'builtin:text', size: 20k}]")
    assert builtin.config.data.sources[0].path == "builtin:text" and builtin.artefact


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("data.sources=missing.jsonl",), "data.sources: missing.jsonl: no such file"),
        (("data.sources=C:\\Users\\me\\my.jsonl",), "a Windows path, which does not exist on this machine"),
        (("data.sources=\\\\server\\share\\my.jsonl",), "a Windows path"),
        (("data.sources=my.jsonl", "data.eval_sources=gone.jsonl"), "data.eval_sources: gone.jsonl: no such file"),
        (("data.sources=my.jsonl", "save.mirror=backup"), "save.mirror: backup: not a full path of the box"),
        (("data.sources=my.jsonl", "save.mirror=~/"), "save.mirror=/root/autodl-fs"),
        (("data.sources=my.jsonl", "save.mirror=D:\\backup"), "not a full path of the box"),
        (("data.sources=my.jsonl", "data.tokenizer=./gone"), "data.tokenizer: ./gone: no such file or folder here"),
        (("data.sources=my.jsonl", "data.template=gone.jinja"), "data.template: gone.jinja: no such file"),
        (("data.sources=my.jsonl", "parallel.deepspeed=ds.json"), "parallel.deepspeed: ds.json: no such file"),
        (("data.sources=my.jsonl", "parallel.gpus=0,3"), "parallel.gpus: 0,3 given, but the box has GPU 0 only"),
        (("data.sources=my.jsonl", "save.resume=gone"), "save.resume: gone: no checkpoint"),
        (("data.sources=broken.jsonl",), "a broken link"),
    ],
)
def test_what_cannot_work_on_the_box_is_refused(project: Path, words: tuple[str, ...], expected: str) -> None:
    _texts(project / "my.jsonl", "mine")
    (project / "broken.jsonl").symlink_to(project / "nowhere.jsonl")
    with pytest.raises(UserError) as refused:
        _ship(*words, prepare=False).check()
    assert expected in str(refused.value) and "\n" not in str(refused.value)


def test_all_problems_are_named_at_once(project: Path) -> None:
    shipment = _ship("data.sources=[gone.jsonl, gone2.jsonl]", "save.mirror=backup", prepare=False)
    assert len(shipment.refusals) == 3


def test_settings_of_this_machine_are_dropped_with_a_note(project: Path) -> None:
    _texts(project / "my.jsonl", "mine")
    words = ("save.folder=/home/me/out", "train.device=mps", "advanced.compile_cache=/home/me/cache")
    shipment = _ship("data.sources=my.jsonl", *words, "save.mirror=hub:me/run", prepare=False)
    shipment.check()
    config = shipment.config
    assert (config.save.folder, config.train.device, config.advanced.compile_cache) == (None, "auto", None)
    assert config.save.mirror == "hub:me/run"
    assert sum(any(key in note for note in shipment.notes) for key in ("save.folder", "mps", "compile_cache")) == 3


def test_a_link_out_of_the_project_is_named_and_its_content_travels(project: Path, tmp_path: Path) -> None:
    target = _texts(tmp_path / "elsewhere.jsonl", "far")
    (project / "data").mkdir()
    _texts(project / "data" / "near.jsonl", "near")
    (project / "data" / "link.jsonl").symlink_to(target)
    shipment = _ship("data.sources=data", prepare=False)
    shipment.check()
    assert any(f"is a link to {target}, outside this project" in note for note in shipment.notes)
    assert target in [local for local, _ in shipment.items]


@pytest.mark.parametrize("name", ["kaggle.json", "secrets.json", "harmless.jsonl"])
def test_secrets_are_named_and_refused_unless_allowed(project: Path, name: str) -> None:
    _texts(project / "data" / "a.jsonl", "fine")
    content = TOKEN if name == "harmless.jsonl" else "nothing"
    (project / "data" / name).write_text(json.dumps({"text": f"my token is {content} keep it"}))
    shipment = _ship("data.sources=data", prepare=False)
    assert len(shipment.refusals) == 1 and name in shipment.refusals[0] and "--allow-secrets" in shipment.refusals[0]
    assert TOKEN not in shipment.refusals[0]
    _ship("data.sources=data", prepare=False, allow_secrets=True).check()


def test_a_link_to_a_private_key_is_a_secret_by_what_it_links_to(project: Path, tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519").write_text("key")
    (project / "notes.txt").symlink_to(tmp_path / ".ssh" / "id_ed25519")
    assert "a file of secrets" in _ship("data.sources=notes.txt", prepare=False).refusals[0]


def test_a_token_among_the_settings_is_refused(project: Path) -> None:
    _texts(project / "my.jsonl", "mine")
    shipment = _ship("data.sources=my.jsonl", f"train.samples=say {TOKEN}", prepare=False)
    assert "the settings of the run: a Hugging Face token" in shipment.refusals[0]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"x={TOKEN}", True),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", True),
        ("-----BEGIN PRIVATE KEY-----", True),
        ("AKIAQWERTZ1234567890", True),
        ("ghp_" + "a1B2c3D4" * 4 + "e5F6", True),
        ("sk-proj-" + "a1B2c3D4" * 5, True),
        ("AKIAIOSFODNN7EXAMPLE", False),
        ("hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", False),
        ("a risk-free-and-well-known-way-of-doing-things", False),
        ("task-oriented-DIALOGUE-2024-systems-are-here", False),
        ("-----BEGIN PUBLIC KEY-----", False),
        ("shf_" + "aB3dE5gH7jK9" * 3, False),
    ],
)
def test_what_looks_like_a_secret(text: str, secret: bool) -> None:
    assert (secret_in(f"before {text} after".encode()) is not None) is secret


def test_the_scan_of_a_large_file_is_bounded_and_says_so(tmp_path: Path) -> None:
    large = tmp_path / "large.jsonl"
    with large.open("wb") as file:
        file.truncate(40 * FILE_BYTES)
        file.seek(-100, 2)
        file.write(TOKEN.encode())
    (tmp_path / "model.safetensors").write_bytes(TOKEN.encode())
    scan = scan_files([large, tmp_path / "model.safetensors"])
    assert len(scan.findings) == 1 and scan.bytes_read <= FILE_BYTES
    assert "1 of them in part" in scan.describe() and "1 judged by name only" in scan.describe()
