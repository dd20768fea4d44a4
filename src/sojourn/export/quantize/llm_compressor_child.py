"""Quantizes a model's folder with llm-compressor. Runs in the environment that has it: imports nothing of Sojourn.

    python llm_compressor_child.py JOB.json

JOB: `kind` (gptq, awq, fp8-vllm), `model`, `tokenizer` and `out` (folders), `dtype`, `group_size`, `rows` (token ids).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def recipe(job: dict[str, Any]) -> Any:
    from llmcompressor.modifiers.quantization import QuantizationModifier

    if job["kind"] == "fp8-vllm":
        return QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": job["group_size"], "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": {**weights, "symmetric": True}}}
    if job["kind"] == "gptq":
        from llmcompressor.modifiers.gptq import GPTQModifier

        return GPTQModifier(config_groups=groups, ignore=["lm_head"])
    from llmcompressor.modifiers.transform.awq import AWQModifier

    return [AWQModifier(), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]


def calibration(job: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer

    rows = job["rows"]
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    return {
        "dataset": data, "max_seq_length": max(map(len, rows)), "num_calibration_samples": len(rows),
        "shuffle_calibration_samples": False,
        "processor": AutoTokenizer.from_pretrained(job["tokenizer"], local_files_only=True),
    }  # fmt: skip


def allow_awq_on_a_cpu() -> None:
    """llm-compressor 0.14 pins memory for a GPU that is not here."""
    from llmcompressor.pipelines.cache import IntermediatesCache

    IntermediatesCache.pin_memory = lambda *_: None


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import torch
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM

    if not torch.cuda.is_available():
        allow_awq_on_a_cpu()
    dtype = getattr(torch, job["dtype"])
    computed_in = dtype if torch.cuda.is_available() else torch.float32  # in which a CPU is several times faster
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=computed_in, use_safetensors=True, local_files_only=True
    )
    oneshot(model=model, recipe=recipe(job), **(calibration(job) if job["rows"] else {}))
    model.to(dtype).save_pretrained(job["out"], save_compressed=True)


if __name__ == "__main__":
    main()
