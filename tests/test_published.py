"""Plans against what others published: `benchmarks/published.py` holds its bars, and its rows are what they say."""

import re
from functools import cache

import pytest
from benchmarks.published import BARS, DATA, LEAST_INSIDE, WIDEST, by_family, main, mean_error, read, share_inside

from sojourn.catalog.gpus import find_gpu
from sojourn.estimate.ceilings import attention_rate, matmul_rate
from sojourn.estimate.step_time import step_time
from sojourn.estimate.workload import Workload

rows = cache(read)


@pytest.mark.parametrize("family", BARS)
def test_the_mean_error_by_card_family_is_within_its_bar(family):
    assert mean_error(by_family(rows())[family]) <= BARS[family]


def test_four_of_five_published_runs_lie_in_their_range_and_ranges_are_narrow():
    assert len(rows()) >= 40 and share_inside(rows()) >= LEAST_INSIDE
    assert all(row.spread <= WIDEST for row in rows() if row.gpu.rates != "data sheet")


def test_long_rows_on_hopper_are_not_planned_too_fast():
    long = [row for row in rows() if row.workload.sequence_length >= 16_384 and row.family == "Hopper, several"]
    assert len(long) >= 5 and all(row.error < 0.20 for row in long)


def test_no_row_has_a_constant_of_its_own():
    """What differs from this engine stands with the source; a row says what was run and what came out."""
    ran = {"gpu", "board", "count", "nodes", "network_gbs", "model", "method", "micro_batch", "length", "accumulation"}
    how = {"stack", "engine", "fp8", "checkpointing", "optimizer", "rank", "targets", "dropout", "precision",
           "attention", "chunked_loss", "cuda_graphs"}  # fmt: skip
    known = ran | how | {"source", "step_seconds", "tokens_per_second"}
    assert all(set(row.row) <= known for row in rows())
    text = DATA.read_text(encoding="utf-8")
    assert len(re.findall(r"^url = ", text, re.M)) == len(re.findall(r"^\[source\.", text, re.M)) >= 10


def test_the_command_prints_every_row_and_succeeds(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert len([line for line in printed.splitlines() if " to " in line and "%" in line]) == len(rows())


def test_a_t4_sustains_what_its_power_limit_allows():
    assert matmul_rate("fp16", find_gpu("T4")) == 24e12
    assert find_gpu("T4").rates == "published" and "70 W" in find_gpu("T4").rates_source


def test_flash_attention_2_on_hopper_is_half_as_fast_as_cudnn():
    card = find_gpu("H200")
    work = rows()[0].workload
    sdpa, flash = (
        attention_rate(Workload(work.model, sequence_length=8192, attention=name), card, 8192)
        for name in ("sdpa", "flash_attention_2")
    )
    assert flash == pytest.approx(0.511 * sdpa)


def _communication(**changes):
    """Its share of a step on eight H100."""
    work = Workload(rows()[0].workload.model, "full", 4, 2048, engine="fsdp", **{"world_size": 8, **changes})
    step = step_time(work, find_gpu("H100"))
    return next(part.seconds for part in step.parts if part.name == "communication") / step.step_seconds


def test_what_is_communicated_costs_time_even_where_it_overlaps():
    assert 0.04 < _communication() < 0.20
    assert _communication(world_size=16, nodes=2) > 0.75  # over 25 Gbit/s
    assert _communication(world_size=16, nodes=2, network_gbs=400) < 1.2 * _communication()


def test_a_range_is_wider_the_less_is_known():
    work = Workload(rows()[0].workload.model, "lora", 4, 8192)
    known, others, unknown = (step_time(work, find_gpu(name)).spread for name in ("H200", "RTX 4090", "RTX 4080"))
    assert known < 0.12 < others < 0.25 < unknown < 0.40
