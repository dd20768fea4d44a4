"""The peers, as their guides use them: transformers, Liger and Unsloth on our track, each in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sojourn.bench.train.track import Task, Tensors, race
from sojourn.machine.probe_software import importable
from sojourn.model.quiet import quiet_transformers

Row = dict[str, Any]


def contend() -> None:
    """The process of one peer."""
    task = Task(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(task.out).write_text(json.dumps(_run(task)), encoding="utf-8")


def _run(task: Task) -> Row:
    if task.role == "plain":
        from sojourn.bench.train.plain import run_plain

        return run_plain(task)
    if task.role == "gpt":
        from sojourn.bench.train.gpt import run_gpt

        return run_gpt(task)
    if task.role == "trl":
        from sojourn.bench.train.sft import run_trl

        return run_trl(task)
    return {"transformers": _transformers, "liger": _liger, "unsloth": _unsloth}[task.role](task)


def _transformers(task: Task) -> Row:
    model = open_model(task)
    if task.compile:
        model.compile()
    return _race(task, model)


def _liger(task: Task) -> Row:
    from liger_kernel import transformers as liger  # type: ignore[import-not-found]

    {"llama": liger.apply_liger_kernel_to_llama, "qwen2": liger.apply_liger_kernel_to_qwen2}[task.family]()
    return _race(task, open_model(task, "flash_attention_2" if importable("flash_attn") else "sdpa"))


def _unsloth(task: Task) -> Row:
    from unsloth import FastLanguageModel  # type: ignore[import-not-found]

    model, _ = FastLanguageModel.from_pretrained(
        task.base, max_seq_length=task.artefact.row_length, load_in_4bit=task.method == "qlora",
        full_finetuning=task.method == "full",
    )  # fmt: skip
    if task.adapter:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        model = FastLanguageModel.get_peft_model(
            model, r=task.rank, lora_alpha=task.alpha, lora_dropout=0, use_gradient_checkpointing="unsloth"
        )
        set_peft_model_state_dict(model, load_file(f"{task.adapter}/adapter_model.safetensors"))
    return _race(task, model.train())


def open_model(task: Task, attention: str = "sdpa") -> Any:
    """The common weights, with the common adapter where one is trained."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quiet_transformers()
    dtype = torch.float32 if task.precision == "fp32" else getattr(torch, task.weights)
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention, "device_map": {"": task.device}}
    if task.method == "qlora":
        how["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    model = AutoModelForCausalLM.from_pretrained(task.base, **how)
    model.config.use_cache = False
    recompute = {"use_reentrant": False}
    if task.method == "qlora":
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, task.checkpointing, recompute)
    elif task.checkpointing:
        model.gradient_checkpointing_enable(recompute)
    if task.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, task.adapter, is_trainable=True)
    return model.train()


def _race(task: Task, model: Any) -> Row:
    def loss_of(inputs: Tensors, targets: int) -> Any:
        return model_loss(task, model, inputs, targets)

    return race(task, model, loss_of)


def model_loss(task: Task, model: Any, inputs: Tensors, targets: int) -> Any:
    """Its own loss. Positions that restart tell transformers where packed documents begin."""
    given = {"attention_mask": inputs["mask"]} if "mask" in inputs else {}
    if "positions" in inputs and not task.whole_rows:
        given["position_ids"] = inputs["positions"]
    with task.autocast():
        return model(
            input_ids=inputs["ids"], labels=inputs["labels"], shift_labels=inputs["labels"],
            num_items_in_batch=targets, use_cache=False, **given,
        ).loss  # fmt: skip
