"""Sampling: every control is transformers' own, and what a row draws depends on its key and position alone."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from transformers.generation import logits_process as theirs

from sojourn.errors import UserError
from sojourn.infer.sampling import Sampler, SamplingParams, SamplingRow, row_key

VOCAB = 60
PROMPT = [3, 3, 7, 20]
DRAWS = 6000


def logits(seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def draw(params: SamplingParams, scores: torch.Tensor, count: int = DRAWS, position: int = 0) -> torch.Tensor:
    """The same logits in many rows of different keys."""
    rows = [SamplingRow(params, PROMPT, row_key(1, index), position) for index in range(count)]
    return Sampler(rows, scores.shape[1], "cpu")(scores.expand(count, -1).clone())


def assert_distribution(drawn: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-square against the expected probabilities; a token of probability 0 never comes."""
    counts = torch.bincount(drawn, minlength=len(expected)).double()
    assert not counts[expected == 0].any()
    wanted = expected.double() * len(drawn)
    rare = wanted < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]]).clamp(min=1e-9)
    degrees = max(1, int((~rare).sum()))
    statistic = float(((counts - wanted) ** 2 / wanted.clamp(min=1)).sum())
    assert statistic < degrees + 5 * math.sqrt(2 * degrees) + 10, (statistic, degrees)


CONTROLS = {
    "temperature": (SamplingParams(temperature=0.7), [theirs.TemperatureLogitsWarper(0.7)]),
    "top_k": (SamplingParams(temperature=1.0, top_k=5), [theirs.TopKLogitsWarper(5)]),
    "top_k of all": (SamplingParams(temperature=1.0, top_k=999), []),
    "top_p": (SamplingParams(temperature=1.0, top_p=0.8), [theirs.TopPLogitsWarper(0.8)]),
    "a small top_p": (SamplingParams(temperature=1.0, top_p=1e-6), [theirs.TopPLogitsWarper(1e-6)]),
    "top_p and a large top_k": (
        SamplingParams(temperature=1.0, top_k=50, top_p=0.7),
        [theirs.TopKLogitsWarper(50), theirs.TopPLogitsWarper(0.7)],
    ),
    "min_p": (SamplingParams(temperature=1.0, min_p=0.2), [theirs.MinPLogitsWarper(0.2)]),
    "repetition": (
        SamplingParams(temperature=1.0, repetition_penalty=1.5), [theirs.RepetitionPenaltyLogitsProcessor(1.5)],
    ),
    "bias": (
        SamplingParams(temperature=1.0, logit_bias={5: 4.0, 9: -100.0}),
        [theirs.SequenceBiasLogitsProcessor({(5,): 4.0, (9,): -100.0})],
    ),
    "all": (
        SamplingParams(
            temperature=1.3, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2, logit_bias={5: 2.0}
        ),
        [
            theirs.SequenceBiasLogitsProcessor({(5,): 2.0}), theirs.RepetitionPenaltyLogitsProcessor(1.2),
            theirs.TemperatureLogitsWarper(1.3), theirs.TopKLogitsWarper(20), theirs.TopPLogitsWarper(0.9),
            theirs.MinPLogitsWarper(0.05),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_draws_from_the_distribution_of_transformers(name: str) -> None:
    params, processors = CONTROLS[name]
    scores = logits(len(name))
    expected = scores.clone()
    for process in processors:
        expected = process(torch.tensor([PROMPT]), expected)
    assert_distribution(draw(params, scores), expected.softmax(-1)[0])


def test_tokens_that_tie_with_the_kth_are_kept_as_transformers_keeps_them() -> None:
    scores = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0] + [-5.0] * (VOCAB - 5)])
    drawn = draw(SamplingParams(temperature=1.0, top_k=2), scores, 400)
    assert set(drawn.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "least", [{"top_p": 5e-324}, {"temperature": 5e-324}, {"top_k": 1, "repetition_penalty": 5e-324}]
)
def test_what_is_zero_in_fp32_leaves_the_most_likely_token(least: dict[str, float]) -> None:
    assert set(draw(SamplingParams(**least), torch.tensor([[1.0, 3.0, 2.0]]), 20).tolist()) == {1}


def test_top_p_looks_beyond_the_first_candidates_where_it_must() -> None:
    flat = torch.zeros(1, 5000)
    drawn = draw(SamplingParams(temperature=1.0, top_p=0.9), flat, 800)
    assert len(set(drawn.tolist())) > 650  # of 4,500 tokens, not of the 1,024 first candidates
    sloped = torch.arange(5000.0)[None] * -1e-4
    assert draw(SamplingParams(temperature=1.0, top_p=0.9), sloped, 800).max() > 2000


def test_frequency_and_presence_penalties_are_those_of_openai() -> None:
    scores = torch.zeros(1, 4)
    row = SamplingRow(SamplingParams(frequency_penalty=0.5, presence_penalty=1.0), [0, 0, 0], 1)
    sampler = Sampler([row], 4, "cpu")
    given = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    # Greedy: 2.0; then 2-0.5-1 = 0.5 < 1.0; then 1-1.5 = -0.5 < 0.5; then 0.5-0.5 = 0.0 ties with 0.0, the first wins.
    assert [int(sampler(given)) for _ in range(4)] == [0, 1, 0, 0]
    assert int(Sampler([SamplingRow(SamplingParams(), [], 1)], 4, "cpu")(scores)) == 0


def test_what_a_row_draws_depends_on_its_key_and_position_alone() -> None:
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=0.6, top_k=7), SamplingParams()]
    rows = [(params[i % 3], row_key(5, i)) for i in range(12)]
    many = Sampler([SamplingRow(p, PROMPT, key) for p, key in rows], VOCAB, "cpu")
    together = torch.stack([many(logits(step).expand(12, -1).clone()) for step in range(4)])
    for at, (p, key) in enumerate(rows):
        alone = Sampler([SamplingRow(p, PROMPT, key)], VOCAB, "cpu")
        assert [int(alone(logits(step))) for step in range(4)] == together[:, at].tolist()
        later = Sampler([SamplingRow(p, PROMPT, key, position=3)], VOCAB, "cpu")  # after a preemption
        assert int(later(logits(3))) == int(together[3, at])


def test_rounding_of_the_logits_hardly_ever_changes_a_draw() -> None:
    flat = logits(3, spread=0.5)
    params = SamplingParams(temperature=1.0)
    assert (draw(params, flat) != draw(params, flat + 1e-6 * logits(4))).float().mean() < 1e-3


def test_draws_of_neighbouring_rows_positions_and_seeds_are_independent() -> None:
    flat = torch.zeros(1, 16)
    params = SamplingParams(temperature=1.0)
    rows = [SamplingRow(params, [], row_key(seed, index)) for seed in range(40) for index in range(40)]
    sampler = Sampler(rows, 16, "cpu")
    first, second = (sampler(flat.expand(len(rows), -1).clone()) for _ in range(2))
    table = first.view(40, 40)
    for one, other in ((first, second), (table[:, :-1], table[:, 1:]), (table[:-1], table[1:])):
        pairs = Counter(zip(one.flatten().tolist(), other.flatten().tolist(), strict=True))
        expected = one.numel() / 256
        statistic = sum((pairs[a, b] - expected) ** 2 / expected for a in range(16) for b in range(16))
        assert abs(statistic - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_draw_no_token(value: float) -> None:
    broken = logits()
    broken[0, 5] = value
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)):
        assert draw(params, broken, 2).tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1}, "temperature is -1"), ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"), ({"top_k": -1}, "top_k is -1"), ({"min_p": 2.0}, "min_p is 2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"), ({"frequency_penalty": 3.0}, "from -2 to 2"),
        ({"logit_bias": {1: 101.0}}, "token 1 is 101"), ({"stop": ("",)}, "stop string is empty"),
        ({"n": 2}, "set a temperature"), ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_one_line(given: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**given)


def test_a_bias_for_a_token_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UserError, match="no token 60; it has 60"):
        draw(SamplingParams(logit_bias={60: 1.0}), logits(), 1)
