"""Advice for a run that does not fit: every line of it fits when it is typed, and every way is tried."""

import random
import shlex

import pytest

from conftest import called
from sojourn.catalog.gpus import find_gpu, gpus
from sojourn.config.load import load_run
from sojourn.errors import UserError
from sojourn.plan.advice import advise
from sojourn.plan.offers import make_plan

CARDS = [card for card in gpus() if card.capability is not None and card.capability >= (7, 0)]
A100 = find_gpu("A100 80GB")


def some_run(numbers):
    """A preset with some settings that take much memory."""
    preset = numbers.choice(["full-7b", "qlora-7b", "qlora-14b", "lora-20k", "large", "xxl"])
    words = [preset, "train.steps=100", f"data.max_length={numbers.choice([512, 2048, 8192, 65536])}"]
    if preset.startswith(("full", "lora", "qlora")):
        base = numbers.choice(["qwen2.5-0.5b", "qwen2.5-7b", "llama-3.1-8b", "qwen2.5-32b", "llama-3.1-70b"])
        words += [f"model.base={base}", f"method.kind={numbers.choice(['full', 'lora', 'qlora'])}"]
    choices = {
        "train.micro_batch": [1, 4, "auto"], "train.activation_checkpointing": ["off", "full", "auto"],
        "train.optimizer": ["adamw", "adamw_8bit", "paged_adamw", "muon"], "advanced.chunked_loss": ["off", "auto"],
        "train.offload": ["off", "off", "optimizer"], "train.global_batch": [8, 16],
    }  # fmt: skip
    return [*words, *(f"{key}={numbers.choice(values)}" for key, values in choices.items() if numbers.random() < 0.5)]


def typed(words, advice):
    return load_run([*words, *shlex.split(advice.arguments)]).config


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_what_is_advised_fits_when_it_is_typed(home, seed):
    numbers, advised = random.Random(seed), 0
    while advised < 4:
        words, card = some_run(numbers), numbers.choice(CARDS)
        try:
            config = load_run(words).config
        except UserError:  # settings that exclude each other
            continue
        if any(offer.fits for offer in make_plan(config, [card]).offers):
            continue
        found = advise(config, card)
        speeds = [one.tokens_per_second for one in found]
        assert speeds == sorted(speeds, reverse=True)
        for one in found:
            count = max(change.count for change in one.changes)
            offers = make_plan(typed(words, one), [card]).offers
            assert any(offer.fits and offer.count >= count for offer in offers), (words, card.name, one.arguments)
            advised += 1


def test_a_7b_on_one_a100_is_trained_whole_in_several_ways(home):
    words = ["full-7b", "train.steps=100"]
    found = advise(load_run(words).config, A100)
    arguments = {one.arguments for one in found}
    assert {"train.optimizer=paged_adamw_8bit", "train.optimizer=adamw train.offload=optimizer"} <= arguments
    assert {"method.kind=lora", "method.kind=qlora", "train.optimizer=adamw --gpus 0,1"} <= arguments
    offloaded = next(one for one in found if one.arguments.endswith("train.offload=optimizer"))
    assert 56 < offloaded.host_memory / 2**30 < 58
    assert "GiB of host memory" in " ".join(called("plan", *words, "--gpu", "A100 80GB").stdout.split())


def test_what_keeps_the_result_is_looked_for_even_where_adapters_would_do(home):
    large = ["train.micro_batch=8", "train.activation_checkpointing=off", "train.optimizer=adamw"]
    words = ["full-7b", "train.steps=100", *large]
    found = advise(load_run(words).config, A100, most=1)
    kept = [one for one in found if one.keeps_result]
    assert kept and all(len(one.changes) > 1 for one in kept) and not all(one.keeps_result for one in found)


def test_of_shorter_rows_only_the_longest_that_fit_are_named(home):
    found = advise(load_run(["qlora-14b", "train.steps=10", "data.max_length=65536"]).config, find_gpu("RTX 4090"), 1)
    lengths = [change.settings["data.max_length"] for one in found for change in one.changes if change.kind == "rows"]
    assert len(lengths) == 1


def test_a_v100_needs_a_build_of_torch_that_still_carries_it(home):
    text = " ".join(called("plan", "lora-20k", "train.steps=10", "--gpu", "V100 32GB").stdout.split())
    assert "needs torch's CUDA 12.6 build" in text
    assert "CUDA 12.6" not in called("plan", "lora-20k", "train.steps=10", "--gpu", "T4").stdout
