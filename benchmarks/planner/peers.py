"""What others answer for the same runs, by their own computations, where they are installed. None needs a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from benchmarks.planner.cases import sizes
from benchmarks.planner.replan import Row, workload_of_row
from sojourn.estimate.workload import LINEAR, Workload
from sojourn.train.metrics.environment import version_of

# What each counts; which figure that comes nearest to is in COLUMN.
COUNTS = {
    "accelerate, float32": "weights, gradients and Adam's states in fp32 (estimate-memory: training using Adam); "
    "no activations, and only where all weights are trained with AdamW",
    "accelerate, float16": "the largest of weights, gradients and optimizer states, not their sum, in mixed precision",
    "deepspeed, ZeRO-2": "model states of its own engine on one GPU without offloading; no activations, and only where "
    "all weights are trained with AdamW",
    "deepspeed, ZeRO-3": "the same for ZeRO-3, with the largest layer",
    "fitcheck": "everything, context included, for plain transformers; no packing, selective activation "
    "checkpointing, chunked loss or torch.compile",
}
COLUMN = {peer: "device" if peer == "fitcheck" else "allocated" for peer in COUNTS}

Answers = dict[str, int]


def ask_peers(rows: list[Row], before: dict[str, Any]) -> dict[str, Any]:
    """Puts answers into the rows, and returns who answered, in which version. Earlier answers stay where a peer is no
    longer here."""
    versions = dict(before)
    for package, distribution, ask in _PEERS:
        if find_spec(package) is None:
            continue
        for row in rows:
            answers: Answers = {}
            with suppress(ValueError):  # what it does not know
                answers = ask(workload_of_row(row))
            row.setdefault("peers", {}).update(answers)
            versions |= dict.fromkeys(answers, version_of(distribution))
    return versions


def _plain(work: Workload) -> bool:
    return not work.uses_lora and work.optimizer == "adamw" and work.offload == "off"


def _accelerate(work: Workload) -> Answers:
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModelForCausalLM

    if not _plain(work):
        return {}
    config = AutoConfig.for_model(work.model.family, **sizes(work.model))
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    total, _ = calculate_maximum_sizes(model)
    return {
        f"accelerate, {dtype}": int(max(estimate_training_usage(total, dtype).values()))
        for dtype in ("float32", "float16")
    }


def _deepspeed(work: Workload) -> Answers:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it wonders aloud
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    if not _plain(work):
        return {}
    count, largest = work.model.parameters, work.model.embedding_parameters
    second = estimate_zero2_model_states_mem_needs(count, 1, 1, cpu_offload=False)
    third = estimate_zero3_model_states_mem_needs(count, largest, 1, 1, cpu_offload=False, cpu_offload_params=False)
    return {"deepspeed, ZeRO-2": second[1], "deepspeed, ZeRO-3": third[1]}


def _fitcheck(work: Workload) -> Answers:
    import fitcheck

    shape = work.model
    if work.activation_checkpointing == "selective" or work.offload != "off":
        return {}
    model = fitcheck.ModelConfig(
        name=shape.name, num_params=shape.parameters, hidden_size=shape.hidden, num_layers=shape.layers,
        num_attention_heads=shape.heads, num_kv_heads=shape.kv_heads, intermediate_size=shape.ffn,
        vocab_size=shape.vocab, head_dim=shape.head_dim, tie_word_embeddings=shape.tied,
    )  # fmt: skip
    quantised = work.method == "qlora"
    run = fitcheck.TrainingConfig(
        precision=work.precision, quantization="nf4" if quantised else "none", double_quant=quantised,
        optimizer=work.optimizer.replace("_", "-"), batch_size=work.micro_batch, seq_len=work.sequence_length,
        lora_rank=work.lora_rank if work.uses_lora else None,
        lora_targets=[name for name in LINEAR if name in work.lora_targets],
        grad_checkpoint=work.activation_checkpointing == "full", flash_attn=True,
        grad_accum_steps=work.gradient_accumulation,
    )  # fmt: skip
    return {"fitcheck": int(fitcheck.estimate(model, run, fitcheck.get_gpu("h200")).total_mib * 2**20)}


_PEERS: tuple[tuple[str, str, Callable[[Workload], Answers]], ...] = (
    ("accelerate", "accelerate", _accelerate),
    ("deepspeed", "deepspeed", _deepspeed),
    ("fitcheck", "fitcheck-llm", _fitcheck),
)
