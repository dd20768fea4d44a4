"""A run resumes from the newest good checkpoint of its own, wherever that is, and takes nothing of another run."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from mounts import mounted_tmpfs
from sojourn.errors import RunFailed, Stopped, UserError
from sojourn.run.checkpoints import find_damage
from sojourn.storage.files import read_json
from tiny import after_step, events, losses, run_of, run_train, same_weights, saved_steps, stop_after

OFTEN = ("save.every_steps=3", "save.keep=2")


def _train_until(words, step, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, step)
        run_train(words)
    return run_of(words)


def _flip(checkpoint: Path, file: str = "model.safetensors") -> None:
    data = bytearray((checkpoint / file).read_bytes())
    data[-1] ^= 1
    (checkpoint / file).write_bytes(data)


def _step(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _first_steps(run) -> list[int]:
    """From which step each call of `train` went on."""
    return [event["step"] for event in events(run, "start")]


def test_damaged_checkpoints_are_set_aside_and_never_make_good_ones_go(tiny, monkeypatch):
    words = tiny.words(*OFTEN)
    run = _train_until(words, 9, monkeypatch)
    assert saved_steps(run) == [6, 9]
    for step in (6, 9):
        _flip(_step(run.checkpoints, step))
    _train_until(words, 6, monkeypatch)
    assert _first_steps(run) == [0, 0] and saved_steps(run) == [3, 6]
    assert all(find_damage(_step(run.checkpoints, step)) is None for step in (3, 6))
    assert (run.checkpoints / "latest").read_text() == "step-00000006\n"
    assert sorted(path.name for path in run.checkpoints.glob("damaged-*")) == [
        "damaged-step-00000006",
        "damaged-step-00000009",
    ]
    run_train(words)
    assert _first_steps(run) == [0, 0, 6] and same_weights(run, tiny.whole()) and losses(run) == losses(tiny.whole())


def test_a_checkpoint_without_its_manifest_is_set_aside_not_removed(tiny, monkeypatch):
    words = tiny.words(*OFTEN)
    run = _train_until(words, 9, monkeypatch)
    (_step(run.checkpoints, 9) / "manifest.json").unlink()
    run_train(words)
    assert _first_steps(run) == [0, 6] and (run.checkpoints / "damaged-step-00000009" / "model.safetensors").is_file()
    assert same_weights(run, tiny.whole())


@pytest.mark.parametrize(
    ("local", "mirrored", "resumed"),
    [((9,), (), 9), ((6, 9), (9,), 6), pytest.param((9,), (9,), 6, marks=pytest.mark.slow), ((6, 9), (6, 9), 0)],
    ids=["newest here", "one good copy of each", "newest in both", "all"],
)
def test_for_each_step_the_good_copy_is_taken(tiny, monkeypatch, tmp_path, local, mirrored, resumed):
    """`local`, `mirrored`: the steps that are damaged there; both have 6 and 9."""
    words = tiny.words(*OFTEN, f"save.mirror={tmp_path}")
    run = _train_until(words, 9, monkeypatch)
    there = tmp_path / run.path.name / "checkpoints"
    assert sorted(path.name for path in there.glob("step-*")) == ["step-00000006", "step-00000009"]
    shutil.rmtree(_step(run.checkpoints, 3), ignore_errors=True)  # it stays where it was being mirrored at step 9
    for folder, steps in ((run.checkpoints, local), (there, mirrored)):
        for step in steps:
            _flip(_step(folder, step))
    run_train(words)
    assert _first_steps(run) == [0, resumed] and same_weights(run, tiny.whole())
    assert all(find_damage(path) is None for folder in (run.checkpoints, there) for path in folder.glob("step-*"))


def test_a_mirror_that_holds_another_run_of_the_same_name_is_refused(tiny, monkeypatch, tmp_path):
    words = tiny.words(*OFTEN, "train.seed=7", f"save.mirror={tmp_path / 'mirror'}")
    run_train(words)
    other = [word.replace("train.seed=7", "train.seed=8") for word in words]
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path / "home"))
    tiny.shared.copy_prepared(tmp_path / "home")
    with pytest.raises(UserError, match=r"train\.seed was 7, now 8"):  # a new machine: no run here yet
        run_train(other)
    shutil.rmtree(tmp_path / "home" / "runs")
    run = _train_until([word for word in other if "mirror" not in word], 3, monkeypatch)
    for _ in range(2):  # also the second time
        with pytest.raises(UserError, match=r"holds another run of this name .* name=NEW, or another mirror"):
            run_train(other)
    assert saved_steps(run) == [3] and not run.has_final()
    # The same where the mirror's own identity is lost: its checkpoints carry it too.
    (tmp_path / "mirror" / run.path.name / "identity.json").unlink()
    (tmp_path / "mirror" / run.path.name / "run.yaml").unlink()
    with pytest.raises(UserError, match="holds checkpoints of another run"):
        run_train(other)
    assert saved_steps(run) == [3] and not run.has_final()


def test_a_mirror_of_an_older_version_with_another_run_is_refused(tiny, monkeypatch, tmp_path):
    """It has no identity anywhere: the settings are compared."""
    from sojourn.run.identity import Identity

    words = tiny.words(*OFTEN, "train.seed=7", f"save.mirror={tmp_path}")
    with monkeypatch.context() as patch:
        patch.setattr(Identity, "mark", {})
        run = run_train(words)
    (tmp_path / run.path.name / "identity.json").unlink()
    shutil.rmtree(run.path)
    other = [word.replace("train.seed=7", "train.seed=8") for word in words]
    _train_until([word for word in other if "mirror" not in word], 3, monkeypatch)
    with pytest.raises(UserError, match=r"holds another run of this name \(train.seed was 7, now 8\)"):
        run_train(other)


def test_a_checkpoint_or_a_model_of_another_run_is_refused_by_name(tiny, monkeypatch):
    other = run_train(tiny.words("train.seed=7"))
    words = tiny.words(*OFTEN)
    run = _train_until(words, 6, monkeypatch)
    shutil.copytree(_step(other.checkpoints, 12), _step(run.checkpoints, 12))
    with pytest.raises(UserError, match=r"step-00000012: a checkpoint of another run; move it away"):
        run_train(words)
    shutil.rmtree(_step(run.checkpoints, 12))
    shutil.copytree(other.final, run.final)
    with pytest.raises(UserError, match="final: the model of another run; move it away"):
        run_train(words)
    assert same_weights(run, other)  # it was not replaced
    shutil.rmtree(run.final)
    run_train(words)
    assert same_weights(run, tiny.whole())
    assert read_json(run.final / "sojourn.json") == {**_mark(run), "step": 12}


def _mark(run):
    identity = read_json(run.identity)
    return {"run_id": identity["run_id"], "settings": identity["settings"]}


@pytest.mark.parametrize(
    "damaged", ["identity.json", *(pytest.param(n, marks=pytest.mark.slow) for n in ("run.yaml", "environment.json"))]
)
def test_a_damaged_file_of_the_mirror_beside_sound_checkpoints_is_no_obstacle(tiny, monkeypatch, tmp_path, damaged):
    words = tiny.words(*OFTEN, f"save.mirror={tmp_path / 'mirror'}")
    run = _train_until(words, 9, monkeypatch)
    (tmp_path / "mirror" / run.path.name / damaged).write_text("name: [")
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path / "home"))
    tiny.shared.copy_prepared(tmp_path / "home")
    run = run_train(words)
    assert run.path.is_relative_to(tmp_path) and _first_steps(run)[-1] == 9 and same_weights(run, tiny.whole())


def test_a_damaged_run_yaml_beside_sound_checkpoints_is_no_obstacle_unless_the_settings_differ(
    tiny, monkeypatch, capsys
):
    words = tiny.words(*OFTEN)
    run = _train_until(words, 6, monkeypatch)
    run.config.write_text("name: [")
    with pytest.raises(UserError, match=r"started with other settings or other data, and its run.yaml cannot be read"):
        run_train([*words, "train.lr=0.7"])
    run.config.write_text("name: [")
    capsys.readouterr()
    run_train(words)
    assert capsys.readouterr().out.count("it is written again") == 1
    assert _first_steps(run) == [0, 6] and same_weights(run, tiny.whole())


def test_a_lost_identity_is_found_again_in_the_checkpoints(tiny, monkeypatch):
    words = tiny.words(*OFTEN)
    run = _train_until(words, 6, monkeypatch)
    mark = _mark(run)
    run.identity.write_text("{")
    run_train(words)
    assert _mark(run) == mark and _first_steps(run) == [0, 6] and same_weights(run, tiny.whole())


def test_nothing_is_removed_through_a_symlink(tiny, monkeypatch, tmp_path):
    other = run_train(tiny.words("save.every_steps=3", "save.keep=9"))
    precious = tmp_path / "precious"
    shutil.copytree(other.checkpoints, precious)
    words = tiny.words("save.every_steps=3", "save.keep=1")
    run = _train_until(words, 6, monkeypatch)
    _step(run.checkpoints, 3).symlink_to(_step(precious, 3))
    for name in (".stage-1-step-00000009", ".old-step-00000009", ".removing-step-00000001", ".latest.123"):
        (run.checkpoints / name).symlink_to(precious)
    (run.path / ".status.json.77").symlink_to(precious / "latest")
    run_train(words)
    assert saved_steps(run) == [12] and same_weights(run, tiny.whole())
    assert sorted(path.name for path in precious.glob("step-*")) == [f"step-{n:08d}" for n in (3, 6, 9, 12)]
    assert all(find_damage(path) is None for path in precious.glob("step-*")) and (precious / "latest").is_file()


def _use_all_inodes(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for number in range(300):
            (folder / f"other-{number}").touch()


@pytest.mark.parametrize("fault", ["no inodes", pytest.param("read-only", marks=pytest.mark.slow)])
def test_a_last_save_that_fails_is_written_elsewhere_and_resumed_from_there(tiny, monkeypatch, fault):
    words = tiny.words("save.every_steps=3", "save.keep=9", "save.min_free=0")
    run = run_of(words)
    with mounted_tmpfs(run.checkpoints, "size=50m,nr_inodes=200"):
        read_only = ["mount", "-o", "remount,ro", str(run.checkpoints)]
        fail = {
            "read-only": lambda: subprocess.run(read_only, check=True),
            "no inodes": lambda: _use_all_inodes(run.checkpoints),
        }
        after_step(monkeypatch, {8: fail[fault]})
        with monkeypatch.context() as patch, pytest.raises(RunFailed, match=r"it was written to .* instead") as error:
            stop_after(patch, 11)
            run_train(words)
        path = Path(str(error.value).rpartition("save.resume=")[2])
        assert path.name == "step-00000011" and find_damage(path) is None
        assert 11 not in saved_steps(run)
    monkeypatch.undo()
    monkeypatch.setenv("SOJOURN_HOME", str(tiny.home))
    run_train([*words, f"save.resume={path}"])
    assert _first_steps(run)[-1] == 11 and same_weights(run, tiny.whole())
    shutil.rmtree(path.parent)


def test_a_finished_model_that_cannot_be_written_is_written_elsewhere(tiny, monkeypatch):
    words = tiny.words("save.min_free=0")
    run = run_of(words)
    with mounted_tmpfs(run.path, "size=50m,nr_inodes=200"):
        after_step(monkeypatch, {12: lambda: _use_all_inodes(run.path)})
        with pytest.raises(RunFailed, match=r"the finished model is in .*instead") as error:
            run_train(words)
    path = Path(str(error.value).rpartition("the finished model is in ")[2].partition(" instead")[0])
    assert same_weights(type(run)(path.parent), tiny.whole())
    shutil.rmtree(path.parent)
