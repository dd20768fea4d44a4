"""Saving beside the training: it stops no step, a disk in trouble ends no run, and the newest good checkpoint stays."""

import errno
import os
import re
import shutil
import threading
import time
from collections import namedtuple

import pytest

from sojourn.errors import RunFailed, Stopped, UserError
from sojourn.machine.hardware import Memory
from sojourn.run.checkpoints import find_damage
from sojourn.run.folder import RunFolder
from sojourn.storage import disk
from sojourn.storage.files import read_json
from sojourn.train import steps as steps_module
from sojourn.train.checkpoint import checkpoint as checkpoint_module
from sojourn.train.checkpoint import safetensors_writer as tensors
from sojourn.train.checkpoint import snapshot
from sojourn.train.checkpoint.checkpoint import Checkpoint, Retention, load_newest, save
from sojourn.train.checkpoint.saving import Saver
from sojourn.train.faults import memory_pressure as pressure
from tiny import LORA, after_step, events, losses, run_of, run_train, same_weights, saved_steps, stop_after

OFTEN = ("save.every=0.001s",)


def _saving():
    return threading.current_thread().name.startswith("save")


def _troubled(monkeypatch, number, wrong):
    """The disk fails while the checkpoints are written of which `wrong(step)` says so."""
    real = disk.write

    def write(file, data):
        named = re.search(r"step-(\d+)", str(file.name))
        if named and wrong(int(named[1])):
            real(file, bytes(data)[: len(data) // 2])  # half of it gets there
            raise OSError(number, os.strerror(number))
        real(file, data)

    monkeypatch.setattr(disk, "write", write)


def test_a_slow_disk_stops_no_step(tiny, monkeypatch):
    """The first checkpoint is written only when four more steps are done, and holds none of them."""
    words = tiny.words(*OFTEN, "save.keep=9")
    enough, real = threading.Event(), disk.write

    def slow(file, data):
        if _saving():
            assert enough.wait(60), "training waited for the disk"
        real(file, data)

    monkeypatch.setattr(disk, "write", slow)
    after_step(monkeypatch, {5: enough.set})
    run = run_train(words)
    assert saved_steps(run)[0] == 1 and not {2, 3, 4} & set(saved_steps(run)) and saved_steps(run)[-1] == 12
    assert same_weights(run, tiny.whole())
    monkeypatch.undo()
    fresh = tiny.words("limits.time=0.0001s")  # one step, saved with nothing beside it
    with pytest.raises(Stopped):
        run_train(fresh)
    slow_one, other = load_path(run, 1), load_path(run_of(fresh), 1)
    assert all((slow_one.model[key] == other.model[key]).all() for key in other.model)
    assert all((slow_one.optimizer[key] == other.optimizer[key]).all() for key in other.optimizer)


def load_path(run: RunFolder, step: int) -> Checkpoint:
    return checkpoint_module.load_path(run.checkpoints / f"step-{step:08d}")


def test_where_steps_are_named_every_one_of_them_is_saved_however_slow_the_disk(tiny, monkeypatch):
    words = tiny.words("save.every_steps=2", "save.keep=9")
    real = disk.sync

    def slow(handle):
        if _saving():
            threading.Event().wait(0.02)
        real(handle)

    monkeypatch.setattr(disk, "sync", slow)
    run = run_train(words)
    assert saved_steps(run) == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("kind", [(), (*LORA, "method.dropout=0.3")], ids=["pretrain", "lora with dropout"])
def test_without_memory_for_a_copy_training_waits_and_saves_the_same(tiny, monkeypatch, kind):
    words, whole = tiny.words(*kind, "save.every_steps=4", "save.keep=9"), tiny.whole(*kind)
    monkeypatch.setattr(snapshot, "memory", lambda: Memory(100 << 30, 9 << 30, 100 << 30))
    seen = []
    real = Saver._write

    def write(self, checkpoint, began):
        live = self._training_state.checkpoint(self._progress).model
        seen.append(all(checkpoint.model[key].data_ptr() == live[key].data_ptr() for key in live))
        return real(self, checkpoint, began)

    monkeypatch.setattr(Saver, "_write", write)
    run = run_train(words)
    assert seen == [True] * 3 and saved_steps(run) == [4, 8, 12] and same_weights(run, whole)


def test_a_host_that_has_no_memory_for_the_copy_after_all_saves_without_one(tiny, monkeypatch):
    words = tiny.words("save.every_steps=4", "save.keep=9")

    def full(self, key, tensor):
        raise RuntimeError("CUDA error: out of memory")  # what pinned memory says

    monkeypatch.setattr(snapshot.Snapshots, "_buffer", full)
    run = run_train(words)
    assert saved_steps(run) == [4, 8, 12] and same_weights(run, tiny.whole())


def test_memory_that_runs_out_while_a_checkpoint_is_written_is_reported_and_the_next_one_succeeds(tiny, monkeypatch):
    words = tiny.words("save.every_steps=4", "save.keep=9")
    real, calls = tensors._bytes, []

    def full(tensor):
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError
        return real(tensor)

    monkeypatch.setattr(tensors, "_bytes", full)
    run = run_train(words)
    assert saved_steps(run) == [8, 12] and len(events(run, "save_failed")) == 1
    assert not list(run.checkpoints.glob(".*")) and same_weights(run, tiny.whole())


def test_host_memory_that_gets_short_is_reported_once_and_copies_are_given_up(tiny, monkeypatch, capsys):
    words = tiny.words("save.every_steps=2", "save.keep=9")
    short = [False]
    plenty, scarce = Memory(100 << 30, 90 << 30, 100 << 30), Memory(100 << 30, 4 << 30, 100 << 30)
    monkeypatch.setattr(pressure, "memory", lambda: scarce if short[0] else plenty)
    monkeypatch.setattr(snapshot, "memory", lambda: plenty)
    taken = []
    real = snapshot.Snapshots.take
    monkeypatch.setattr(snapshot.Snapshots, "take", lambda self, c: (taken.append(c.step), real(self, c))[1])
    after_step(monkeypatch, {5: lambda: short.__setitem__(0, True)})
    run = run_train(words)
    assert taken == [2, 4] and saved_steps(run) == [2, 4, 6, 8, 10, 12]
    assert len(events(run, "low_host_memory")) == 1
    assert capsys.readouterr().out.count("GiB of host memory are free") == 1
    assert same_weights(run, tiny.whole())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_save_that_fails_is_reported_and_the_next_one_succeeds(tiny, monkeypatch, capsys, number):
    words = tiny.words("save.every_steps=3", "save.keep=9")
    _troubled(monkeypatch, number, lambda step: step == 3)
    run = run_train(words)
    assert saved_steps(run) == [6, 9, 12] and run.status().state == "done"
    (event,) = events(run, "save_failed")
    assert os.strerror(number) in event["message"] and "step 3" in event["message"]
    assert "training continues and saving is tried again later" in capsys.readouterr().out
    assert not list(run.checkpoints.glob(".*")) and same_weights(run, tiny.whole())


def test_a_failed_save_leaves_the_checkpoint_before_it_whole(tiny, monkeypatch):
    words = tiny.words("save.every_steps=3", "save.keep=1")
    _troubled(monkeypatch, errno.EIO, lambda step: step > 3)
    with pytest.raises(RunFailed, match="step 12 could not be written: Input/output error"):
        run_train(words)
    run = run_of(words)
    assert saved_steps(run) == [3] and find_damage(run.checkpoints / "step-00000003") is None
    assert (run.checkpoints / "latest").read_text() == "step-00000003\n"
    assert run.status().state == "failed" and run.status().resumable
    assert "no other place could be written either" in run.status().message
    assert f"the finished model is in {run.final}" in run.status().message and same_weights(run, tiny.whole())
    monkeypatch.undo()
    run_train(words)
    assert same_weights(run, tiny.whole()) and losses(run) == losses(tiny.whole())


def test_a_full_disk_ends_no_run_though_no_line_can_be_written_either(tiny, monkeypatch):
    """Everything under the run's folder fails for a while: metrics, events, status, books, checkpoints."""
    words = tiny.words("save.every_steps=3", "save.keep=9")
    from sojourn.storage import files

    full = [False]
    write, sync, opened = disk.write, disk.sync, files.append_json

    def refuse(real):
        def call(*arguments):
            if full[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        return call

    from sojourn.run import folder

    monkeypatch.setattr(disk, "write", refuse(write))
    monkeypatch.setattr(disk, "sync", refuse(sync))
    monkeypatch.setattr(folder, "append_json", refuse(opened))
    after_step(monkeypatch, {4: lambda: full.__setitem__(0, True), 8: lambda: full.__setitem__(0, False)})
    run = run_train(words)
    assert run.status().state == "done" and set(saved_steps(run)) - {3} == {9, 12}  # the 3rd may have been under way
    assert same_weights(run, tiny.whole())


def test_a_run_that_cannot_save_for_too_long_stops_before_more_is_at_risk(tiny, monkeypatch):
    words = tiny.words("save.every_steps=2", "save.at_risk=0.001s")
    _troubled(monkeypatch, errno.ENOSPC, lambda step: step > 2)
    with pytest.raises(RunFailed, match=r"nothing could be saved for .*No space left.*\(save\.at_risk\)") as told:
        run_train(words)
    run = run_of(words)
    assert "run the same command to resume from step 2" in str(told.value) and "\n" not in str(told.value)
    assert saved_steps(run) == [2] and run.status().resumable


def test_a_run_that_saves_well_is_never_at_risk(tiny):
    assert run_train(tiny.words("save.at_risk=0.001s", "save.every_steps=2")).status().state == "done"


def test_the_best_the_milestones_and_the_last_few_stay(tiny, monkeypatch):
    words = tiny.words(
        "save.every_steps=1", "save.keep=2", "save.milestones=5", "data.eval_fraction=0.2", "train.eval_every=1"
    )
    from sojourn.train import evaluation

    scores = iter([3.0, 2.0, 1.0] + [2.5] * 9)
    monkeypatch.setattr(evaluation, "evaluate_rows", lambda *arguments: (next(scores), 0.5))
    run = run_train(words)
    assert saved_steps(run) == [3, 5, 10, 11, 12]
    assert [event["step"] for event in events(run, "best")] == [1, 2, 3] and (run.best / "config.json").is_file()


def test_a_save_under_way_when_the_next_is_due_is_not_disturbed(tiny, monkeypatch):
    words = tiny.words(*OFTEN, "save.keep=99")
    begun, ended = [], []
    real = Saver._write

    def write(self, checkpoint, began):
        assert begun == ended, "two saves at once"
        begun.append(checkpoint.step)
        saved = real(self, checkpoint, began)
        ended.append(checkpoint.step)
        return saved

    monkeypatch.setattr(Saver, "_write", write)
    run = run_train(words)
    assert begun == ended == saved_steps(run) and begun[-1] == 12
    assert all(find_damage(path) is None for path in run.checkpoints.glob("step-*"))


Usage = namedtuple("Usage", "total used free")


def _made(step, size=1000):
    import torch

    made = {"a": torch.full((size,), float(step))}
    return Checkpoint(made, made, {"cpu": torch.get_rng_state()}, {"step": step})


def _nearly_full(monkeypatch, folder, room):
    """A disk on which `room` checkpoints fit."""
    one = _made(1).size

    def usage(path):
        there = len([path for path in folder.glob("step-*") if (path / "model.safetensors").exists()])
        return Usage(10 * one, 0, (room - there) * one + one // 2)

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_older_checkpoints_make_room_on_a_nearly_full_disk(tmp_path, monkeypatch):
    _nearly_full(monkeypatch, tmp_path, room=3)
    for step in range(1, 7):
        save(tmp_path, _made(step), Retention(last=9))
        found, _ = load_newest(tmp_path)
        assert found.step == step
    assert len(list(tmp_path.glob("step-*"))) == 3


def test_the_newest_good_checkpoint_never_makes_room(tmp_path, monkeypatch):
    save(tmp_path, _made(1), Retention(last=9))
    save(tmp_path, _made(2), Retention(last=9))
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"spoiled")
    _nearly_full(monkeypatch, tmp_path, room=1)
    with pytest.raises(RunFailed, match="free some space, or set save"):
        save(tmp_path, _made(3), Retention(last=9))
    found, _ = load_newest(tmp_path)
    assert found.step == 1 and not list(tmp_path.glob(".*"))


def test_neither_the_best_nor_a_milestone_nor_one_being_copied_makes_room(tmp_path, monkeypatch):
    keep = Retention(last=1, best=1, milestones=2, in_use=3)
    for step in (1, 2, 3, 5):
        save(tmp_path, _made(step), Retention(last=9))
    _nearly_full(monkeypatch, tmp_path, room=4)
    with pytest.raises(RunFailed, match="free some space, or set save"):
        save(tmp_path, _made(7), keep)
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("step-*")) == [1, 2, 3, 5]


def test_a_copy_in_memory_is_made_again_in_the_same_place_and_is_a_copy():
    import torch

    copies = snapshot.Snapshots()
    one = _made(1)
    first = copies.take(one)
    one.model["a"].fill_(7.0)
    assert float(first.model["a"][0]) == 1.0
    second = copies.take(one)
    assert second.model["a"].data_ptr() == first.model["a"].data_ptr() and float(second.model["a"][0]) == 7.0
    wider = Checkpoint({"a": torch.ones(5, 5)}, {}, one.random, {"step": 2})
    assert copies.take(wider).model["a"].shape == (5, 5)


def test_another_machine_continues_from_the_mirror_alone(tiny, monkeypatch, tmp_path):
    """Another home, the data at another place, nothing of the first machine but the mirror."""
    whole = tiny.whole(*LORA, "method.dropout=0.3")
    mirror = tmp_path / "mirror"
    words = tiny.words(*LORA, "method.dropout=0.3", f"save.mirror={mirror}", "save.every_steps=4")
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 6)
        run_train(words)
    assert [event["path"] for event in events(run_of(words), "mirrored")][-1] == "step-00000006"
    there = tmp_path / "machine"
    there.mkdir()
    moved = there / "questions.jsonl"
    moved.write_bytes(tiny.chats.read_bytes())
    with monkeypatch.context() as patch:
        patch.setenv("SOJOURN_HOME", str(there))
        patch.chdir(there)
        run = run_train([word.replace(str(tiny.chats), str(moved)) for word in words])
        assert run.path.is_relative_to(there)
        assert [event["step"] for event in events(run, "start")][-1] == 6
        assert read_json(run.ledger)["seconds"] > 0
    assert same_weights(run, whole) and losses(run) == losses(whole)


def test_a_mirror_that_fails_for_a_while_ends_no_run_and_is_caught_up(tiny, monkeypatch, tmp_path, capsys):
    """Its drive is unmounted at step 3 and mounted again at step 9: nothing is written to the folder below."""
    mirror, away = tmp_path / "drive" / "mirror", tmp_path / "away"
    mirror.mkdir(parents=True)
    words = tiny.words(f"save.mirror={mirror}", "save.every_steps=4", "save.keep=9")

    def unmount():
        mirror.rename(away)
        mirror.mkdir()

    def mount():
        assert _wait_for(lambda: events(run_of(words), "mirror_failed"))
        assert list(mirror.iterdir()) == []
        mirror.rmdir()
        away.rename(mirror)

    after_step(monkeypatch, {3: unmount, 9: mount})  # the save of step 8 has waited for that of step 4
    run = run_train(words)
    assert events(run, "mirror_failed")[0]["path"] == "step-00000004"
    assert "could not be mirrored" in (out := capsys.readouterr().out) and "check that the drive is mounted" in out
    there = mirror / run.path.name
    assert {path.name for path in (there / "checkpoints").glob("step-*")} == {f"step-{n:08d}" for n in (4, 8, 12)}
    assert (there / "final" / "config.json").is_file() and run.status().state == "done"


def _wait_for(condition):
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def test_a_stop_whose_mirror_failed_says_so_and_is_no_success(tiny, monkeypatch, tmp_path):
    mirror = tmp_path / "drive" / "mirror"
    mirror.mkdir(parents=True)
    words = tiny.words(f"save.mirror={mirror}")
    after_step(monkeypatch, {4: lambda: mirror.rename(tmp_path / "away")})
    stop_after(monkeypatch, 5)
    with pytest.raises(RunFailed, match=r"but not mirrored: .* check that the drive is mounted"):
        run_train(words)
    run = run_of(words)
    assert run.status().state == "stopped" and saved_steps(run) == [5] and not mirror.exists()


def test_a_finished_model_that_did_not_reach_the_mirror_is_no_success_and_is_mirrored_by_the_next_call(
    tiny, monkeypatch, tmp_path
):
    mirror, away = tmp_path / "drive" / "mirror", tmp_path / "away"
    mirror.mkdir(parents=True)
    words = tiny.words(f"save.mirror={mirror}", "save.every_steps=4")

    def unmount():
        assert _wait_for(lambda: events(run_of(words), "mirrored"))
        mirror.rename(away)

    with monkeypatch.context() as patch:
        after_step(patch, {12: unmount})
        with pytest.raises(RunFailed, match=r"the finished model is in .*final, but not in the mirror"):
            run_train(words)
    run = run_of(words)
    assert run.has_final() and run.status().state == "failed" and run.status().resumable
    with pytest.raises(UserError, match="was the mirror of this run and is empty now; mount the drive"):
        mirror.mkdir()  # nothing has made it anew
        run_train(words)
    mirror.rmdir()
    away.rename(mirror)
    run_train(words)
    assert run.status().state == "done" and (mirror / run.path.name / "final" / "config.json").is_file()
    assert (mirror / run.path.name / "checkpoints" / "step-00000012" / "manifest.json").is_file()


def test_the_status_follows_the_run_between_saves(tiny, monkeypatch):
    """However rarely it saves; how often is a matter of seconds, not of steps."""
    words, seen = tiny.words("train.steps=4"), []
    run = run_of(words)
    monkeypatch.setattr(steps_module, "_STATUS_SECONDS", 0.0)
    after_step(monkeypatch, {n: lambda: seen.append(run.status().step) for n in range(1, 5)})
    run_train(words)
    assert seen == [0, 1, 2, 3]
