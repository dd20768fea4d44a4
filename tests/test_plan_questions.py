"""Questions without a run: what a budget or a time trains, and the methods of one model side by side."""

import json
from unicodedata import east_asian_width

import pytest

from conftest import called
from sojourn.catalog.gpus import find_gpu
from sojourn.plan.affordable import METHODS, MODELS
from sojourn.plan.offers import make_plan
from sojourn.plan.run_argument import load_planned


def asked(*words):
    said = called("plan", *words, "--json")
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout)


# --- what can I train


def test_a_budget_is_answered_by_size_and_method(home):
    found = asked("--budget", "¥20")
    assert set(found["models"]) == set(MODELS) and all(set(row) == set(METHODS) for row in found["models"].values())
    for row in found["models"].values():
        for one in filter(None, row.values()):
            assert one["cost"] * (6.801 if one["currency"] == "USD" else 1) <= 20.001 and one["hours"] <= 24
    tokens = [found["models"][name]["qlora"]["tokens"] for name in MODELS[:4]]
    assert tokens == sorted(tokens, reverse=True), "larger models get fewer tokens"
    assert found["from_scratch"]["tokens"] >= 20 * found["from_scratch"]["parameters"]


def test_what_it_says_is_what_a_plan_of_it_says(home):
    one = asked("--budget", "¥10", "--platform", "autodl", "--gpu", "RTX 4090")["models"]["qwen2.5-7b"]["qlora"]
    assert one["hours"] == pytest.approx(10 / 2.19, abs=0.01)
    words = ["qwen2.5-7b", "method.kind=qlora", "data.max_length=2048", "train.global_batch=16", "train.micro_batch=1"]
    config = load_planned([*words, f"train.steps={one['tokens'] // (16 * 2048)}"]).config
    (offer,) = make_plan(config, [find_gpu("RTX 4090")], "autodl").offers
    assert 0.7 * 10 < offer.bill.amount <= 10, "the slow end of the estimate fits the budget"


def test_more_money_or_time_trains_more(home):
    def tokens(*words):
        return asked(*words, "--platform", "autodl")["models"]["qwen2.5-7b"]["lora"]["tokens"]

    assert tokens("--budget", "¥40") > 1.8 * tokens("--budget", "¥20")
    assert tokens("--time", "10h") > 1.8 * tokens("--time", "5h")
    assert tokens("--budget", "¥40", "--time", "1h") < tokens("--budget", "¥40")


def test_a_quota_and_sessions_are_kept(home):
    one = asked("--time", "7d", "--platform", "kaggle")["models"]["qwen2.5-7b"]["qlora"]
    assert (one["hours"], one["count"], one["cost"]) == (30, 2, 0)


def test_nothing_is_said_in_a_line_and_by_the_exit_code(home):
    said = called("plan", "--budget", "¥0.0001", "--platform", "autodl")
    assert said.returncode == 4 and "nothing can be trained" in said.stdout
    said = called("plan", "--budget", "¥5", "--gpu", "A30")
    assert said.returncode == 2 and "catalog add price" in said.stderr


def test_cards_that_were_never_run_are_offered_only_where_they_are_named(home):
    cells = [one for row in asked("--time", "10h")["models"].values() for one in row.values() if one]
    assert cells and not any(one["gpu"] == "MI300X" for one in cells)
    assert asked("--time", "10h", "--gpu", "MI300X")["models"]["qwen2.5-7b"]["lora"]["gpu"] == "MI300X"


@pytest.mark.parametrize(
    ("words", "width"),
    [
        pytest.param(words, width, marks=pytest.mark.slow if (number % 2 == 0) == (width == 120) else [])
        for number, words in enumerate(
            (("--budget", "¥20"), ("--time", "10h"), ("qwen2.5-7b", "--compare"), ("qwen2.5-72b", "--compare"))
        )
        for width in (80, 120)
    ],
)
def test_no_line_is_wider_than_the_screen(home, monkeypatch, words, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for line in called("plan", *words).stdout.splitlines():
        assert sum(1 + (east_asian_width(letter) in "WF") for letter in line) <= width, line


@pytest.mark.parametrize("words", [("--budget", "¥20", "--explain"), ("--time", "5h", "--fit", "24GB")])
def test_what_does_not_go_together_is_one_line(home, words):
    said = called("plan", *words)
    assert said.returncode == 2 and "leave out one of the two" in said.stderr


# --- the methods side by side


def test_methods_side_by_side_are_those_of_their_own_plans(home):
    found = asked("qwen2.5-7b", "train.steps=100", "--compare", "--gpu", "A100 80GB", "--platform", "autodl")
    for method in METHODS:
        alone = called("plan", "qwen2.5-7b", "train.steps=100", f"method.kind={method}", "--gpu", "A100 80GB",
                       "--platform", "autodl", "--json")  # fmt: skip
        assert json.loads(alone.stdout)["offers"] == found[method]["offers"]


def test_the_first_line_of_a_comparison_is_the_answer(home):
    text = called("plan", "qwen2.5-7b", "train.steps=100", "--compare", "--gpu", "4090").stdout
    first = " ".join(text.split("\n\n")[0].split())
    assert "is the cheapest that fits: RTX 4090 on " in first and "no offer fits for full" in first


def test_a_comparison_needs_a_model_and_exits_as_a_plan(home):
    said = called("plan", "medium", "--compare")
    assert said.returncode == 2 and "qwen2.5-7b --compare" in said.stderr
    assert called("plan", "qwen2.5-72b", "train.steps=10", "--compare", "--gpu", "3060").returncode == 4
    assert called("plan", "qwen2.5-7b", "train.steps=10", "--compare", "--gpu", "4090").returncode == 0
