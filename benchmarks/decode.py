"""Our decode loop beside `model.generate` of transformers, in one process, turn by turn: tokens per second of both.

python benchmarks/decode.py [--model FOLDER] [--device cuda] [--dtype bfloat16] [--rows 1 64] [--tokens 64]

Without --model: a model of SmolLM2-135M's shape with random weights. Also checks, per row, that a batch gives what each
prompt gives alone. Needs torch and transformers only.
"""

from __future__ import annotations

import argparse
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

from sojourn.infer.decode import Row, decode
from sojourn.infer.sampling import SamplingParams, row_key

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "eos_token_id": None,
}  # fmt: skip
MODES = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8, top_p=0.9)}


def main() -> None:
    given = read_arguments()
    model = open_model(given).to(given.device, getattr(torch, given.dtype)).eval()
    rng = random.Random(1)  # noqa: S311
    prompts = [[rng.randrange(1000, 40000) for _ in range(rng.randrange(24, 65))] for _ in range(max(given.rows))]
    for rows in given.rows:
        for name, params in MODES.items():
            seconds: dict[str, list[float]] = {"ours": [], "transformers": []}
            found: dict[str, list[list[int]]] = {}
            for _ in range(given.repeats + 1):  # the first warms up
                for who, run in (("ours", ours), ("transformers", theirs)):
                    began = time.perf_counter()
                    found[who] = run(model, prompts[:rows], params, given.tokens)
                    seconds[who].append(time.perf_counter() - began)
            speeds = {who: rows * given.tokens / median(took[1:]) for who, took in seconds.items()}
            facts = {
                "device": given.device, "dtype": given.dtype, "rows": rows, "mode": name,
                **{f"{who}_tokens_per_second": round(speed, 1) for who, speed in speeds.items()},
                "ratio": round(speeds["ours"] / speeds["transformers"], 3),
            }  # fmt: skip
            if name == "greedy":
                facts["rows_equal_to_transformers"] = sum(map(list.__eq__, *found.values()))
            if rows > 1:
                alone = [ours(model, [prompt], params, given.tokens, at)[0] for at, prompt in enumerate(prompts[:8])]
                facts["of_8_rows_equal_to_alone"] = sum(map(list.__eq__, alone, found["ours"]))
            print(json.dumps(facts), flush=True)


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


def ours(model: Any, prompts: list[list[int]], params: SamplingParams, tokens: int, at: int = 0) -> list[list[int]]:
    rows = [Row(prompt, params, row_key(1, at + index), tokens) for index, prompt in enumerate(prompts)]
    decode(model, rows, frozenset(), 0)
    return [row.tokens for row in rows]


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
