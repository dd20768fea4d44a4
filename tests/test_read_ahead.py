"""A model's files are read while the rest starts, if there is room; any trouble is left to who opens them."""

import pytest

from sojourn.machine import read_ahead as module
from sojourn.machine.read_ahead import read_ahead, weight_files


@pytest.fixture
def model(tmp_path):
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    return tmp_path


def test_all_weights_of_a_folder_are_read_in_their_order(model, monkeypatch):
    read = []

    real = module._read

    def seen(files):
        read.extend(files)
        real(files)

    monkeypatch.setattr(module, "_read", seen)
    thread = read_ahead(str(model))
    thread.join(10)
    assert not thread.is_alive() and [file.name[:11] for file in read] == ["model-00001", "model-00002"]


def test_a_name_on_the_hub_is_found_where_it_was_fetched_to(model, tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.mktemp("hub")
    place = cache / "hub" / "models--Org--Name" / "snapshots" / "abc"
    place.mkdir(parents=True)
    (place / "model.safetensors").symlink_to(model / "model-00001-of-00002.safetensors")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(cache))
    assert weight_files("Org/Name") == [place / "model.safetensors"]
    assert weight_files("Org/Other") == [] and read_ahead("Org/Other") is None


def test_nothing_is_read_that_memory_could_not_keep(model, monkeypatch):
    monkeypatch.setattr(module, "_SHARE", 0.0)
    assert read_ahead(str(model)) is None


def test_a_file_that_cannot_be_read_is_not_this_threads_business(model):
    (model / "model-00003-of-00003.safetensors").symlink_to(model / "gone")
    thread = read_ahead(str(model))
    (model / "model-00002-of-00002.safetensors").unlink()
    thread.join(10)
    assert not thread.is_alive()
