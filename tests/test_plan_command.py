"""`sojourn plan` as it is used: how many GPUs, where, which cannot run it, on screens of any width."""

import json
import re
from dataclasses import replace
from datetime import date
from decimal import Decimal
from unicodedata import east_asian_width

import pytest

from conftest import called
from sojourn.catalog import staleness
from sojourn.catalog.gpus import find_gpu
from sojourn.catalog.models import find_model
from sojourn.catalog.platforms import platforms
from sojourn.config.load import load_run
from sojourn.config.quantities import Money
from sojourn.errors import UserError
from sojourn.estimate.memory import memory
from sojourn.estimate.step_time import step_time
from sojourn.plan.advice import advise, advise_for, faster, what_fits
from sojourn.plan.arguments import known_platform, to_memory
from sojourn.plan.money import bill
from sojourn.plan.offers import TOO_SMALL, fit_on, make_plan, plan_device, resolve_for
from sojourn.plan.ranges import rate_text
from sojourn.resolve.model_spec import model_spec_of

A100 = find_gpu("A100 80GB")


def plan_of(*words, **asked):
    return make_plan(load_run(list(words)).config, **asked)


# --- what is assumed


def test_a_plan_has_the_notes_of_its_command_line(home):
    args = ("plan", "medium", "--num_epochs", "3", "--max_steps", "50", "--gpu", "A100 80GB")
    note = "train.steps=50 sets the length; --num_epochs is not used"
    assert f"\nnote: {note}\n" in called(*args).stdout
    assert json.loads(called(*args, "--json").stdout)["notes"] == [note]


def test_a_vocabulary_that_only_the_data_decides_is_said_to_be_assumed(home):
    (home / "little.txt").write_text("To be, or not to be.\n" * 1000)
    (home / "much.txt").write_text("To be, or not to be.\n" * 10_000)
    reasons = {
        ("data.sources=much.txt", "data.tokenizer=char"): "data.tokenizer=char has one for each character of the text",
        ("data.sources=much.txt", "data.tokenizer=out"): "out may have another number",
        ("data.sources=little.txt",): "so little text may give fewer",
        ("data.sources=much.txt",): None,
        ("data.sources=not-here.txt", "train.steps=5"): None,
    }
    for words, reason in reasons.items():
        args = ("plan", "small", "data.vocab_size=8192", *words, "--gpu", "A100 80GB")
        line = f"a vocabulary of 8,192 tokens (data.vocab_size) is assumed; {reason}"
        assert json.loads(called(*args, "--json").stdout)["assumed_vocabulary"] == (reason and line)
        assert (f"note: {line}" in " ".join(called(*args).stdout.split())) == (reason is not None)


# --- what is typed


def test_a_plan_that_finds_nothing_exits_with_4(home):
    limited = ("plan", "qlora-7b", "train.steps=1000", "--platform", "autodl")
    assert called(*limited, "--budget", "¥30", "--deadline", "1d").returncode == 0
    assert called(*limited, "--budget", "¥0.01").returncode == 4
    assert called(*limited, "--deadline", "1m", "--json").returncode == 4
    assert called("plan", "full-7b", "train.steps=10", "--gpu", "4090").returncode == 4
    assert called("plan", "medium", "--gpu", "P100").returncode == 4
    assert called("plan", "medium", "--gpu", "M2 Max", "--budget", "¥1").returncode == 0, "one's own costs nothing"
    assert called("plan", "medium", "--gpu", "A30", "--budget", "¥1").returncode == 4, "nobody knows what it costs"
    assert called("plan", "medium", "--gpu", "A30", "--deadline", "1d").returncode == 0


def test_the_first_line_is_the_answer(home):
    first = called("plan", "qlora-7b", "train.steps=1000", "--platform", "autodl").stdout.splitlines()[0]
    assert first.startswith("cheapest that fits: ") and "on AutoDL: ¥" in first
    first = called("plan", "full-7b", "train.steps=10", "--gpu", "4090").stdout.splitlines()[0]
    assert first.startswith("it fits on none of these GPUs")


@pytest.mark.parametrize(
    "words",
    [("--gpu", "2xT4"), ("--gpu", "T4x2"), ("--gpu", "T4", "--gpus", "2"), ("--gpu", "T4", "--gpus=2"),
     ("--gpu", "T4", "parallel.gpus=2"), ("--gpu", "2xT4", "--gpus", "2"), ("--gpu", "T4", "--gpus", "0,1")],
)  # fmt: skip
def test_a_number_of_gpus_is_a_number_in_a_plan(home, words):
    found = json.loads(called("plan", "medium", *words, "--json").stdout)
    assert {offer["count"] for offer in found["offers"]} == {2}
    counted = words[-1] in ("2", "--gpus=2", "parallel.gpus=2")
    assert any("planned as 2 GPUs" in note for note in found["notes"]) == counted


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--deadline", "12"), "write 12h"),
        (("--gpu", "2xT4", "--gpu", "4xA100 80GB"), "one number of GPUs"),
        (("--gpu", "2xT4", "--gpus", "4"), "--gpu says 2"),
        (("--gpu", "Ascend 910B"), "torch_npu"),
        (("--platform", "恒园云"), "no platform called"),
    ],
)
def test_what_cannot_be_meant_is_one_line(home, words, says):
    said = called("plan", "medium", *words)
    assert said.returncode == 2 and says in said.stderr and len(said.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("typed", "name"),
    [("恒源云", "gpushare"), ("矩池云", "matpool"), ("ＡｕｔｏＤＬ", "autodl"), ("Google Cloud", "gcp"),
     ("阿里云", "aliyun")],
)  # fmt: skip
def test_a_platform_is_known_by_the_words_of_its_title(typed, name):
    assert known_platform(typed) == name


def test_a_size_in_gb_is_a_card_of_that_size():
    assert to_memory("24GB") == to_memory("24") == to_memory("２４ gb")
    size, words = to_memory("24GB")
    assert size == int(23.5 * 2**30) and "24 GB" in words
    assert to_memory("24GiB")[0] == 24 * 2**30


def test_a_model_may_stand_in_the_place_of_a_run(home):
    found = json.loads(called("plan", "Qwen/Qwen2.5-7B-Instruct", "train.steps=10", "--gpu", "4090", "--json").stdout)
    assert found["model"]["name"] == "qwen2.5-7b" and not any("no run named" in note for note in found["notes"])
    said = called("plan", "qwen2.5-7c")
    assert said.returncode == 2 and "neither a preset nor a file" in said.stderr


def test_a_card_that_was_never_run_says_so(home):
    assert "never run" in called("plan", "medium", "--gpu", "MI300X").stdout


def test_dates_of_prices_and_exchange_rates_are_shown_and_stale_ones_marked(home, monkeypatch):
    monkeypatch.setattr(staleness, "today", lambda: date(2027, 3, 1))
    text = " ".join(called("plan", "qlora-7b", "train.steps=10").stdout.split())
    assert "AutoDL price page, 2026-08, stale: 182 days old" in text and "sojourn catalog refresh" in text
    assert "exchange rates in CNY: USD" in text and "2026-05-08, stale" in text


# --- how many GPUs


def test_a_run_that_names_its_gpus_is_planned_and_paid_for_so_many():
    words = ("full-7b", "train.optimizer=adamw", "train.steps=100")
    (alone,) = plan_of(*words, only=[A100], platform="autodl").offers
    assert not alone.fits
    (four,) = plan_of(*words, "--gpus", "0,1,2,3", only=[A100], platform="autodl").offers
    assert four.count == four.fit.workload.world_size == 4 and four.fit.workload.engine == "fsdp"
    assert four.bill.amount == pytest.approx(4 * 5.98 * four.bill.hours)
    assert four.bill.hours == pytest.approx(four.run_time.seconds / 3600)


def test_machines_exchange_more_slowly_than_gpus_of_one():
    words = ("full-7b", "train.optimizer=adamw", "train.steps=100")
    (one,) = plan_of(*words, "--gpus", "0,1,2,3", only=[A100], platform="autodl").offers
    machines = ("--gpus", "0,1", "parallel.nodes=2", "parallel.master=10.0.0.1")
    (two,) = plan_of(*words, *machines, only=[A100], platform="autodl").offers
    assert two.count == 4 and two.fit.workload.nodes == 2 and one.fit.workload.world_size == two.fit.workload.world_size
    assert two.run_time.seconds > 3 * one.run_time.seconds


def test_what_is_advised_is_what_the_plan_then_says():
    words = ("full-7b", "train.steps=100")
    config = load_run(list(words)).config
    found = next(one for one in advise(config, A100) if one.changes[0].count == 2)
    (then,) = plan_of(*words, *found.arguments.split(), only=[A100], platform="autodl").offers
    assert then.step.tokens_per_second == pytest.approx(found.tokens_per_second)
    assert then.fit.memory.device == found.memory


def test_advice_for_a_run_on_several_gpus_keeps_them():
    words = ["full-7b", "train.optimizer=adamw", "train.steps=10", "--gpus", "0,1"]
    for one in advise(load_run(words).config, find_gpu("RTX 4090")):
        assert "2 GPUs" not in [change.description for change in one.changes]
        count = max(2, *(change.count for change in one.changes))
        changed = load_run([*words[:3], *(["--gpus", "0,1"] if count == 2 else []), *one.arguments.split()]).config
        assert (
            fit_on(changed, find_model("qwen2.5-7b"), plan_device(changed, one.gpu, count)).memory.device == one.memory
        )


def test_free_machines_have_the_gpus_that_they_have():
    where = {o.bill.platform for o in plan_of("medium", "--gpus", "0,1").offers if o.bill and o.bill.amount == 0}
    assert where == {"kaggle"}
    assert not [o for o in plan_of("medium", "--gpus", "0,1,2,3").offers if o.bill and o.bill.amount == 0]
    (single,) = plan_of("medium", "train.global_batch=1", platform="kaggle").offers
    assert single.fits and single.count == 1


def test_too_few_rows_for_the_gpus_are_said(home):
    said = called("plan", "medium", "train.global_batch=4", "--gpus", "0,1,2,3,4,5,6,7", "--gpu", "4090").stdout
    assert "train.global_batch=4 is fewer rows than GPUs" in said and "what helps is below" not in said


def test_advice_for_a_free_platform_asks_for_no_gpus_that_it_has_not(home):
    words = ("plan", "qlora-7b", "model.base=qwen2.5-32b", "train.steps=10", "--json")
    for platform, most in (("kaggle", 2), ("colab", 1)):
        found = json.loads(called(*words, "--platform", platform).stdout)
        assert found["best"] is None
        assert all(one["arguments"].partition("--gpus ")[2].count(",") < most for one in found["advice"])
    text = called("plan", "qlora-7b", "model.base=qwen2.5-32b", "--platform", "kaggle").stdout
    assert "does not fit: 2 × T4" in text and "what helps is below" not in text


# --- DeepSpeed


@pytest.mark.parametrize(
    ("zero", "stage", "offload"),
    [
        ({"stage": 3}, 3, "off"),
        ({}, 0, "off"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, 2, "optimizer"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, 3, "all"),
        ({"stage": 1, "offload_optimizer": {"device": "none"}}, 1, "off"),
    ],
)
def test_a_deepspeed_file_is_planned_as_it_is_written(tmp_path, zero, stage, offload):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    words = ("full-7b", "train.optimizer=adamw", "--gpus", "0,1,2,3", f"parallel.deepspeed={tmp_path / 'ds.json'}")
    config = load_run([*words, "train.steps=10"]).config
    found = fit_on(config, find_model("qwen2.5-7b"), replace(plan_device(config, A100, 4), free_bytes=float("inf")))
    assert (found.workload.engine, found.workload.zero_stage, found.workload.offload) == ("deepspeed", stage, offload)


def test_a_deepspeed_file_that_is_not_there_is_one_line(home):
    said = called("plan", "full-7b", "parallel.deepspeed=nowhere.json")
    assert said.returncode == 2 and "nowhere.json" in said.stderr and len(said.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "is an object"), ('{"zero_optimization": 3}', "it takes an object"), ("not json", "not valid JSON"),
        ('{"zero_optimization": {"stage": 9}}', "allowed: 0, 1, 2, 3"), ('{"zero_optimisation": {}}', None),
        ('{"zero_optimisation": {"stage": 2}}', "did you mean zero_optimization.stage"),
        ('{"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}', "it takes an object"),
        ('{"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}', "needs 3 or above"),
        ('{"train_batch_size": 7, "zero_optimization": {"stage": 2}}', "train.global_batch is 64"),
    ],
)  # fmt: skip
def test_a_deepspeed_file_is_checked_as_a_run_checks_it(home, text, says):
    (home / "ds.json").write_text(text)
    words = (
        "full-7b",
        "train.optimizer=adamw",
        "train.offload=off",
        "train.steps=10",
        "--gpus",
        "4",
        "--deepspeed",
        "ds.json",
    )
    said = called("plan", *words, "--gpu", "H200", "--platform", "runpod")
    if says is None:
        assert said.returncode == 0
    else:
        assert said.returncode == 2 and says in said.stderr and len(said.stderr.splitlines()) == 1


def test_zero_shards_what_its_stage_says():
    """By hand: 2 bytes of weights, 2 of gradients, 12 of fp32 masters and optimizer states, over four GPUs."""
    count, shape = 7_615_616_512, find_model("qwen2.5-7b")
    words = ["full-7b", "train.optimizer=adamw", "--gpus", "0,1,2,3", "parallel.engine=deepspeed", "train.steps=10"]
    config = load_run([*words, "train.micro_batch=1", "train.activation_checkpointing=full"]).config
    work = resolve_for(config, shape, plan_device(config, A100, 4)).workload
    step = next(one for one in memory(work).phases if one.name == "optimizer step")
    kinds = step.by_kind()
    assert work.zero_stage == 2
    assert kinds["weights"] == pytest.approx((2 + 4 / 4) * count)
    assert kinds["gradients"] == pytest.approx(2 / 4 * count)
    assert kinds["optimizer states"] == pytest.approx(8 / 4 * count)


# --- how long it is


@pytest.mark.parametrize("source", ["Open-Orca/OpenOrca", "hub:some/thing", "allenai/c4:en"])
def test_a_data_set_of_the_hub_is_planned_with_an_assumed_length(home, source):
    for preset, assumed in (("lora-20k", "20,000 examples of 480 tokens"), ("qlora-7b", "1,000 steps")):
        text = " ".join(called("plan", preset, f"data.sources={source}", "--gpu", "T4").stdout.split())
        assert f"note: the size of {source} is not known here, so {assumed} are assumed; give train.tokens" in text


@pytest.mark.parametrize("source", ["nothing.jsonl", "data/mistyped.jsonl", "empty", "/nowhere", "../nowhere"])
def test_data_that_is_not_there_is_one_line(home, source):
    (home / "empty").mkdir()
    said = called("plan", "lora-20k", f"data.sources={source}")
    assert said.returncode == 2 and source in said.stderr and len(said.stderr.splitlines()) == 1


# --- which GPUs cannot run it


@pytest.mark.parametrize(
    ("words", "card", "why"),
    [
        (["medium"], "P100", "no kernels"),
        (["qlora-7b"], "M2 Max", "qlora"),
        (["medium", "train.optimizer=adamw_8bit"], "M2 Max", "adamw_8bit"),
        (["medium", "train.fp8=on"], "T4", "train.fp8"),
        (["medium", "train.fp8=on"], "A100 80GB", "train.fp8"),
        (["medium", "train.attention=varlen"], "T4", "varlen"),
        (["medium", "train.device=mps"], "RTX 4090", "train.device"),
        (["medium", "train.device=cuda"], "M2 Max", "train.device"),
    ],
)
def test_a_gpu_that_refuses_a_setting_is_no_offer_and_gets_no_advice(words, card, why):
    config = load_run(words).config
    found = make_plan(config, [find_gpu(card)])
    assert all(not o.fits and why in o.reason_not and o.reason_not != TOO_SMALL for o in found.offers)
    assert advise_for(config, found, [find_gpu(card)]) == (None, [])


def test_what_cannot_run_it_is_not_said_to_be_too_small(home):
    text = called("plan", "qlora-7b").stdout
    assert "cannot run it (current torch has no kernels for it): P100" in text and "does not fit: P100" not in text
    assert "none of these GPUs can run it" in called("plan", "medium", "--gpu", "P100").stdout


def test_the_memory_shown_is_of_a_gpu_whose_speed_is_known():
    found = plan_of("full-7b", "train.optimizer=adamw", "train.steps=10", budget=Money(Decimal(0)))
    assert found.best is None and found.shown.step is not None and not found.shown.gpu.unified


# --- where


def test_a_card_on_another_board_has_the_price_of_its_sister():
    (found,) = plan_of("medium", only=[find_gpu("A100 80GB PCIe")], platform="autodl").offers
    assert found.bill.platform == "autodl" and found.bill.per_hour == 5.98


@pytest.mark.parametrize(
    ("platform", "card", "says"),
    [
        ("kaggle", "RTX 4090", "it has 2 × T4"),
        ("dsw", None, "limits.price_per_hour"),
        ("generic", None, "price_per_hour"),
    ],
)
def test_a_platform_that_has_no_such_gpu_is_one_line_with_what_to_type(platform, card, says):
    with pytest.raises(UserError) as told:
        plan_of("medium", platform=platform, only=[find_gpu(card)] if card else None)
    assert says in str(told.value) and "[prices." in str(told.value) and "\n" not in str(told.value)


def test_a_price_of_ones_own_opens_a_platform_without_prices():
    (found,) = plan_of("medium", "limits.price_per_hour=3", platform="dsw", only=[find_gpu("A10")]).offers
    assert found.bill.title == "Aliyun PAI-DSW" and found.bill.amount == pytest.approx(3 * found.bill.hours)


def test_platforms_are_known_in_any_case_and_gpus_named_twice_are_one(home):
    found = json.loads(
        called("plan", "medium", "--platform", "AutoDL", "--gpu", "4090", "--gpu", "RTX 4090", "--json").stdout
    )
    assert [offer["platform"] for offer in found["offers"]] == ["autodl"]


def test_a_currency_without_a_rate_says_what_to_add(home):
    said = called("plan", "medium", "--budget", "1000 THB")
    assert said.returncode == 2 and "[currencies.THB]" in said.stderr and len(said.stderr.splitlines()) == 1


def test_a_price_of_ones_own_is_on_no_platform_in_particular(home):
    text = called("plan", "medium", "--gpu", "H100", "limits.price_per_hour=10").stdout
    assert "cheapest that fits: H100: ¥" in text and "generic" not in text


def test_a_machine_of_ones_own_needs_no_price(home):
    assert "costs nothing" in called("plan", "medium", "--gpu", "M3").stdout


def test_a_price_for_every_gpu_is_said(home):
    words = ("plan", "medium", "limits.price_per_hour=2")
    assert "used for every GPU" in called(*words).stdout
    assert "used for every GPU" not in called(*words, "--gpu", "4090").stdout


# --- sessions


def test_every_session_downloads_the_base_again():
    """A 7B in 16 bits is 15.2 GB: over eight minutes at 30 MB/s, at the start of each session."""
    (found,) = plan_of("qlora-7b", "train.steps=2000", platform="colab").offers
    again = 30 + 15.23e9 / 500e6 + 15.23e9 / 30e6 + (60 if found.fit.workload.compiled else 0)
    assert found.run_time.again == pytest.approx(again, rel=0.01)
    assert found.bill.sessions == 3
    assert 3600 * found.bill.hours == pytest.approx(found.run_time.seconds + 2 * again, rel=0.001)


@pytest.mark.parametrize(
    ("hours", "sessions", "weeks"), [(12, 1, 1), (12.1, 2, 1), (29.9, 3, 1), (30.5, 3, 2), (40, 4, 2), (61, 6, 3)]
)
def test_sessions_and_weeks_on_kaggle_by_hand(hours, sessions, weeks):
    from sojourn.catalog.prices import Price

    place = next(one for one in platforms() if one.name == "kaggle")
    found = bill(Price("kaggle", "T4", 0.0, "x", "2026-11", count=2), place, 3600 * hours, 60)
    assert (found.sessions, found.weeks) == (sessions, weeks)


# --- the screen


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "words", [("qlora-7b",), ("full-7b",), ("medium", "--explain"), ("qlora-14b", "--fit", "24GiB")]
)
def test_no_line_is_wider_than_the_screen(home, monkeypatch, words, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for line in called("plan", *words).stdout.splitlines():
        assert sum(1 + (east_asian_width(letter) in "WF") for letter in line) <= width, line


def test_sessions_sources_and_dates_are_on_the_screen(home, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = " ".join(called("plan", "qlora-7b", "train.steps=10000").stdout.split())
    assert re.search(r"\d+ to \d+ sessions of 12 h", text) and "weeks at 30 GPU-hours a week" in text
    assert "AutoDL price page, 2026-08" in text


def test_only_limits_that_were_asked_for_are_named(home):
    assert "nothing meets the budget;" in called("plan", "medium", "--budget", "¥0.01", "--platform", "autodl").stdout
    assert "cheapest that fits and meets the deadline:" in called("plan", "medium", "--deadline", "1d").stdout


def test_a_run_s_own_limits_are_its_budget_and_deadline(home):
    run = ("qlora-7b", "train.steps=1000")
    limited = called("plan", *run, "limits.budget=7CNY", "limits.time=3h").stdout
    assert "cheapest that fits and meets the deadline and the budget: A100 40GB" in limited
    typed = called("plan", *run, "limits.budget=7CNY", "limits.time=3h", "--budget", "1CNY", "--deadline", "12h").stdout
    assert "cheapest that fits and meets the deadline and the budget: 2 × T4" in typed
    assert "nothing meets the deadline" in called("plan", *run, "--deadline", "0h").stdout


def test_where_nothing_meets_the_limits_the_nearest_are_named(home):
    text = " ".join(called("plan", "qlora-7b", "--budget", "¥2", "--deadline", "3h").stdout.split())
    assert "nothing meets the deadline and the budget; the cheapest is" in text and "the fastest is" in text


def test_a_card_that_is_too_small_is_said_once(home):
    text = called("plan", "full-7b", "train.steps=10", "--gpu", "4090").stdout
    assert text.count("does not fit") == 1


def test_a_global_batch_of_many_divisors_takes_no_longer(home):
    """720,720 has 240 divisors; the plan looks at few of them."""
    from sojourn.resolve import micro_batch as choose

    counted, real = [], choose.memory
    choose.memory = lambda work: counted.append(work) or real(work)
    try:
        found = plan_of("medium", "train.global_batch=720720", only=[find_gpu("RTX 4090")])
    finally:
        choose.memory = real
    assert len(counted) < 60 and found.best.micro_batch * 512 <= choose._MAX_TOKENS
    assert choose.divisors(720_720) == [n for n in range(1, 720_721) if 720_720 % n == 0]


def test_rows_much_too_long_get_advice_too():
    config = load_run(["qlora-7b", "data.max_length=200000", "train.steps=10"]).config
    assert any("data.max_length" in one.arguments for one in advise(config, find_gpu("RTX 4090")))


# --- memory for speed


@pytest.mark.parametrize(
    ("words", "card", "how"),
    [
        (["qlora-7b"], "RTX 4090", "off"), (["qlora-7b", "data.max_length=16384"], "RTX 4090", "full"),
        (["lora-r64"], "H200", "off"), (["lora-r64"], "A100 40GB", "full"),
    ],
)  # fmt: skip
def test_presets_recompute_only_what_a_card_does_not_hold(words, card, how):
    (found,) = {offer.fit.workload.activation_checkpointing for offer in plan_of(*words, only=[find_gpu(card)]).offers}
    assert found == how


def test_what_is_recomputed_is_chosen_by_its_speed():
    """Sixteen rows fit if they are recomputed; two do without, and are faster."""
    config = load_run(["lora-100k", "train.micro_batch=auto"]).config
    card, shape = find_gpu("T4"), model_spec_of(config)
    found = fit_on(config, shape, plan_device(config, card))
    assert (found.workload.activation_checkpointing, found.workload.micro_batch) == ("off", 2)
    full = load_run(["lora-100k", "train.micro_batch=auto", "train.activation_checkpointing=full"]).config
    other = fit_on(full, shape, plan_device(full, card))
    assert other.workload.micro_batch == 16
    assert step_time(found.workload, card).tokens_per_second > 1.2 * step_time(other.workload, card).tokens_per_second


def test_a_gpu_of_unknown_speed_keeps_activations_where_a_fair_micro_batch_fits():
    config = load_run(["lora-100k", "train.micro_batch=auto"]).config
    card, shape = find_gpu("T4"), model_spec_of(config)
    rates = dict.fromkeys(f"{kind}_tflops" for kind in ("fp32", "tf32", "bf16", "fp16", "fp8", "matmul"))
    found = fit_on(config, shape, plan_device(config, replace(card, **rates)))
    assert (found.workload.activation_checkpointing, found.workload.micro_batch) == ("full", 16)
    small = fit_on(config, shape, plan_device(config, replace(card, **rates, usable_gib=30.0)))
    assert (small.workload.activation_checkpointing, small.workload.micro_batch) == ("off", 4)


def test_a_run_that_leaves_memory_unused_is_told_what_it_would_buy(home):
    words, card = (
        ["qlora-7b", "train.steps=100", "train.micro_batch=1", "train.activation_checkpointing=full"],
        find_gpu("RTX 4090"),
    )
    config, plan = load_run(words).config, plan_of(*words, only=[card])
    found = faster(config, plan)
    left = plan_of(*words, *found.arguments.split(), only=[card]).shown
    assert found.tokens_per_second == pytest.approx(left.step.tokens_per_second)
    assert found.tokens_per_second > 1.25 * plan.shown.step.tokens_per_second
    assert found.arguments == "train.activation_checkpointing=auto train.micro_batch=auto"
    text = " ".join(called("plan", *words, "--gpu", "4090").stdout.split())
    speed = f"{rate_text(found.tokens_per_second, card)} tok/s"
    assert f"the same result sooner on RTX 4090, in the memory that is left: {speed}" in text
    assert (
        json.loads(called("plan", *words, "--gpu", "4090", "--json").stdout)["faster"]["arguments"] == found.arguments
    )


def test_more_rows_at_a_time_are_worth_a_word_where_weights_are_many():
    words = ["full-7b", "train.steps=100"]
    assert (
        faster(load_run(words).config, plan_of(*words, only=[find_gpu("H200")])).arguments == "train.micro_batch=auto"
    )


@pytest.mark.parametrize(
    ("words", "card"),
    [
        (["qlora-7b", "train.micro_batch=auto"], "RTX 4090"),  # all is left to the plan
        (["qlora-7b", "data.max_length=16384", "train.activation_checkpointing=full"], "RTX 4090"),  # nothing is left
        (["full-7b"], "RTX 4090"),  # does not fit
    ],
)
def test_nothing_is_promised_where_nothing_would_be_faster(words, card):
    words = [*words, "train.steps=100"]
    assert faster(load_run(words).config, plan_of(*words, only=[find_gpu(card)])) is None


# --- the other way round


def test_what_fits_the_other_way_round_fits_in_a_plan_too():
    """A run that no card of 80 GiB is said to hold is not said to fit into 80 GiB."""
    config = load_run(["full-7b", "train.steps=10"]).config
    assert fit_on(config, find_model("qwen2.5-7b"), plan_device(config, A100)) is None
    assert what_fits(config, 80 * 2**30).micro_batch_checkpointed is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--fit", "24MB"), "at least 1GiB"),
        (("--fit", "0"), "at least 1GiB"),
        (("--fit", "24GiB", "--gpu", "4090"), "--gpu"),
    ],
)
def test_a_size_that_cannot_be_meant_says_what_to_type(home, words, says):
    said = called("plan", "qlora-7b", *words)
    assert said.returncode == 2 and says in said.stderr and len(said.stderr.splitlines()) == 1
