"""The engine beside `model.generate` of transformers, in one process, turn by turn: tokens per second of both.

python benchmarks/decode.py [--model FOLDER] [--device cuda] [--dtype bfloat16] [--rows 1 64] [--tokens 64]

Without --model: a model of SmolLM2-135M's shape with random weights. Also checks, per row, that a batch gives what each
prompt gives alone. Needs torch and transformers only.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from sojourn.infer.engine.block_pool import BLOCK
from sojourn.infer.engine.cpu.smoke_test import open_cpu_ops
from sojourn.infer.engine.engine import DecodeLoop, Engine, EngineOptions
from sojourn.infer.engine.ops_torch import TorchOps
from sojourn.infer.engine.request import Request
from sojourn.infer.read_decoder import read_decoder
from sojourn.infer.sampling import SamplingParams, row_key
from sojourn.infer.transformers_forward import open_transformers_loop

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "eos_token_id": None,
}  # fmt: skip
CONTEXT = 1024  # tokens
MODES = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8, top_p=0.9)}


def main() -> None:
    given = read_arguments()
    model = open_model(given).to(given.device, getattr(torch, given.dtype)).eval()
    rng = random.Random(1)  # noqa: S311
    prompts = [[rng.randrange(1000, 40000) for _ in range(rng.randrange(24, 65))] for _ in range(max(given.rows))]
    loops = open_loops(model, max(given.rows), given.device)
    for rows in given.rows:
        for name, params in MODES.items():
            seconds: dict[str, list[float]] = {who: [] for who in (*loops, "transformers")}
            found: dict[str, list[list[int]]] = {}
            for _ in range(given.repeats + 1):  # the first warms up
                for who, took in seconds.items():
                    began = time.perf_counter()
                    if who in loops:
                        found[who] = ours(loops[who], prompts[:rows], params, given.tokens)
                    else:
                        found[who] = theirs(model, prompts[:rows], params, given.tokens)
                    took.append(time.perf_counter() - began)
            speeds = {who: rows * given.tokens / median(took[1:]) for who, took in seconds.items()}
            facts: dict[str, Any] = {
                "device": given.device, "dtype": given.dtype, "rows": rows, "mode": name,
                **{f"{who}_tokens_per_second": round(speed, 1) for who, speed in speeds.items()},
            }  # fmt: skip
            for who, loop in loops.items():
                facts[f"{who}_ratio"] = round(speeds[who] / speeds["transformers"], 3)
                if name == "greedy":
                    facts[f"{who}_rows_equal_to_transformers"] = sum(
                        map(list.__eq__, found[who], found["transformers"])
                    )
                if rows > 1:
                    alone = [ours(loop, [ids], params, given.tokens, at)[0] for at, ids in enumerate(prompts[:8])]
                    facts[f"{who}_of_8_rows_equal_to_alone"] = sum(map(list.__eq__, alone, found[who]))
            print(json.dumps(facts), flush=True)


def open_loops(model: Any, rows: int, device: str) -> dict[str, DecodeLoop]:
    """The builtin engine, and the same loop over transformers' forward; each over a copy of the model."""
    ops: Any = TorchOps()
    if device == "cuda":
        from sojourn.infer.engine.cuda.ops import CudaOps

        ops = CudaOps()
    elif device == "cpu":
        ops = open_cpu_ops() or ops
    decoder = read_decoder(copy.deepcopy(model), ops.pack, CONTEXT)
    return {
        "engine": Engine(decoder, ops, EngineOptions(rows, 2048, CONTEXT, 1 + rows * CONTEXT // BLOCK)),
        "loop_over_transformers": open_transformers_loop(copy.deepcopy(model), rows, CONTEXT, 4 << 30),
    }


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def open_model(given: argparse.Namespace) -> Any:
    if given.model:
        return AutoModelForCausalLM.from_pretrained(given.model)
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2))


def ours(
    loop: DecodeLoop, prompts: list[list[int]], params: SamplingParams, tokens: int, at: int = 0
) -> list[list[int]]:
    requests = [Request("", prompt, params, row_key(1, at + index), tokens) for index, prompt in enumerate(prompts)]
    loop.scheduler.pool.forget_all()
    for request in requests:
        loop.add(request)
    while loop.has_work:
        loop.step()
    return [request.tokens for request in requests]


def theirs(model: Any, prompts: list[list[int]], params: SamplingParams, tokens: int) -> list[list[int]]:
    width, device = max(map(len, prompts)), model.device
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    decoding: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if params.temperature:
        decoding = {"do_sample": True, "temperature": params.temperature, "top_p": params.top_p, "top_k": 0}
    with torch.no_grad():
        found = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, **decoding
        )
    return found[:, width:].tolist()  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
