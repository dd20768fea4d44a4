"""Signals in every phase of a run: saved within the grace, at most the current step lost, resumable, nothing hangs."""

import json
import signal
import threading
import time

import pytest

from fork_server import needs_fork
from sojourn.config.quantities import Duration
from sojourn.config.schema import LimitsConfig
from sojourn.data.artefact import Batch
from sojourn.errors import Stopped
from sojourn.run.ledger import Ledger
from sojourn.storage import disk
from sojourn.train import evaluation, session
from sojourn.train.batcher import DeviceBatch
from sojourn.train.checkpoint.saving import Saver
from sojourn.train.distributed import open as open_module
from sojourn.train.faults.guard import Guard, Interrupted
from sojourn.train.step import Stepper
from tiny import LORA, events, losses, run_of, run_train, same_weights, saved_steps

DROPOUT = (*LORA, "method.dropout=0.3")
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
HELD_OUT = ("data.eval_fraction=0.2", "train.eval_every=3", "train.patience=9", "train.lr=1e-2")


class Phase:
    """Sends a signal the `when`th time a function is called; the phase then lasts as long as the test lets it."""

    def __init__(self, monkeypatch, owner, name, number=signal.SIGTERM, when=1, lasts=0.0, after=False):
        self.real, self.calls, self.left = getattr(owner, name), 0, False
        self.number, self.when, self.lasts = number, when, lasts
        phase = self

        def call(*arguments, **options):
            phase.calls += 1
            mine = phase.calls == phase.when
            if mine and not after:
                phase.strike()
            result = phase.real(*arguments, **options)
            if mine and after:
                phase.strike()
            return result

        monkeypatch.setattr(owner, name, call)

    def strike(self):
        self.struck = time.monotonic()
        until = self.struck + self.lasts
        try:
            signal.raise_signal(self.number)
            while time.monotonic() < until:
                time.sleep(0.005)
        except BaseException:
            self.left = True
            raise


def _stopped(words, why):
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)}
    with pytest.raises(Stopped, match=f"stopped by {why}") as error:
        run_train(words)
    assert "\n" not in str(error.value)
    run = run_of(words)
    status = run.status()
    assert status.state == "stopped" and status.resumable and status.message == why
    assert [event["why"] for event in events(run, "stopped")][-1] == why
    assert all(signal.getsignal(number) is old for number, old in before.items())
    return run


def _reason_of(number):
    return "Ctrl-C" if number == signal.SIGINT else number.name


@pytest.mark.parametrize(
    "number",
    [*SIGNALS[:2], *(pytest.param(number, marks=pytest.mark.slow) for number in SIGNALS[2:])],
    ids=lambda n: n.name,
)
def test_a_signal_during_a_step_saves_and_the_resumed_run_ends_the_same(tiny, monkeypatch, number):
    parts = (*DROPOUT, "train.micro_batch=4")
    whole, words = tiny.whole(*parts), tiny.words(*parts, "limits.grace=30s")
    with monkeypatch.context() as patch:
        Phase(patch, Stepper, "_loss_sum", number, when=2 * 5)  # the 2nd part of step 5
        run = _stopped(words, _reason_of(number))
    assert run.status().step == 5 and saved_steps(run) == [5]  # 30 s are enough to finish the step
    run_train(words)
    assert same_weights(run, whole) and losses(run) == losses(whole)


@pytest.mark.parametrize(
    "kind", [DROPOUT, pytest.param((), marks=pytest.mark.slow)], ids=["lora with dropout", "pretrain"]
)
def test_a_step_longer_than_the_grace_is_abandoned(tiny, monkeypatch, kind):
    parts = (*kind, "train.micro_batch=4")
    whole, words = tiny.whole(*parts), tiny.words(*parts, "limits.grace=1s")
    with monkeypatch.context() as patch:
        phase = Phase(patch, Stepper, "_loss_sum", when=2 * 5, lasts=60)
        run = _stopped(words, "SIGTERM")
    assert phase.left and run.status().step == 4 and saved_steps(run) == [4]
    run_train(words)
    assert same_weights(run, whole) and losses(run) == losses(whole)


def test_a_step_abandoned_in_its_backward_leaves_no_gradients(tiny, monkeypatch):
    words = tiny.words("train.micro_batch=4", "limits.grace=1s")
    whole = tiny.whole("train.micro_batch=4")
    real, calls = DeviceBatch.target_hidden, []

    def hooked(*arguments):
        hidden = real(*arguments)
        calls.append(1)
        if len(calls) == 10:
            hidden.register_hook(lambda grad: _strike_and_wait())
        return hidden

    def _strike_and_wait():
        signal.raise_signal(signal.SIGTERM)
        while True:
            time.sleep(0.005)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceBatch, "target_hidden", hooked)
        run = _stopped(words, "SIGTERM")
    run_train(words)
    assert same_weights(run, whole) and losses(run) == losses(whole)


def test_a_signal_during_the_optimizer_step_waits_for_its_end(tiny, monkeypatch):
    whole, words = tiny.whole(), tiny.words("limits.grace=0.3s")
    with monkeypatch.context() as patch:
        phase = Phase(patch, Stepper, "update", when=5, lasts=0.5)
        run = _stopped(words, "SIGTERM")
    assert not phase.left and run.status().step == 5
    run_train(words)
    assert same_weights(run, whole) and losses(run) == losses(whole)


OPENING = [(session, "prepare_run", False), (open_module, "build_network", False), (open_module, "Optimizer", True)]


@pytest.mark.parametrize("place", OPENING, ids=["data", "model", "optimizer"])
def test_a_signal_while_opening_a_new_run_stops_at_once(tiny, monkeypatch, place):
    owner, name, after = place
    words = tiny.words("limits.grace=30s")
    with monkeypatch.context() as patch:
        phase = Phase(patch, owner, name, lasts=60, after=after)
        run = _stopped(words, "SIGTERM")
    assert phase.left and saved_steps(run) == []
    run_train(words)
    assert same_weights(run, tiny.whole())


@pytest.mark.parametrize("place", OPENING[:2], ids=["data", "model"])
def test_a_signal_while_resuming_a_run_loses_no_step(tiny, monkeypatch, place):
    owner, name, _ = place
    words = tiny.words()
    with monkeypatch.context() as patch:
        Phase(patch, Stepper, "update", when=5)
        _stopped(words, "SIGTERM")
    with monkeypatch.context() as patch:
        Phase(patch, owner, name, signal.SIGINT, lasts=60)
        with pytest.raises(Stopped) as error:
            run_train(words)
    run = run_of(words)
    assert "before the first step" not in str(error.value) and "run the same command to resume" in str(error.value)
    assert (run.status().state, run.status().step, run.status().total_steps) == ("stopped", 5, 12)
    run_train(words)
    assert same_weights(run, tiny.whole())


def test_a_signal_during_the_rehearsal_or_compilation_stops_at_once(tiny, monkeypatch):
    """The first forward compiles the network, for minutes."""
    words = tiny.words("limits.grace=30s")
    with monkeypatch.context() as patch:
        phase = Phase(patch, Stepper, "_loss_sum", when=1, lasts=60)
        run = _stopped([*words, "train.rehearse=on"], "SIGTERM")
    assert phase.left and run.status().step == 0
    with monkeypatch.context() as patch:
        phase = Phase(patch, Stepper, "_loss_sum", when=1, lasts=60)
        _stopped(words, "SIGTERM")
    assert phase.left
    run_train(words)
    assert same_weights(run, tiny.whole())


@pytest.mark.parametrize("grace", ["0.3s", pytest.param("1s", marks=pytest.mark.slow)])
def test_a_signal_while_waiting_for_data_does_not_wait_for_it(tiny, monkeypatch, grace):
    words = tiny.words(f"limits.grace={grace}")
    hangs, enough = threading.Event(), threading.Event()
    real, number = session.Session.batches, signal.SIGTERM

    def batches(self, step) -> list[Batch]:
        if step == 5 and threading.current_thread() is not threading.main_thread():
            hangs.set()
            enough.wait()  # a network disk that is gone
        return real(self, step)

    def strike():
        hangs.wait()
        while not any(line["step"] == 5 for line in run_of(words).read_metrics()):
            time.sleep(0.01)
        time.sleep(0.3)  # the main thread waits by now, and does not notice a signal in this thread
        signal.pthread_kill(threading.get_ident(), number)

    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "batches", batches)
        threading.Thread(target=strike, daemon=True).start()
        run = _stopped(words, "SIGTERM")
    enough.set()
    assert saved_steps(run) == [5]
    run_train(words)
    assert same_weights(run, tiny.whole())


@pytest.mark.parametrize("name", ["evaluate_rows", "write_final_model"], ids=["scores", "best model"])
def test_an_interrupted_evaluation_is_repeated_by_the_next_call(tiny, monkeypatch, name):
    whole, words = tiny.whole(*HELD_OUT), tiny.words(*HELD_OUT, "limits.grace=0.3s")
    with monkeypatch.context() as patch:
        phase = Phase(patch, evaluation, name, when=2, lasts=60)
        run = _stopped(words, "SIGTERM")
    assert phase.left and run.status().step == 6
    state = json.loads((run.checkpoints / "step-00000006" / "state.json").read_text())
    assert (state["evaluated_step"], state["evaluations_without_improvement"]) == (3, 0)
    run_train(words)
    assert same_weights(run, whole) and losses(run) == losses(whole)
    found, wanted = (
        [(line["step"], line["loss"], line["best"]) for line in one.read_metrics() if line["kind"] == "eval"]
        for one in (run, whole)
    )
    assert found == wanted and [step for step, *_ in found] == [3, 6, 9, 12]
    best, theirs = ((one.best / "model.safetensors").read_bytes() for one in (run, whole))
    assert best == theirs and not list(run.path.glob(".*best*"))


def test_an_evaluation_that_can_be_finished_in_the_grace_is(tiny, monkeypatch):
    words = tiny.words(*HELD_OUT, "limits.grace=30s")
    with monkeypatch.context() as patch:
        phase = Phase(patch, evaluation, "evaluate_rows", when=2)
        run = _stopped(words, "SIGTERM")
    state = json.loads((run.checkpoints / "step-00000006" / "state.json").read_text())
    assert not phase.left and state["evaluated_step"] == 6


def test_a_signal_during_a_save_ends_with_the_newest_step_saved(tiny, monkeypatch):
    """The first save is being written, in its thread, when the signal comes."""
    whole, words = tiny.whole(), tiny.words("save.every=0.001s", "limits.grace=2s")
    writing, go_on = threading.Event(), threading.Event()
    real = disk.write

    def slow(file, data):
        if threading.current_thread().name.startswith("save") and not go_on.is_set():
            writing.set()
            go_on.wait()
        real(file, data)

    update, made = Stepper.update, []

    def strike(self):
        made.append(1)
        update(self)
        if len(made) == 5:
            writing.wait()
            signal.raise_signal(signal.SIGTERM)
            go_on.set()

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", slow)
        patch.setattr(Stepper, "update", strike)
        run = _stopped(words, "SIGTERM")
    assert run.status().step == 5 and max(saved_steps(run)) == 5
    run_train(words)
    assert same_weights(run, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_while_training_waits_for_a_save_lets_it_end(tiny, monkeypatch, number):
    words = tiny.words("save.every_steps=4", "limits.grace=0.3s")
    from sojourn.train.checkpoint.snapshot import Snapshots

    with monkeypatch.context() as patch:
        patch.setattr(Snapshots, "take", lambda self, checkpoint: None)
        phase = Phase(patch, Saver, "_write", signal.SIGTERM, when=10**9)  # only counts
        real = Saver._finish_pending

        def hear(self, wait, **options):
            if wait and self._pending is not None:
                signal.raise_signal(number)
            real(self, wait, **options)

        patch.setattr(Saver, "_finish_pending", hear)
        run = _stopped(words, _reason_of(number))
    assert phase.calls == 1 and run.status().step == 4 and saved_steps(run) == [4]
    assert not list(run.checkpoints.glob(".*"))
    run_train(words)
    assert same_weights(run, tiny.whole())


@pytest.mark.parametrize("grace", ["0.3s", "30s"])
def test_a_signal_while_the_final_model_is_written_leaves_none_or_all_of_it(tiny, monkeypatch, grace):
    words = tiny.words(f"limits.grace={grace}")
    from sojourn.train.checkpoint import final_model as final

    with monkeypatch.context() as patch:
        phase = Phase(patch, final, "sync_file", when=2, lasts=60)
        run = _stopped(words, "SIGTERM")
    assert phase.left and not run.has_final() and not list(run.path.glob(".stage*"))
    assert run.status().step == 12 and saved_steps(run) == [12]
    run_train(words)
    assert run.status().state == "done" and same_weights(run, tiny.whole())


def test_a_signal_after_the_last_step_still_ends_with_a_model_next_time(tiny, monkeypatch):
    words = tiny.words()
    with monkeypatch.context() as patch:
        Phase(patch, Stepper, "update", when=12)
        run = _stopped(words, "SIGTERM")
    assert saved_steps(run) == [12]
    run_train(words)
    assert run.status().state == "done" and same_weights(run, tiny.whole())


def test_a_second_ctrl_c_does_not_wait_for_the_save(tiny, monkeypatch):
    words = tiny.words("save.every_steps=4")
    with monkeypatch.context() as patch:
        Phase(patch, Stepper, "update", signal.SIGINT, when=6)
        real = Saver.save

        def again(self, must=False):
            if must:
                time.sleep(0.2)  # two within a tenth of a second are one
                signal.raise_signal(signal.SIGINT)
            real(self, must)

        patch.setattr(Saver, "save", again)
        with pytest.raises(KeyboardInterrupt):
            run_train(words)
    run = run_of(words)
    assert run.status().state == "failed" and run.status().resumable and saved_steps(run) == [4]
    run_train(words)
    assert same_weights(run, tiny.whole())


def test_two_ctrl_c_at_once_are_one(tiny, monkeypatch):
    """Terminals and wrappers send two."""
    words = tiny.words("save.every_steps=4")
    with monkeypatch.context() as patch:
        Phase(patch, Guard, "_on_signal", signal.SIGINT, after=True)
        Phase(patch, Stepper, "update", signal.SIGINT, when=6)
        run = _stopped(words, "Ctrl-C")
    assert run.status().step == 6 and max(saved_steps(run)) == 6
    run_train(words)
    assert same_weights(run, tiny.whole())


def test_the_second_ctrl_c_of_two_does_not_hit_what_comes_after_the_run(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: signal.raise_signal(signal.SIGINT))
    with Guard(LimitsConfig(), Ledger(None)) as guard:
        signal.raise_signal(signal.SIGINT)
    assert guard.reason == "Ctrl-C"


def test_a_first_ctrl_c_while_a_limit_stops_the_run_does_not_leave_at_once():
    with Guard(LimitsConfig(), Ledger(None), reason="the budget") as guard:
        signal.raise_signal(signal.SIGINT)
    assert guard.reason == "the budget"


_CLOSED_TERMINAL = """
import fcntl, sys, termios
os.setsid()
screen, terminal = os.openpty()
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
for number in range(3):
    os.dup2(terminal, number)
os.close(terminal)
os.set_blocking(screen, False)
from sojourn.train.step import Stepper
update, steps = Stepper.update, []
def closed(self):
    update(self)
    steps.append(1)
    if len(steps) == 5:
        os.close(screen)  # hangs up
    elif len(steps) < 5:
        try:
            os.read(screen, 1 << 20)
        except BlockingIOError:
            pass
Stepper.update = closed
"""


@needs_fork
def test_a_closed_terminal_stops_with_code_3_and_everything_saved(tiny, fork_server):
    """Nothing can be printed to it any more."""
    words = tiny.words("train.steps=5000")
    ended = fork_server.run("train", *words, preamble=_CLOSED_TERMINAL)
    run = run_of(words)
    assert ended.returncode == 3
    status = run.status()
    assert status.state == "stopped" and status.message == "SIGHUP" and saved_steps(run) == [status.step]


def test_further_signals_do_not_disturb_the_stop(tiny, monkeypatch):
    words = tiny.words()
    with monkeypatch.context() as patch:
        Phase(patch, Stepper, "update", signal.SIGTERM, when=5)
        Phase(patch, Saver, "save", signal.SIGTERM)
        Phase(patch, Saver, "finish", signal.SIGHUP)
        run = _stopped(words, "SIGTERM")
    assert saved_steps(run) == [5]


def test_a_hang_up_is_ignored_where_nohup_has_it_ignored(tiny, monkeypatch):
    words = tiny.words()
    Phase(monkeypatch, Stepper, "update", signal.SIGHUP, when=5)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = run_train(words)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.status().state == "done" and same_weights(run, tiny.whole())


def test_a_run_in_another_thread_can_be_trained_though_it_hears_no_signal(tiny):
    words = tiny.words()
    failed = []

    def work():
        try:
            run_train(words)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == [] and run_of(words).status().state == "done"


def test_what_is_reserved_for_saving_shortens_the_time_left_for_a_step(tiny):
    """A step of 3 s fits into a grace of 10 s, but not when saving takes 5 of them."""
    for save_seconds, left in ((1.0, False), (5.0, True)):
        with Guard(LimitsConfig(grace=Duration(10)), Ledger(None)) as guard:
            guard.save_seconds, guard.step_seconds, finished = save_seconds, 3.0, False
            try:
                with guard.interruptible(guard.step_seconds):
                    signal.raise_signal(signal.SIGTERM)
                    finished = True
            except Interrupted:
                pass
            assert finished is not left and guard.reason == "SIGTERM"


@needs_fork
def test_the_command_stops_with_code_3_in_each_way_and_continues(tiny, fork_server):
    """A hang-up under nohup changes nothing, SIGTERM stops it, and the next call goes on from there."""
    words = [*tiny.words("train.steps=5000"), "limits.grace=10s"]
    run = run_of(words)
    nohup = fork_server.start("train", *words, preamble="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    _until_step(run, nohup, 3)
    nohup.send_signal(signal.SIGHUP)
    _until_step(run, nohup, run.read_metrics()[-1]["step"] + 5)
    nohup.send_signal(signal.SIGTERM)
    _, said = nohup.communicate(timeout=60)
    assert nohup.returncode == 3, said
    assert "stopped by SIGTERM at step" in said and "Traceback" not in said
    reached = run.status().step
    assert run.status().state == "stopped" and saved_steps(run) == [reached]
    with pytest.raises(Stopped):
        run_train([*words, "limits.time=0.001s"])
    assert [event["step"] for event in events(run, "start")] == [0, reached] and run.status().step == reached + 1


def _until_step(run, process, step):
    while not any(line["step"] >= step for line in run.read_metrics()):
        assert process.poll() is None, "the run ended too early"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
@pytest.mark.parametrize("seconds", [1, 5, 20, 60])
@pytest.mark.parametrize("grace", [2, 10, 30])
def test_steps_of_every_length_and_every_grace(tiny, monkeypatch, grace, seconds, number):
    """Whatever the lengths, the process is gone, and saved, before the platform would have killed it."""
    words = tiny.words("train.steps=3", f"limits.grace={grace}s")
    with monkeypatch.context() as patch:
        phase = Phase(patch, Stepper, "_loss_sum", number, when=2, lasts=seconds)
        run = _stopped(words, _reason_of(number))
    assert time.monotonic() - phase.struck < grace
    assert run.status().step in (1, 2) and max(saved_steps(run)) == run.status().step
