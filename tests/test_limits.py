"""Time, money and sessions: counted through every kill and move, told in time, and never a step too late."""

import json
import os
import signal
import time
from decimal import Decimal

import psutil
import pytest

from sojourn.catalog.platforms import platforms
from sojourn.config.load import load_run
from sojourn.config.quantities import Duration, Money
from sojourn.config.schema import LimitsConfig
from sojourn.errors import Stopped, UserError
from sojourn.machine.gpus import DetectedGpu
from sojourn.machine.platform import Platform
from sojourn.run import ledger as ledger_module
from sojourn.run import startup
from sojourn.run.ledger import Ledger
from sojourn.run.startup import Startup
from sojourn.storage.files import CannotRead, read_json, write_json
from sojourn.train import steps
from sojourn.train.checkpoint.checkpoint import cost_so_far
from sojourn.train.faults import limits
from sojourn.train.faults.guard import Guard
from sojourn.train.step import Stepper
from test_files import no_more_files
from tiny import events, run_of, run_train, same_weights, saved_steps, stop_after

LONG = ("train.steps=100000", "log.every_steps=1000")
PRICE = "limits.price_per_hour=3600 CNY"  # a second costs one


@pytest.fixture
def clock(monkeypatch):
    """Time that goes by only when it is told to: none but a second a step."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock, real = Clock(), Stepper.update

    def update(self):
        real(self)
        clock.now += 1.0

    monkeypatch.setattr(ledger_module, "time", clock)
    monkeypatch.setattr(startup, "time", clock)
    monkeypatch.setattr(steps, "time", clock)
    monkeypatch.setattr(Stepper, "update", update)
    return clock


def test_a_budget_is_kept_over_all_calls_and_each_gets_on_by_a_step_at_least(tiny, clock):
    words = tiny.words(PRICE, "limits.budget=6.5 CNY")
    reached = []
    for _ in range(3):
        with pytest.raises(Stopped, match=r"the budget of ¥6\.5"):
            run_train(words)
        reached.append(run_of(words).status().step)
    assert reached == [6, 7, 8]  # a seventh step would have cost more than there was
    assert _cost(run_of(words)) == {"seconds": 8.0, "money": 8.0, "currency": "CNY"}


def test_what_was_paid_after_the_last_checkpoint_is_not_forgotten_by_a_kill(tiny, fork_server):
    """The books are written while the run goes on, not with its checkpoints."""
    words = [*tiny.words(*LONG, PRICE), "save.every=1h"]
    run, began = run_of(words), time.monotonic()
    process = fork_server.start("train", *words)
    while not ((read_json(run.ledger) or {}).get("seconds", 0) > 1 and run.metrics.exists()):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    used, books = time.monotonic() - began, read_json(run.ledger)
    assert used - 1 < books["seconds"] <= used  # to the second, and nothing that was not used
    assert saved_steps(run) == [] and books["money"] == pytest.approx(books["seconds"], abs=0.1)
    with pytest.raises(Stopped, match="the budget"):
        run_train([*words, f"limits.budget={books['money']:.3f} CNY"])
    assert run.status().step == 1 and read_json(run.ledger)["seconds"] > books["seconds"]


def test_a_run_that_moves_without_its_books_knows_from_its_checkpoint_what_it_has_cost(tiny, clock):
    words = tiny.words(PRICE)
    with pytest.raises(Stopped):
        run_train([*words, "limits.budget=5.5 CNY"])
    run = run_of(words)
    run.ledger.unlink()
    with pytest.raises(Stopped, match=r"the budget of ¥8\.5"):
        run_train([*words, "limits.budget=8.5 CNY"])
    assert run.status().step == 8 and read_json(run.ledger)["money"] == 8.0


def test_books_that_are_further_than_the_checkpoint_are_believed(tiny, clock):
    words = tiny.words(PRICE)
    with pytest.raises(Stopped):
        run_train([*words, "limits.budget=3.5 CNY"])
    run = run_of(words)
    write_json(run.ledger, {"seconds": 50.0, "money": 50.0, "currency": "CNY"})
    with pytest.raises(Stopped):
        run_train([*words, "limits.budget=52.5 CNY"])
    assert run.status().step == 5 and read_json(run.ledger)["money"] == 52.0


def test_a_price_that_changes_counts_from_then_on_and_a_call_without_one_forgets_nothing(tiny, monkeypatch, clock):
    words = tiny.words()
    for price, paid in (([PRICE], 2.0), ([], 2.0), (["limits.price_per_hour=7200 CNY"], 6.0)):
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            stop_after(patch, 2)
            run_train([*words, *price])
        assert read_json(run_of(words).ledger)["money"] == paid
    assert _cost(run_of(words)) == {"seconds": 6.0, "money": 6.0, "currency": "CNY"}


def test_a_warning_comes_once_when_most_of_the_budget_is_spent(tiny, clock, capsys):
    words = tiny.words(PRICE, "limits.budget=10 CNY")
    with pytest.raises(Stopped):
        run_train(words)
    (event,) = events(run_of(words), "budget")
    assert event["message"].startswith("8.00 of the budget of ¥10 are spent")
    assert capsys.readouterr().out.count("warning: 8.00 of the budget") == 1


def test_a_run_within_its_budget_is_not_warned(tiny, clock):
    words = tiny.words(PRICE, "limits.budget=100 CNY")
    run = run_train(words)
    assert run.status().state == "done" and not events(run, "budget")
    assert [line["spent"] for line in run.read_metrics() if line["kind"] == "train"][:3] == [1.0, 2.0, 3.0]


def test_another_currency_than_before_is_refused(tiny, clock):
    words = tiny.words(PRICE)
    with pytest.raises(Stopped):
        run_train([*words, "limits.budget=3.5 CNY"])
    with pytest.raises(UserError, match=r"in USD, but this run has already cost 3\.00 CNY") as told:
        run_train([w for w in words if w != PRICE] + ["limits.price_per_hour=1 USD"])
    assert "\n" not in str(told.value) and run_of(words).status().state == "stopped"


@pytest.mark.parametrize("spoiled", ["", '{"seconds": ', "[1, 2]", '{"seconds": null, "money": null}'])
def test_spoiled_books_are_no_obstacle(tiny, spoiled):
    words = tiny.words()
    run = run_of(words)
    run.path.mkdir(parents=True)
    run.ledger.write_text(spoiled)
    assert run_train([*words, "train.steps=1"]).status().state == "done"


@pytest.mark.parametrize(
    "figure",
    [
        "NaN",
        "-5",
        '"many"',
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("Infinity", "1e300", "[1]", "true", "{}")),
    ],
)
def test_a_figure_that_cannot_be_one_does_not_disable_the_budget(tiny, clock, capsys, figure):
    """The checkpoint's counts instead, never less, and one line says so."""
    words = tiny.words(PRICE)
    with pytest.raises(Stopped):
        run_train([*words, "limits.budget=5.5 CNY"])
    run = run_of(words)
    run.ledger.write_text(f'{{"seconds": {figure}, "money": {figure}, "currency": "CNY"}}')
    with pytest.raises(Stopped, match=r"the budget of ¥6\.5"):
        run_train([*words, "limits.budget=6.5 CNY"])
    assert run.status().step == 6
    assert _cost(run) == {"seconds": 6.0, "money": 6.0, "currency": "CNY"}
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "ledger.json" in line]
    assert line.endswith("with what the checkpoints know, this run has taken 5 s and cost 5.00 CNY")


def _cost(run):
    return {key: value for key, value in read_json(run.ledger).items() if key not in ("run_id", "settings")}


def test_a_ledger_of_another_run_is_not_billed(tiny, clock, capsys):
    words, other = tiny.words(PRICE), tiny.words(PRICE, "train.seed=7")
    for args in (words, other):
        with pytest.raises(Stopped):
            run_train([*args, "limits.budget=5.5 CNY"])
    run = run_of(words)
    foreign = read_json(run_of(other).ledger)
    assert foreign["run_id"] != read_json(run.ledger)["run_id"]
    run.ledger.write_text(json.dumps({**foreign, "seconds": 99.0, "money": 99.0}))
    with pytest.raises(Stopped):
        run_train([*words, "limits.budget=6.5 CNY"])
    assert _cost(run)["money"] == 6.0 and "of another run; with what the checkpoints know" in capsys.readouterr().out


def test_a_damaged_state_of_a_checkpoint_is_not_billed(tiny, clock):
    words = tiny.words(PRICE, "save.every_steps=2")
    with pytest.raises(Stopped):
        run_train([*words, "limits.budget=4.5 CNY"])
    run = run_of(words)
    run.ledger.unlink()
    state = run.checkpoints / "step-00000004" / "state.json"
    state.write_text(state.read_text().replace('"seconds": 4.0', '"seconds": 9.0'))
    assert cost_so_far(run.checkpoints) == (2.0, 2.0)


@pytest.mark.skipif(os.name != "posix", reason="fifos are POSIX")
def test_a_ledger_that_is_a_fifo_is_replaced_and_one_that_is_a_folder_is_named(tiny, capsys):
    words = tiny.words()
    run = run_of(words)
    run.path.mkdir(parents=True)
    os.mkfifo(run.ledger)
    run_train([*words, "train.steps=1"])
    assert read_json(run.ledger)["seconds"] > 0 and "a fifo, not a file" in capsys.readouterr().out
    words = tiny.words()
    run_of(words).ledger.mkdir(parents=True)
    assert run_train([*words, "train.steps=1"]).status().state == "done"
    assert "ledger.json: a folder, not a file; with what" in capsys.readouterr().out


def test_a_ledger_that_cannot_be_read_stops_the_run_rather_than_forget_its_cost(tiny):
    words = tiny.words()
    run = run_of(words)
    run.path.mkdir(parents=True)
    write_json(run.ledger, {"seconds": 50.0, "money": 50.0, "currency": "CNY"})
    with no_more_files(), pytest.raises(CannotRead, match=r"ledger\.json: cannot be read: Too many open files"):
        Ledger.open(run.ledger, None, 0.0, True)


def test_time_used_by_processes_that_were_killed_while_starting_is_billed(tiny, clock):
    """Importing torch takes seconds, in which the run folder is not locked yet."""
    words = tiny.words(PRICE)
    run = run_of(words)
    with Startup(run.path):
        (record,) = run.path.glob(".startup-*.json")
        other = record.with_name(".startup-4194999-aa.json")  # pids end at 2**22
        write_json(other, {"seconds": 3.0})
        write_json(run.path / ".startup-x-bb.json", {"seconds": "many"})
        (run.path / f".startup-{os.getppid()}-cc.json").write_text('{"seconds": 7.0}')  # it runs: not ours to bill
    assert not record.exists() and other.exists()
    with pytest.raises(Stopped):
        run_train([*words, "limits.budget=5.5 CNY"])
    assert _cost(run) == {"seconds": 5.0, "money": 5.0, "currency": "CNY"} and run.status().step == 2
    assert [path.name for path in run.path.glob(".startup-*")] == [f".startup-{os.getppid()}-cc.json"]


def _on(monkeypatch, platform, *cards):
    facts = next(row for row in platforms() if row.name == platform)
    monkeypatch.setattr(limits, "detect", lambda: Platform(facts, "a test"))
    seen = [DetectedGpu(i, name, 24 << 30, 0, None, None, None, "torch") for i, name in enumerate(cards)]
    monkeypatch.setattr(limits, "gpus", lambda: seen)


def _config(*extra):
    return load_run(["smoke", *extra]).config


def test_the_price_comes_from_the_catalogue_where_platform_and_gpu_are_known(monkeypatch, capsys):
    _on(monkeypatch, "autodl", "NVIDIA GeForce RTX 4090")
    priced = limits.with_catalogue_price(_config("limits.budget=50 CNY"))
    assert priced.limits.price_per_hour == Money(Decimal("2.19"), "CNY")
    assert "from the catalogue" in capsys.readouterr().out
    _on(monkeypatch, "autodl", *["NVIDIA GeForce RTX 4090"] * 2)
    priced = limits.with_catalogue_price(_config("limits.budget=50"))
    assert priced.limits.price_per_hour == Money(Decimal("4.38"), "CNY")


def test_a_price_that_is_given_is_used_and_without_a_budget_none_is_looked_up(monkeypatch):
    _on(monkeypatch, "autodl", "NVIDIA GeForce RTX 4090")
    given = limits.with_catalogue_price(_config("limits.budget=50 CNY", "limits.price_per_hour=9 CNY"))
    assert given.limits.price_per_hour == Money(Decimal(9), "CNY")
    assert limits.with_catalogue_price(_config()).limits.price_per_hour is None


@pytest.mark.parametrize(
    ("platform", "cards", "budget"),
    [
        ("autodl", [], "50 CNY"),
        ("generic", ["NVIDIA GeForce RTX 4090"], "50 CNY"),
        ("autodl", ["Voodoo 2"], "50 CNY"),
        ("autodl", ["NVIDIA GeForce RTX 4090"], "50 USD"),
    ],
    ids=["no GPU", "no platform", "unknown GPU", "another currency"],
)
def test_a_budget_without_a_known_price_is_one_line_that_says_what_to_type(tiny, monkeypatch, platform, cards, budget):
    _on(monkeypatch, platform, *cards)
    with pytest.raises(UserError, match=r"no price is known for this machine; add limits\.price_per_hour") as told:
        run_train(tiny.words(f"limits.budget={budget}"))
    assert "\n" not in str(told.value)


def _container_began(monkeypatch, ago):
    began = time.time() - ago

    class First:
        def create_time(self):
            return began

    real = psutil.Process
    monkeypatch.setattr(psutil, "boot_time", lambda: began - 1e6)
    monkeypatch.setattr(psutil, "Process", lambda pid=None: First() if pid == 1 else real(pid))
    return began


def test_a_session_lasts_as_long_as_the_platform_says_from_the_containers_start(monkeypatch):
    began = _container_began(monkeypatch, 3600)
    _on(monkeypatch, "kaggle")
    assert limits.session_end(LimitsConfig()) == began + 12 * 3600
    _on(monkeypatch, "generic")
    assert limits.session_end(LimitsConfig()) is None
    assert limits.session_end(LimitsConfig(session=Duration(7200))) == began + 7200
    assert limits.session_end(LimitsConfig(session="off")) is None


def test_a_run_stops_saved_before_the_session_ends(tiny, monkeypatch):
    words = tiny.words(*LONG, "limits.session=2h")
    _container_began(monkeypatch, 7200 - 61)  # a minute is kept for the difference of clocks
    with pytest.raises(Stopped, match="the end of the platform's session"):
        run_train(words)
    run = run_of(words)
    assert run.status().step >= 1 and max(saved_steps(run)) == run.status().step


@pytest.mark.parametrize("late", [10, 100_000], ids=["in its last minute", "after its end"])
def test_a_call_made_too_late_in_a_session_makes_one_step_and_saves_it(tiny, monkeypatch, late):
    words = tiny.words("limits.session=2h")
    _container_began(monkeypatch, 7200 + late - 30)
    for step in (1, 2):
        with pytest.raises(Stopped, match=f"session at step {step} of 12"):
            run_train(words)
        assert saved_steps(run_of(words))[-1] == step


def test_the_time_that_saving_takes_is_kept_in_reserve(clock):
    """A step takes 10 s, saving 20 s, and half as much again is allowed for it: 40 s before the end it is time."""
    for limit, stops in ((Duration(1040), True), (Duration(1041), False)):
        books = Ledger(None, began=0.0)
        guard = Guard(LimitsConfig(time=limit), books, save_seconds=20.0, step_seconds=10.0)
        assert (guard.should_stop() is not None) is stops
    for budget, stops in (("1040 CNY", True), ("1041 CNY", False)):
        price = Money(Decimal(3600), "CNY")
        amount = Money(Decimal(budget.split()[0]), "CNY")
        guard = Guard(LimitsConfig(budget=amount, price_per_hour=price), Ledger(None, price, began=0.0),
                      save_seconds=20.0, step_seconds=10.0)  # fmt: skip
        assert (guard.should_stop() is not None) is stops
    for ahead, stops in ((99, True), (105, False)):
        guard = Guard(LimitsConfig(), Ledger(None), time.time() + ahead, save_seconds=20.0, step_seconds=10.0)
        assert (guard.should_stop() is not None) is stops


def test_the_measured_save_is_what_the_guard_counts_with(tiny, monkeypatch):
    words = tiny.words("save.every_steps=4")
    from sojourn.train.checkpoint.saving import Saver

    seen = []
    real = Guard.should_stop
    monkeypatch.setattr(Saver, "seconds", property(lambda self: 1.25 if self._longest_save else 0.0))
    monkeypatch.setattr(Guard, "should_stop", lambda self: (seen.append(self.save_seconds), real(self))[1])
    run_train(words)
    assert seen[0] == 0.0 and seen[-1] == 1.25


def test_a_time_limit_is_of_one_call_and_ends_with_the_same_weights_after_all(tiny, clock):
    words = tiny.words("limits.time=5.5s")
    reached = []
    while True:
        try:
            run = run_train(words)
            break
        except Stopped as stopped:
            assert "the time limit of 5.5s" in str(stopped)
            reached.append(run_of(words).status().step)
    assert reached == [5, 10] and same_weights(run, tiny.whole())


def test_a_limit_does_not_end_what_is_already_finished(tiny, clock):
    words = tiny.words(PRICE, "limits.budget=12.5 CNY")
    run = run_train(words)  # the money ends with the last step
    assert run.status().state == "done" and run.has_final()


def test_a_signal_counts_before_any_limit(tiny, monkeypatch):
    words = tiny.words("limits.time=0.001s")
    real = Stepper.update

    def update(self):
        real(self)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Stepper, "update", update)
    with pytest.raises(Stopped, match="stopped by SIGTERM at step 1 of 12"):
        run_train(words)
