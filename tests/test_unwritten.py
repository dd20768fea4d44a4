"""Logging never stops training: standard output, metrics, events, status, TensorBoard and log files may all fail."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fork_server import needs_fork
from mounts import mounted_tmpfs
from sojourn.config.load import load_run
from sojourn.errors import Stopped
from sojourn.run import output, unwritten
from sojourn.run.folder import RunFolder
from sojourn.run.output import LossyStream
from sojourn.train.metrics.meters import Meters, MfuInputs
from sojourn.train.metrics.tensorboard_file import TensorBoardFile
from sojourn.train.step import Stepper
from tiny import events, losses, run_of, run_train, same_weights, saved_steps

# How standard output and standard error fail: Python that runs in the new process before the command.
_FULL = "os.dup2(os.open('/dev/full', os.O_WRONLY), {0})"
_NO_READER = "ends = os.pipe(); os.dup2(ends[1], {0}); os.close(ends[0])"
_CLOSED = "import sys; os.close({0}); sys.{1} = None"


@needs_fork
@pytest.mark.parametrize(
    ("how", "message", "both"),
    [
        pytest.param(_FULL, "No space left on device", True, id="both-> /dev/full"),
        pytest.param(_NO_READER, "Broken pipe", False, id="stdout-| head"),
        pytest.param(_CLOSED, "", True, id="both->&-"),
        pytest.param(_FULL, "No space left on device", False, id="stdout-> /dev/full", marks=pytest.mark.slow),
        pytest.param(_NO_READER, "Broken pipe", True, id="both-| head", marks=pytest.mark.slow),
        pytest.param(_CLOSED, "", False, id="stdout->&-", marks=pytest.mark.slow),
    ],
)
def test_a_run_trains_to_its_end_though_nothing_can_be_printed(tiny, fork_server, how, message, both):
    words = tiny.words()
    preamble = how.format(1, "stdout") + (f"\n{how.format(2, 'stderr')}" if both else "")
    ended = fork_server.run("train", *words, preamble=preamble)
    run = run_of(words)
    assert ended.returncode == 0, ended.stderr
    assert run.status().state == "done" and same_weights(run, tiny.whole())
    if both or not message:
        assert ended.stderr == ""
    else:
        first, last = ended.stderr.splitlines()
        assert first == f"warning: standard output: {message}; not written, training continues"
        assert last.startswith("warning: not written while training went on: standard output")
    assert [list(event["times"]) for event in events(run, "not_written")] == [
        names for names in [["standard output", "standard error"][: 1 + both]] if message
    ]


@needs_fork
def test_errors_keep_their_exit_code_though_they_cannot_be_printed(fork_server, home):
    assert fork_server.run("train", "nonsense=1", preamble=_FULL.format(2)).returncode == 2
    assert fork_server.run("train", "nonsense=1", preamble=_CLOSED.format(2, "stderr")).returncode == 2
    shown = fork_server.run("presets", "list", preamble=_FULL.format(1))
    assert shown.returncode == 1 and shown.stderr.count("\n") == 1 and "No space left on device" in shown.stderr
    assert fork_server.run("presets", "list", preamble=_NO_READER.format(1)).stderr == ""
    assert fork_server.run("presets", "list", preamble=_CLOSED.format(1, "stdout")).returncode == 0


# Trains on the disk `DISK`, which is full from the 4th step until the step `UNTIL`; its log is on the same disk.
_FILLING = """
os.dup2(os.open("DISK/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
from sojourn.train.step import Stepper
update, steps = Stepper.update, []
def filled(self):
    update(self)
    steps.append(1)
    if len(steps) == 4:
        with open("DISK/somebody-else", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    if len(steps) == UNTIL:
        os.unlink("DISK/somebody-else")
Stepper.update = filled
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_tmpfs(tmp_path / "disk", "size=8m") as folder:
        yield folder


def _on_full_disk(fork_server, disk, words, until):
    words = [*words, f"save.folder={disk}/run", "save.min_free=0", "save.every_steps=6", "log.tensorboard=on"]
    ended = fork_server.run("train", *words, preamble=_FILLING.replace("DISK", str(disk)).replace("UNTIL", str(until)))
    (run,) = (RunFolder(path.parent) for path in disk.glob("run/**/run.yaml"))
    said = ended.stderr + (disk / "log").read_text(errors="replace")  # a line may end inside a character
    assert "Traceback" not in said
    return ended, run, said


@needs_fork
def test_a_full_disk_with_run_folder_and_log_costs_lines_and_no_step(tiny, fork_server, small_disk):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = "train.steps=60"  # files grow beyond the blocks that they have
    ended, run, said = _on_full_disk(fork_server, small_disk, tiny.words(steps), until=50)
    assert ended.returncode == 0, ended.stderr
    assert run.status().state == "done" and same_weights(run, tiny.whole(steps))
    assert "not written while training went on" in said
    (event,) = events(run, "not_written")
    assert {Path(name).name.split(".")[0] for name in event["times"]} >= {"metrics", "events"}
    shown = [e.step for e in EventAccumulator(str(run.logs)).Reload().Scalars("train/loss")]
    assert {1, 2, 3, 58, 59, 60} <= set(shown) < set(range(1, 61)), "the curve goes on after the gap"


@needs_fork
def test_a_run_that_a_full_disk_ends_is_not_called_running(tiny, fork_server, small_disk):
    ended, run, _ = _on_full_disk(fork_server, small_disk, tiny.words(), until=-1)
    assert ended.returncode == 1, ended.stderr
    assert [line for line in ended.stderr.splitlines() if line.startswith("sojourn: ")]
    assert json.loads((run.path / "status.json").read_text())["state"] == "failed"


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "status.json", "logs"])
def test_a_log_that_is_something_else_ends_no_run(tiny, capsys, name):
    words = tiny.words("log.tensorboard=on")
    run = run_of(words)
    run.path.mkdir(parents=True)
    if name == "logs":
        (run.path / name).write_text("")
    else:
        (run.path / name).mkdir()
    run_train(words)
    said = capsys.readouterr().out
    assert run.has_final() and same_weights(run, tiny.whole())
    assert said.count("; not written, training continues\n") == 1
    assert said.count("warning: not written while training went on: ") == 1 and f"/{name}" in said


@needs_fork
def test_ranks_above_0_train_though_their_log_cannot_be_written(tiny, fork_server):
    words = tiny.words("train.micro_batch=1", "train.steps=3", "log.tensorboard=on")
    run = run_of(words)
    run.path.mkdir(parents=True)
    (run.path / "logs").write_text("")
    ended = fork_server.run_ranks(2, words)
    assert ended.codes == [0, 0], ended
    assert run.status().state == "done" and len(losses(run)) == 3


def test_trackers_train_on_without_a_folder_for_their_files(tiny, capsys):
    pytest.importorskip("wandb")
    words = tiny.words("log.trackers=[wandb]", "train.steps=2")
    run = run_of(words)
    run.path.mkdir(parents=True)
    (run.path / "logs").write_text("")
    (run.path / "trackers.json").mkdir()
    run_train(words)
    assert run.status().state == "done" and "trackers.json" in capsys.readouterr().out


@contextlib.contextmanager
def _largest_file(size: int) -> Iterator[None]:
    """Files cannot grow beyond it, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_tensorboard_reads_on_after_a_record_that_did_not_fit(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoardFile(tmp_path, 0)
    board.add_scalars({"train/loss": 1.0}, 1)
    (path,) = tmp_path.iterdir()
    with _largest_file(path.stat().st_size + 10):
        board.add_scalars({"train/loss": 2.0}, 2)
    board.add_scalars({"train/loss": 3.0}, 3)
    assert [e.step for e in EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")] == [1, 3]
    assert "File too large; not written" in capsys.readouterr().out


def test_a_status_is_written_over_the_old_one_where_no_new_file_fits(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    run.set_status("running", 3, 12, "a long message of which nothing may stay")
    with monkeypatch.context() as patch:
        patch.setattr("sojourn.storage.disk.write", _raise_full)
        run.set_status("failed", 3, 12)
    assert (run.status().state, run.status().message) == ("failed", "")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def _raise_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Pipe:
    """A file that takes so many bytes at a time, or fails."""

    encoding, errors = "ascii", "strict"

    def __init__(self, *takes: int | Exception | None) -> None:
        self.content, self._takes, self.buffer = b"", list(takes), self

    def write(self, data: bytes) -> int | None:
        take = self._takes.pop(0) if self._takes else len(data)
        if isinstance(take, Exception):
            raise take
        self.content += bytes(data[: take or 0])
        return take


@pytest.mark.parametrize(
    ("takes", "content"),
    [
        ([], b"one\ntwo\n"),
        ([1, 1], b"one\ntwo\n"),
        ([1, OSError(errno.EIO, "lost")], b"o\ntwo\n"),
        ([None], b"two\n"),
        ([ValueError("I/O operation on closed file")], b"two\n"),
    ],
)
def test_a_line_that_was_cut_short_does_not_spoil_the_next(takes, content, capsys):
    pipe = _Pipe(*takes)
    print("one", file=(stream := LossyStream(pipe, "a test")))
    print("two", file=stream, flush=True)
    assert pipe.content == content


@needs_fork
def test_a_reader_that_does_not_read_loses_lines_and_holds_up_nothing(monkeypatch, capsys):
    """A paused terminal, `| less`, a container's log that nobody takes."""
    monkeypatch.setattr(output, "_PATIENCE", 0.01)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as end, os.fdopen(writer, "w") as pipe:
        stream = LossyStream(pipe, "a pipe")
        for _ in range(2000):
            print("x" * 99, file=stream)
        taken = end.read(1 << 20)
        print("read again", file=stream)
        assert end.read(1 << 20).endswith(b"read again\n")
    assert 0 < len(taken) < 2000 * 100
    assert "a pipe: its reader does not read; not written" in capsys.readouterr().out


def test_what_the_encoding_of_a_stream_lacks_is_escaped():
    pipe = _Pipe()
    print("5 €", file=LossyStream(pipe, "a test"))
    assert pipe.content == b"5 \\u20ac\n"


def test_failing_streams_do_not_call_each_other_for_ever(monkeypatch):
    monkeypatch.setattr(unwritten, "_counts", unwritten.Counter())
    for name, what in (("stdout", unwritten.STDOUT), ("stderr", unwritten.STDERR)):
        monkeypatch.setattr(sys, name, LossyStream(_Pipe(*[OSError(errno.EIO, "gone")] * 99), what))
    print("one")
    print("two")
    assert unwritten._counts == {unwritten.STDOUT: 2, unwritten.STDERR: 1}
    assert isinstance(sys.__stdout__, io.TextIOBase)


def _after_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    update, made = Stepper.update, []

    def acting(self: Stepper) -> None:
        update(self)
        made.append(1)
        if len(made) == step:
            act()

    monkeypatch.setattr(Stepper, "update", acting)


def _take_away(folder: Path, how: str) -> None:
    if how == "moved":
        folder.rename(folder.with_name(f"{folder.name}-away"))
    while folder.exists():  # a save that is being written may put a file there meanwhile
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("how", ["moved", "deleted"])
@pytest.mark.parametrize("saves", ["save.every_steps=4", "save.every_steps=null"])
def test_a_run_whose_folder_is_gone_goes_on_in_a_new_one(tiny, monkeypatch, capsys, how, saves):
    words = tiny.words(saves, "log.tensorboard=on")
    run = run_of(words)
    _after_step(monkeypatch, 6, lambda: _take_away(run.path, how))
    run_train(words)
    said = capsys.readouterr().out
    assert run.status().state == "done" and same_weights(run, tiny.whole())
    assert said.count("was moved or deleted") == 1
    assert set(saved_steps(run)) >= {12} and len(losses(run)) >= 6
    assert run.exists() and run.environment.is_file()
    assert run.path.with_name(f"{run.path.name}-away").exists() == (how == "moved")


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_signal_after_the_folder_is_gone_saves_everything(tiny, monkeypatch, how):
    words = tiny.words("log.tensorboard=on")
    run = run_of(words)

    def strike() -> None:
        _take_away(run.path, how)
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        _after_step(patch, 6, strike)
        with pytest.raises(Stopped):
            run_train(words)
    assert run.status().state == "stopped" and saved_steps(run) == [6]
    run_train(words)
    assert same_weights(run, tiny.whole())


def test_a_run_whose_folder_another_run_takes_saves_beside_it_and_stops(tiny, monkeypatch, capsys):
    words, others = tiny.words("save.every_steps=4"), tiny.whole("train.seed=3")
    run = run_of(words)
    beside = RunFolder(run.path.with_name(f"{run.path.name}-rescued-1"))

    def take_over() -> None:
        _take_away(run.path, "moved")
        shutil.copytree(others.path, run.path)

    with monkeypatch.context() as patch:
        _after_step(patch, 6, take_over)
        with pytest.raises(Stopped, match=f"stopped by another run in its folder at step 6 .* saved in {beside.path}"):
            run_train(words)
    assert "was replaced by another run" in capsys.readouterr().out
    assert saved_steps(run) == saved_steps(others) and run.status().state == "done"
    assert saved_steps(beside) == [6] and beside.status().state == "stopped"
    run_train([*words, f"name={beside.path.name}"])
    assert same_weights(beside, tiny.whole())


def test_a_file_name_that_is_not_utf8_can_be_logged(tmp_path):
    run, name = RunFolder(tmp_path), os.fsdecode(b"data-\xff.jsonl")
    run.event("failed", message=name)
    run.set_status("failed", 0, 0, message=name)
    assert events(run, "failed")[0]["message"] == name and run.status().message == "data-?.jsonl"  # which prints


def test_a_number_that_json_lacks_costs_its_line_only(tmp_path, capsys):
    run = RunFolder(tmp_path)
    run.event("loss", value=float("nan"))
    run.event("loss", value=1.0)
    assert [event["value"] for event in events(run, "loss")] == [1.0]
    assert "events.jsonl: Out of range float values" in capsys.readouterr().out


def test_ranks_above_0_write_no_curves_and_start_no_trackers(tmp_path):
    run = RunFolder(tmp_path, is_main_process=False)
    config = load_run(["smoke", "log.tensorboard=on", "log.trackers=[wandb]"]).config
    with Meters(run, config, 10, 0, MfuInputs()) as meters:
        meters.log(1, 2.0, 1e-3, 1.0, 0.1, 100, spent=None)
    assert list(tmp_path.iterdir()) == []
