"""`sojourn plan --serve`: how many users a GPU holds, by the figures that the engine itself uses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from conftest import called
from sojourn.catalog.gpus import find_gpu
from sojourn.catalog.models import find_model
from sojourn.estimate.serving import BLOCK, decode_rate, kv_bytes_per_token, kv_memory, users_in, weight_bytes
from sojourn.plan.serving import plan_serving, serving_lines
from sojourn.resolve.config_json import spec_of_file

QWEN, CARD = find_model("qwen2.5-7b"), find_gpu("4090")


def test_the_engine_divides_its_memory_as_the_plan_says(tiny) -> None:
    from sojourn.infer.load import load_model
    from sojourn.infer.open_engine import EngineSettings, open_engine

    loaded = load_model(str(tiny.base), "cpu")
    elements = sum(one.numel() for one in loaded.model.parameters())
    shape, memory, context = spec_of_file(tiny.base / "config.json"), 1 << 20, 64
    engine = open_engine(loaded, EngineSettings(context=context, kv_bytes=memory, max_rows=10_000))
    assert weight_bytes(shape, 4) == 4 * elements
    assert engine.decoder.dtype == torch.float32
    assert engine.decoder.kv_bytes_per_token == kv_bytes_per_token(shape, 4)
    held = engine.scheduler.pool.total // (context // BLOCK)
    assert held == users_in(memory, kv_bytes_per_token(shape, 4), context) > 1


def test_weights_cache_and_the_rest_are_the_card() -> None:
    plan = plan_serving(QWEN, CARD)
    assert plan.weights == 2 * QWEN.parameters and plan.kv_per_token == 2 * 28 * 4 * 128 * 2
    left = plan.usable - plan.weights
    assert kv_memory(left - (1 << 30), "cuda") < plan.kv < kv_memory(left, "cuda")
    assert plan.users(4096) == plan.kv // (4096 * plan.kv_per_token)
    assert plan.users(4090) == plan.users(4096) and plan.users(4097) <= plan.users(4096)  # whole blocks
    quantized = plan_serving(QWEN, CARD, quantized=True)
    assert plan.weights / 2 < quantized.weights < plan.weights * 0.56 and quantized.users(4096) > plan.users(4096)
    assert kv_memory(100, "cpu", 2) * 2 <= kv_memory(100, "cpu") and kv_memory(1 << 30, "cuda") == 0


@pytest.mark.parametrize(
    ("users", "quantization", "measured"),
    [(1, None, 257), (8, None, 1732), (32, None, 6672), (128, None, 21485), (1, "int8", 385), (32, "int8", 9946)],
)
def test_decoding_is_planned_as_fast_as_it_was_measured_on_an_h200(users, quantization, measured) -> None:
    """benchmarks/LOG.md, 2026-11-18: 7B shape, prompts and answers of 128 tokens."""
    planned = decode_rate(QWEN, find_gpu("H200"), users, 192, quantization)
    assert planned == pytest.approx(measured, rel=0.15)


def test_more_users_are_faster_together_and_slower_each_and_longer_caches_slow_down() -> None:
    rates = [decode_rate(QWEN, CARD, users, 2048) for users in (1, 2, 8, 32)]
    assert rates == sorted(rates) and [r / n for r, n in zip(rates, (1, 2, 8, 32), strict=True)] == sorted(
        (r / n for r, n in zip(rates, (1, 2, 8, 32), strict=True)), reverse=True
    )
    assert decode_rate(QWEN, CARD, 8, 8192) < decode_rate(QWEN, CARD, 8, 1024)
    sparse = find_model("qwen3-30b-a3b")
    assert decode_rate(sparse, find_gpu("H200"), 1, 1024) > decode_rate(
        find_model("qwen3-32b"), find_gpu("H200"), 1, 1024
    )
    assert decode_rate(QWEN, find_gpu("M2 Max"), 1, 1024) is None


def test_the_answer_is_the_first_sentence() -> None:
    said = called("plan", "qwen2.5-7b", "--serve", "--gpu", "4090", "--context", "8192")
    first, *rest = said.stdout.splitlines()
    users = plan_serving(QWEN, CARD).users(8192)
    assert first.startswith(f"RTX 4090 holds {users} users of qwen2.5-7b with 8,192 tokens each, in bf16")
    assert any(line.split()[0] == "8,192" and int(line.split()[3]) == users for line in rest if line.strip())
    values = json.loads(called("plan", "qwen2.5-7b", "--serve", "--gpu", "4090", "--json").stdout)
    assert values["context"] == 4096 and values["gpus"][0]["users"]["8192"] == users
    cards = called("plan", "qwen2.5-7b", "--serve").stdout
    assert "the smallest GPU that holds it is" in cards and "Apple" not in cards and "H200" in cards


def test_what_does_not_fit_is_said_with_what_would() -> None:
    (line,) = serving_lines(QWEN, [find_gpu("3060")], 4096, named=True)
    assert "holds no user" in line and "--to gguf" in line
    assert plan_serving(QWEN, find_gpu("4080"), quantized=True).users(4096) > 0  # loaded in bf16 first, then quantized
    lines = serving_lines(QWEN, [find_gpu("4080")], 4096, named=True)
    assert "--quantize" in lines[0] and lines[1].startswith("memory in int8 or fp8")
    lines = serving_lines(replace(QWEN, positions=2048, family="gpt_oss"), [CARD], 4096, named=True)
    assert "--engine vllm" in lines[1] and "fewer than --context" in lines[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nothing-7b", "--serve"), "no model called"),
        (("small", "--serve", "--budget", "5"), "leave out one of the two"),
        (("small", "--serve", "--fit", "24GiB"), "leave out one of the two"),
        (("small", "--context", "4096"), "for --serve"),
    ],
)
def test_wrong_questions_are_one_line(words: tuple[str, ...], says: str) -> None:
    said = called("plan", *words)
    assert said.returncode == 2 and says in said.stderr and len(said.stderr.splitlines()) == 1


def test_a_preset_a_folder_and_a_run_are_models_too(tiny) -> None:
    for name in ("small", str(tiny.base)):
        assert "T4 holds" in called("plan", name, "--serve", "--gpu", "T4").stdout
