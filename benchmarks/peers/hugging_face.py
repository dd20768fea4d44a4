"""Peers on transformers: plain, with Liger's kernels, and Unsloth, each used as its guide says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.peers.harness import PeerTask, Tensors, train_steps
from sojourn.machine.probe_software import importable
from sojourn.model.quiet import quiet_transformers

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Row = dict[str, Any]


def run_transformers(task: PeerTask) -> Row:
    model = open_model(task)
    if task.compile:
        model.compile()
    return _train(task, model)


def run_liger(task: PeerTask) -> Row:
    from liger_kernel import transformers as liger

    {"llama": liger.apply_liger_kernel_to_llama, "qwen2": liger.apply_liger_kernel_to_qwen2}[task.family]()
    return _train(task, open_model(task, "flash_attention_2" if importable("flash_attn") else "sdpa"))


def run_unsloth(task: PeerTask) -> Row:
    from unsloth import FastLanguageModel

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
    return _train(task, model.train())


def open_model(task: PeerTask, attention: str = "sdpa") -> Module:
    """The weights of the workload, with its adapter where one is trained."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quiet_transformers()
    dtype = torch.float32 if task.precision == "fp32" else getattr(torch, task.weight_dtype)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention, "device_map": {"": task.device}}
    if task.method == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    model = AutoModelForCausalLM.from_pretrained(task.base, **options)
    model.config.use_cache = False
    checkpointing = {"use_reentrant": False}
    if task.method == "qlora":
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, task.gradient_checkpointing, checkpointing)
    elif task.gradient_checkpointing:
        model.gradient_checkpointing_enable(checkpointing)
    if task.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, task.adapter, is_trainable=True)
    return model.train()


def _train(task: PeerTask, model: Module) -> Row:
    def loss_fn(inputs: Tensors, targets: int) -> Tensor:
        return model_loss(task, model, inputs, targets)

    return train_steps(task, model, loss_fn)


def model_loss(task: PeerTask, model: Module, inputs: Tensors, targets: int) -> Tensor:
    """The model's own loss. transformers finds packed documents by position ids that restart at 0."""
    kwargs: dict[str, Tensor] = {"attention_mask": inputs["mask"]} if "mask" in inputs else {}
    if "positions" in inputs and not task.whole_rows:
        kwargs["position_ids"] = inputs["positions"]
    with task.autocast():
        return model(
            input_ids=inputs["ids"], labels=inputs["labels"], shift_labels=inputs["labels"],
            num_items_in_batch=targets, use_cache=False, **kwargs,
        ).loss  # fmt: skip
