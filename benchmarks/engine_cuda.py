"""The builtin engine on a GPU, without a gateway: a 7B-shaped model with random weights.

    python -m benchmarks.engine_cuda [--quantize fp8|int8] [--rows 1,8,32,128]

Prints decode throughput and inter-token latency for each number of requests, then TTFT of 2,000-token prompts in a
closed loop of 32 clients, then what 10,000 short requests leave behind.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sojourn.infer.engine.cuda.ops import CudaOps
from sojourn.infer.engine.engine import Engine, EngineOptions
from sojourn.infer.engine.request import Request
from sojourn.infer.read_decoder import read_decoder
from sojourn.infer.sampling import SamplingParams, row_key

SHAPE = {
    "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
CONTEXT, ROWS = 4096, 128
rng = random.Random(0)  # noqa: S311


def make_engine(quantization: str | None) -> Engine:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SHAPE)).eval()
    torch.set_default_dtype(torch.float32)
    ops = CudaOps(quantization)
    engine = Engine(read_decoder(model, ops.pack, CONTEXT), ops, EngineOptions(ROWS, 2048, CONTEXT, 1 + ROWS * 136))
    began = time.perf_counter()
    engine.warm_up()
    print(f"warm-up {time.perf_counter() - began:.1f} s", flush=True)
    return engine


def request(index: int, prompt: int, new: int, params: SamplingParams) -> Request:
    return Request(str(index), [rng.randrange(150_000) for _ in range(prompt)], params, row_key(0, index), new)


def percentile(values: list[float], share: int) -> float:
    return sorted(values)[len(values) * share // 100] * 1000


def decode(engine: Engine, rows: int, params: SamplingParams) -> None:
    """128 tokens of prompt, 128 new ones. The second half of the steps is decoding alone."""
    for index in range(rows):
        engine.add(request(index, 128, 128, params))
    times, counts = [], []
    while engine.has_work:
        counts.append(sum(len(output.tokens) for output in engine.step()))
        times.append(time.perf_counter())
    half = len(times) // 2
    gaps = [after - before for before, after in zip(times[half:-2], times[half + 1 : -1], strict=True)]
    speed = sum(counts[half + 1 : -1]) / (times[-2] - times[half])
    print(
        f"{rows:>4} requests, temperature {params.temperature}: {speed:,.0f} tok/s while decoding, ITL p50 "
        f"{percentile(gaps, 50):.2f} ms, p90 {percentile(gaps, 90):.2f} ms",
        flush=True,
    )


def long_prompts(engine: Engine, clients: int = 32, count: int = 160) -> None:
    sent: dict[str, float] = {}
    first: dict[str, float] = {}
    active = done = made = 0
    while done < count:
        while active < clients and made < count:
            one = request(made, 2000, 128, SamplingParams())
            sent[one.id] = time.perf_counter()
            engine.add(one)
            made, active = made + 1, active + 1
        for output in engine.step():
            first.setdefault(output.request.id, time.perf_counter() - sent[output.request.id])
            if output.request.is_finished:
                active, done = active - 1, done + 1
    steady = list(first.values())[clients:]  # the first ones come all at once
    print(f"2,000-token prompts, {clients} clients: TTFT p50 {percentile(steady, 50):.0f} ms, p90 "
          f"{percentile(steady, 90):.0f} ms; the first {clients} at once: p90 "
          f"{percentile(list(first.values())[:clients], 90):.0f} ms", flush=True)  # fmt: skip


def many(engine: Engine, count: int = 10_000) -> None:
    before = torch.cuda.memory_allocated()
    for start in range(0, count, 250):
        for index in range(250):
            engine.add(request(start + index, 8, 4, SamplingParams()))
        while engine.has_work:
            engine.step()
    pool, more = engine.scheduler.pool, torch.cuda.memory_allocated() - before
    print(f"{count:,} requests: {more} bytes more, {pool.total - pool.free} blocks in use")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quantize", choices=["fp8", "int8"])
    parser.add_argument("--rows", default="1,8,32,128")
    given = parser.parse_args()
    engine = make_engine(given.quantize)
    for rows in given.rows.split(","):
        decode(engine, int(rows), SamplingParams())
    decode(engine, 32, SamplingParams(temperature=0.8, top_p=0.9))
    long_prompts(engine)
    many(engine)


if __name__ == "__main__":
    main()
