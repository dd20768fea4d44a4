"""Checkpoints: whole or not there, found again after any damage, never pruned before a newer one is safe."""

import os
import shutil

import pytest
import torch

from sojourn.errors import RunFailed, UserError
from sojourn.run.checkpoints import find_damage
from sojourn.storage.files import CannotRead, read_json, write_json
from sojourn.train.checkpoint import checkpoint as module
from sojourn.train.checkpoint.checkpoint import Checkpoint, Retention, file_digest, load_newest, load_path, save
from test_files import no_more_files

FILES = ("model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json", "manifest.json")


def _checkpoint(step: int) -> Checkpoint:
    tensors = {"a": torch.full((4, 4), float(step)), "b": torch.arange(step)}
    return Checkpoint(
        tensors, {"a/exp_avg": torch.ones(4)}, {"cpu": torch.get_rng_state()}, {"step": step, "tokens": 7}
    )


def test_what_is_saved_is_what_is_loaded(tmp_path):
    save(tmp_path, _checkpoint(5), keep=Retention(2))
    found, path = load_newest(tmp_path)
    assert path.name == "step-00000005" and found.step == 5 and found.state["tokens"] == 7
    assert torch.equal(found.model["a"], torch.full((4, 4), 5.0)) and torch.equal(
        found.random["cpu"], torch.get_rng_state()
    )
    assert (tmp_path / "latest").read_text() == "step-00000005\n"


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, _checkpoint(step), keep=Retention(2))
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000003", "step-00000010"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_is_passed_over_and_the_user_told(tmp_path, name, damage):
    save(tmp_path, _checkpoint(1), keep=Retention(3))
    file = save(tmp_path, _checkpoint(2), keep=Retention(3)) / name
    content = file.read_bytes()
    if damage == "remove":
        file.unlink()
    elif damage == "truncate":
        file.write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    told = []
    found, path = load_newest(tmp_path, told.append)
    assert path.name == "step-00000001" and found.step == 1
    assert len(told) == 1 and "step-00000002 is damaged" in told[0]
    with pytest.raises(UserError, match="not a complete checkpoint"):
        load_path(file.parent)


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir", "open"])
def test_a_write_that_fails_leaves_the_old_checkpoint_and_no_rubbish(tmp_path, monkeypatch, call):
    """Every single call of its kind fails once, as on a full or broken disk."""
    save(tmp_path, _checkpoint(1), keep=Retention(1))
    for failing in range(1, 30):
        with monkeypatch.context() as patch:
            count = _fail_on(patch, call, failing)
            try:
                save(tmp_path, _checkpoint(2), keep=Retention(1))
            except (RunFailed, OSError):
                found, _ = load_newest(tmp_path)
                assert found.step in (1, 2)
                assert [p.name for p in tmp_path.glob(".*stage*")] == []
                shutil.rmtree(tmp_path / "step-00000002", ignore_errors=True)
                save(tmp_path, _checkpoint(1), keep=Retention(1))
                continue
        if count() < failing:
            return  # no such call is left to fail
        shutil.rmtree(tmp_path / "step-00000002")
        save(tmp_path, _checkpoint(1), keep=Retention(1))
    pytest.fail("the save never got through")


def _fail_on(patch, call: str, number: int):
    seen = 0

    def wrap(real):
        def wrapped(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == number:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        return wrapped

    from pathlib import Path

    owner, name = {
        "fsync": (os, "fsync"),
        "rename": (Path, "rename"),
        "mkdir": (Path, "mkdir"),
        "open": (Path, "open"),
    }[call]
    patch.setattr(owner, name, wrap(getattr(owner, name)))
    return lambda: seen


def test_a_disk_without_room_is_noticed_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(RunFailed, match=r"free some space, or set save\.folder"):
        save(tmp_path, _checkpoint(1), keep=Retention(1))
    assert list(tmp_path.glob("step-*")) == []


def test_removing_unseals_first(tmp_path):
    path = save(tmp_path, _checkpoint(1), keep=Retention(1))
    (path / "manifest.json").unlink()
    assert find_damage(path) == "no readable manifest" and load_newest(tmp_path) is None


def _rewrite_manifest(path, **entries):
    write_json(path / "manifest.json", {**read_json(path / "manifest.json"), **entries})


@pytest.mark.parametrize("name", ["../../../../etc/passwd", "/etc/passwd", "/dev/zero", "..", "a/../b", "a\0b"])
def test_a_manifest_that_leads_outside_is_damage_and_nothing_outside_is_read(tmp_path, name):
    path = save(tmp_path, _checkpoint(5), keep=Retention(2))
    _rewrite_manifest(path, **{name: {"size": 1, "sha256": "0" * 64}})
    assert find_damage(path) == "the manifest lists files outside this folder"


@pytest.mark.parametrize("entry", [None, 3, [], {}, {"size": -1, "sha256": "x"}, {"size": 10**30, "sha256": []},
                                   {"size": "big", "sha256": None}, {"size": {}, "sha256": {}}])  # fmt: skip
def test_an_absurd_entry_in_a_manifest_is_damage(tmp_path, entry):
    path = save(tmp_path, _checkpoint(5), keep=Retention(2))
    _rewrite_manifest(path, **{"model.safetensors": entry})
    assert find_damage(path) in ("no readable manifest", "model.safetensors has the wrong size")


@pytest.mark.skipif(os.name != "posix", reason="fifos and devices are POSIX")
@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "manifest.json"])
def test_a_fifo_a_folder_or_a_device_in_a_checkpoint_is_damage_and_is_not_waited_for(tmp_path, file):
    for step, make in enumerate((os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"))):
        path = save(tmp_path / str(step), _checkpoint(step), keep=Retention(2))
        (path / file).unlink()
        make(path / file)
        assert find_damage(path) in (
            *(f"{file} is {kind}, not a file" for kind in ("a fifo", "a folder", "a device")),
            "no readable manifest",
        )


@pytest.mark.parametrize("state", [[], 3, None, {}, {"step": "5"}, {"step": -1}, {"step": True},
                                   {"step": 5, "seconds": float("nan")}, {"step": 5, "scaler": 3}])  # fmt: skip
def test_a_state_of_another_type_is_damage(tmp_path, state):
    path = save(tmp_path, _checkpoint(5), keep=Retention(2))
    write_json(path / "state.json", state)
    _rewrite_manifest(path, **{"state.json": file_digest(path / "state.json")})
    assert find_damage(path) == "state.json is not a state"


def test_too_many_open_files_is_not_damage(tmp_path):
    """Nothing may be removed or set aside for it."""
    path = save(tmp_path, _checkpoint(5), keep=Retention(2))
    with no_more_files(), pytest.raises(CannotRead, match="Too many open files; allow more open files"):
        find_damage(path)
    assert find_damage(path) is None
