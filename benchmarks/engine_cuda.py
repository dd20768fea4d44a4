"""The builtin engine on a GPU, without a gateway: a 7B-shaped model with random weights.

    python -m benchmarks.engine_cuda [--quantize fp8|int8|nf4] [--rows 1,8,32,128] [--short]
    python -m benchmarks.engine_cuda --save FOLDER

Prints decode throughput and inter-token latency for each number of requests, greedy, with top-p, and with LoRA
adapters; then TTFT of 2,000-token prompts in a closed loop of 32 clients, and what 10,000 short requests leave behind.
`--save` writes model and tokenizer for `sojourn bench serve FOLDER`.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

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
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
CONTEXT, ROWS = 4096, 128
rng = random.Random(0)  # noqa: S311


def make_model() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SHAPE)).eval()
    torch.set_default_dtype(torch.float32)
    return model


def save(folder: Path) -> None:
    """The tokenizer has bytes, and a word for every other number: each token is text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make_model().save_pretrained(folder)
    letters = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = [*letters, *(f"Ġw{number}" for number in range(len(letters), SHAPE["vocab_size"]))]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)


def make_engine(quantization: str | None) -> Engine:
    ops = CudaOps(quantization)
    model = make_model()
    decoder = read_decoder(model, ops.pack, CONTEXT)
    del model
    torch.cuda.empty_cache()
    print(f"{quantization or 'bf16'}: {torch.cuda.memory_allocated() / 2**30:.2f} GiB of weights", flush=True)
    engine = Engine(decoder, ops, EngineOptions(ROWS, 2048, CONTEXT, 1 + ROWS * 136))
    began = time.perf_counter()
    engine.warm_up()
    print(f"warm-up {time.perf_counter() - began:.1f} s", flush=True)
    return engine


def request(index: int, prompt: int, new: int, params: SamplingParams, adapter: str | None = None) -> Request:
    ids = [rng.randrange(150_000) for _ in range(prompt)]
    return Request(str(index), ids, params, row_key(0, index), new, adapter=adapter)


def percentile(values: list[float], share: int) -> float:
    return sorted(values)[len(values) * share // 100] * 1000


def decode(engine: Engine, rows: int, params: SamplingParams, adapters: int = 0) -> None:
    """128 tokens of prompt, 128 new ones. The second half of the steps is decoding alone."""
    for index in range(rows):
        adapter = f"adapter {index % adapters}" if adapters else None
        engine.add(request(index, 128, 128, params, adapter))
    times, counts = [], []
    while engine.has_work:
        counts.append(sum(len(output.tokens) for output in engine.step()))
        times.append(time.perf_counter())
    half = len(times) // 2
    gaps = [after - before for before, after in zip(times[half:-2], times[half + 1 : -1], strict=True)]
    speed = sum(counts[half + 1 : -1]) / (times[-2] - times[half])
    kind = f", temperature {params.temperature}, top-p {params.top_p}" if params.temperature else ""
    kind += f", {adapters} LoRA adapters" if adapters else ""
    print(
        f"{rows:>4} requests{kind}: {speed:,.0f} tok/s while decoding, ITL p50 {percentile(gaps, 50):.2f} ms, "
        f"p90 {percentile(gaps, 90):.2f} ms",
        flush=True,
    )


def add_adapters(engine: Engine, count: int, rank: int = 16) -> None:
    """LoRA on all linear layers, with random weights."""
    decoder = engine.decoder
    width, mlp, spec = decoder.embedding_VD.shape[1], decoder.mlp_size, decoder.layers[0].attention
    heads, qkv = spec.heads * spec.head_dim, (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    sizes = {"qkv": (width, qkv, 3), "o": (heads, width, 1), "gate_up": (width, 2 * mlp, 2), "down": (mlp, width, 1)}
    for number in range(count):
        engine.adapters._loaded[f"adapter {number}"] = {
            (layer, name): (0.01 * torch.randn(parts * rank, inputs), 0.01 * torch.randn(outputs, parts * rank))
            for layer in range(len(decoder.layers))
            for name, (inputs, outputs, parts) in sizes.items()
        }
    engine.adapters._join(decoder)


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
    parser.add_argument("--quantize", choices=["fp8", "int8", "nf4"])
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--short", action="store_true", help="greedy decoding only")
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    if given.save is not None:
        save(given.save)
        return
    engine = make_engine(given.quantize)
    for rows in given.rows.split(","):
        decode(engine, int(rows), SamplingParams())
    if given.short:
        return
    decode(engine, 32, SamplingParams(temperature=0.8, top_p=0.9))
    long_prompts(engine)
    many(engine)
    add_adapters(engine, 4)
    for rows in (1, 32):
        decode(engine, rows, SamplingParams(), adapters=4)
        decode(engine, rows, SamplingParams(), adapters=4)  # the graphs are captured


if __name__ == "__main__":
    main()
