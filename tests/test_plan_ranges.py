"""Times and prices are ranges with a reason, and verdicts hold for the pessimistic end."""

import json
import re
from dataclasses import replace

import pytest

from conftest import called
from sojourn.catalog.gpus import find_gpu
from sojourn.catalog.platforms import platforms
from sojourn.catalog.prices import Price
from sojourn.config.load import load_run
from sojourn.config.quantities import Money
from sojourn.plan.calibration import Correction
from sojourn.plan.money import bill, within
from sojourn.plan.offers import make_plan
from sojourn.plan.ranges import cost_range, known_digits, rate_text, time_range

RUN = ("qlora-7b", "train.steps=1000")


def test_a_1000_step_qlora_of_a_7b_on_colab_s_t4_is_two_sessions_and_the_first_sentence_says_so(home):
    first = called("plan", *RUN, "--platform", "colab").stdout.splitlines()[0]
    assert re.match(r"cheapest that fits: T4 on Google Colab: free, 1\d–\d\dh, 2 sessions of 12 h; ", first)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(3.14, 4.01, "3.1–4.0h"), (11.6, 18.2, "12–18h"), (0.52, 0.71, "31–43m"), (0.9, 1.3, "0.9–1.3h"),
     (120, 180.4, "120–180h"), (0.005, 0.009, "18–32s"), (2.0, 2.01, "2.0h"), (1000, 1400, "1,000–1,400h")],
)  # fmt: skip
def test_both_ends_of_a_time_have_the_unit_of_the_upper_one(low, high, text):
    assert time_range(low, high) == text


def test_speeds_have_no_more_digits_than_are_known():
    assert rate_text(1231.4, find_gpu("T4")) == "1,200" and rate_text(17_842, find_gpu("H200")) == "17,800"
    assert known_digits(121_345, find_gpu("H200"), count=8) == 120_000 and known_digits(0.0, find_gpu("T4")) == 0


def test_no_card_that_was_not_measured_has_more_than_two_digits(home):
    offers = json.loads(called("plan", *RUN, "--json").stdout)["offers"]
    speeds = [o["tokens_per_second"] for o in offers if o["tokens_per_second"] and o["gpu"]["rates"] != "measured"]
    assert len(speeds) > 50 and all(len(f"{speed:.0f}".rstrip("0")) <= 2 for speed in speeds)


def test_the_reason_says_how_well_a_card_is_known(home):
    def reasons(*cards):
        words = [word for card in cards for word in ("--gpu", card)]
        return {
            o["gpu"]["name"]: o["range_reason"]
            for o in json.loads(called("plan", *RUN, *words, "--json").stdout)["offers"]
        }

    found = reasons("RTX 4080", "RTX 4090", "H200")
    assert found["RTX 4080"] == "this card was never measured"
    assert found["RTX 4090"] == "its speed is as others published it"
    priced = called("plan", *RUN, "--gpu", "4080", "limits.price_per_hour=2").stdout.splitlines()[0]
    assert re.search(r"¥[\d.]+–[\d.]+, [\d.]+–[\d.]+h; this card was never measured$", priced)


def _offers(card, learned=None, **limits):
    plan = make_plan(load_run(list(RUN)).config, [find_gpu(card)], **limits)
    return plan, [offer for offer in plan.offers if offer.bill]


def test_a_budget_is_met_only_if_the_upper_end_meets_it():
    _, (offer, *_) = _offers("RTX 4090", platform="autodl")
    between = [end.amount for end in (offer.bill.low, offer.bill.high)]
    assert between[0] < offer.bill.amount < between[1]
    assert within(offer.bill, Money(between[1] + 0.01, "CNY"), None)
    assert not within(offer.bill, Money(offer.bill.amount + 0.01, "CNY"), None)
    hours = offer.bill.high.elapsed
    assert within(offer.bill, None, 3600 * hours + 1) and not within(offer.bill, None, 3600 * offer.bill.elapsed + 1)


def test_the_cheapest_is_the_one_whose_upper_end_is_lowest():
    plan = make_plan(load_run(list(RUN)).config)
    paid = [o for o in plan.offers if o.fits and o.bill and o.bill.disk_suffices]
    assert plan.best.bill.high.cny == min(o.bill.high.cny for o in paid)
    assert plan.fastest.bill.high.elapsed == min(o.bill.high.elapsed for o in paid)


def test_sessions_are_a_range_unless_one_might_do():
    place = next(one for one in platforms() if one.name == "colab")
    found = bill(Price("colab", "T4", 0.0, "x", "2026-11"), place, 3600 * 11, 600, None, (3600 * 9, 3600 * 13))
    assert found.notes == ("2 sessions of 12 h",) and (found.low.sessions, found.high.sessions) == (1, 2)
    assert cost_range(found) == "free"
    longer = bill(Price("colab", "T4", 0.0, "x", "2026-11"), place, 3600 * 40, 600, None, (3600 * 30, 3600 * 50))
    assert longer.notes == ("3 to 5 sessions of 12 h",)


def test_runs_measured_here_make_a_range_narrow(monkeypatch):
    wide, _ = _offers("RTX 4080")
    learned = Correction(records=3, times={"RTX 4080": 1.1})
    monkeypatch.setattr("sojourn.plan.offers.correction", lambda: learned)
    narrow, _ = _offers("RTX 4080")
    steps = [plan.offers[0].step for plan in (wide, narrow)]
    assert steps[1].spread < 0.5 * steps[0].spread
    assert steps[1].step_seconds == pytest.approx(1.1 * steps[0].step_seconds)
    assert narrow.offers[0].range_reason == "corrected by runs measured here"


def test_json_has_both_ends(home):
    (offer, *_) = json.loads(called("plan", *RUN, "--gpu", "4090", "--json").stdout)["offers"]
    low, high = offer["low"], offer["high"]
    assert low["hours"] < offer["hours"] < high["hours"] and low["cost"] < offer["cost"] < high["cost"]
    assert low["tokens_per_second"] > offer["tokens_per_second"] > high["tokens_per_second"]
    assert offer["bill"]["high"]["amount"] == pytest.approx(high["cost"], abs=1e-4)


def test_a_rate_that_is_no_word_of_the_catalogue_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path))
    (tmp_path / "catalog.toml").write_text('[gpus."RTX 4090"]\nrates = "guessed"\n')
    done = called("plan", *RUN)
    assert "must be measured, published, data sheet" in done.stderr
    (tmp_path / "catalog.toml").write_text('[gpus."RTX 4090"]\nmatmul_tflops = 0\n')
    assert "`matmul_tflops` is 0" in called("plan", *RUN).stderr


def test_a_measured_row_of_the_user_s_own_narrows_its_card_only():
    card = find_gpu("RTX 4080")
    from sojourn.estimate.step_time import step_time
    from sojourn.plan.offers import fit_on
    from sojourn.resolve.device_spec import catalog_device
    from sojourn.resolve.model_spec import model_spec_of

    config = load_run(list(RUN)).config
    work = fit_on(config, model_spec_of(config), catalog_device(config, card)).workload
    mine = replace(card, rates="measured", matmul_tflops=50.0, attention_tflops=40.0, copy_gbs=600.0, launch_us=20.0)
    known, unknown = step_time(work, mine), step_time(work, card)
    assert known.spread < 0.12 and unknown.spread > 0.25
    assert known.step_seconds > 1.5 * unknown.step_seconds
