"""`sojourn verify`: an export proves itself without its source; everything that is wrong is one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import called
from sojourn.export.stage import MANIFEST
from sojourn.storage.files import sha256

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def exported(shared, tmp_path_factory) -> Path:
    """An export whose source is gone."""
    home = tmp_path_factory.mktemp("verify")
    base = shared.copy_base(home)
    done = called("export", str(base), "--out", str(home / "out"))
    assert done.returncode == 0, done.stderr
    shutil.rmtree(base)
    return home / "out"


@pytest.fixture
def folder(exported, tmp_path) -> Path:
    return shutil.copytree(exported, tmp_path / "renamed")


def edit(file: Path, changed: Callable[[dict], object]) -> None:
    value = json.loads(file.read_text())
    changed(value)
    file.write_text(json.dumps(value))


def accept(folder: Path, *names: str) -> None:
    """Whoever changed these files changed their hashes too."""

    def update(record: dict) -> None:
        for name in names:
            record["files"][name] = {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}

    edit(folder / MANIFEST, update)


def refused(*arguments: str, code: int = 1) -> str:
    """The one line."""
    said = called("verify", *arguments)
    assert said.returncode == code, said.stderr
    lines = [line for line in said.stderr.splitlines() if line.startswith("sojourn: ")]
    assert len(lines) == 1 and "Traceback" not in said.stderr
    return lines[0]


def test_a_renamed_export_proves_itself_without_its_source(folder):
    (folder / "notes.txt").write_text("mine")
    said = called("verify", str(folder), "--json")
    found = json.loads(said.stdout)
    assert said.returncode == 0 and found["verified"] and found["extra"] == ["notes.txt"], said.stderr
    assert found["gate"]["replay"]["figures"]["same greedy text"] == 1


def test_a_missing_file_and_a_flipped_byte_are_named_before_anything_is_opened(folder):
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    assert "model.safetensors: changed since the export" in refused(str(folder))
    weights.write_bytes(data[:-1])
    assert f"model.safetensors: {len(data) - 1:,} bytes, {len(data):,} when it was exported" in refused(str(folder))
    weights.unlink()
    (folder / "tokenizer.json").unlink()
    assert "model.safetensors: missing (and 1 more)" in refused(str(folder))
    assert json.loads(called("verify", str(folder), "--json").stdout)["verified"] is False


def test_a_foreign_folder_has_nothing_to_be_compared_with(folder):
    (folder / MANIFEST).unlink()
    assert f"sojourn verify {folder} --against MODEL" in refused(str(folder), code=2)
    assert "no such folder" in refused(str(folder / "nowhere"), code=2)


def test_a_foreign_folder_is_compared_with_a_model_that_one_names(folder, exported):
    (folder / MANIFEST).unlink()
    (folder / "probes.json").unlink()
    said = called("verify", str(folder), "--against", str(exported))
    assert said.returncode == 0 and "replayed in transformers" in said.stdout, said.stderr
    edit(folder / "generation_config.json", lambda g: g.update(eos_token_id=3))
    assert "stop token" in refused(str(folder), "--against", str(exported))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-100],
        lambda text: text.replace('"tokens": "', '"tokens": "AAAA'),
        lambda text: text.replace('"positions": [', '"positions": [999999, '),
        lambda text: text.replace('"stop_ids"', '"stops"'),
    ],
    ids=["truncated", "log probabilities", "positions", "a key"],
)
def test_damaged_probes(folder, damage):
    file = folder / "probes.json"
    file.write_text(damage(file.read_text()))
    assert "probes.json: " in refused(str(folder))
    accept(folder, "probes.json")
    assert "its probes cannot be read" in refused(str(folder))


def test_a_tokenizer_of_another_version_is_seen_in_the_token_ids(folder):
    edit(folder / "tokenizer.json", lambda t: t["model"].update(merges=t["model"]["merges"][40:]))
    accept(folder, "tokenizer.json")
    assert "token ids, chat 1: at token" in refused(str(folder))


def test_what_a_newer_version_wrote_is_refused(folder):
    edit(folder / MANIFEST, lambda r: r.update(version=99))
    assert "written by a newer sojourn" in refused(str(folder))
    edit(folder / MANIFEST, lambda r: r.update(version=1, format="holograms"))
    assert "written by a newer sojourn (record 1, format holograms)" in refused(str(folder))


def test_a_model_type_that_transformers_does_not_know_is_one_line(folder):
    edit(folder / "config.json", lambda c: c.update(model_type="llama9"))
    accept(folder, "config.json")
    said = refused(str(folder))
    assert "transformers does not know its architecture; run: pip install" in said


@pytest.mark.parametrize(
    "record",
    ["{", "[]", '{"format": "hf"}', '{"format": "hf", "files": {"../../etc/passwd": {"size": 1, "sha256": ""}}}'],
)
def test_a_damaged_record_is_one_line(folder, record):
    (folder / MANIFEST).write_text(record)
    assert "copy the folder again" in refused(str(folder))


def test_an_unknown_runtime_is_guessed(folder):
    assert "did you mean" in refused(str(folder), "--runtime", "transformer", code=2)
