"""What the guides and other trainers call things, and the key or setting that each means here."""

from __future__ import annotations

from typing import Any

# A name with a value, and the key it sets.
VALUES = {
    "name": "name",
    "d_model": "model.d_model",
    "num_layers": "model.num_layers",
    "num_heads": "model.num_heads",
    "num_kv_heads": "model.num_kv_heads",
    "model": "model.base",
    "model_name": "model.base",
    "model_name_or_path": "model.base",
    "model_path": "model.base",
    "method": "method.kind",
    "r": "method.rank",
    "rank": "method.rank",
    "lora_r": "method.rank",
    "lora_rank": "method.rank",
    "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout",
    "target_modules": "method.targets",
    "lora_target": "method.targets",
    "dataset": "data.sources",
    "data_files": "data.sources",
    "train_file": "data.sources",
    "input_dir": "data.sources",
    "val_file": "data.eval_sources",
    "validation_file": "data.eval_sources",
    "tokenizer": "data.tokenizer",
    "tokenizer_path": "data.tokenizer",
    "vocab_size": "data.vocab_size",
    "template": "data.template",
    "max_samples": "data.take",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "max_length": "data.max_length",
    "cutoff_len": "data.max_length",
    "epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "steps": "train.steps",
    "tokens": "train.tokens",
    "lr": "train.lr",
    "learning_rate": "train.lr",
    "lr_scheduler_type": "train.schedule",
    "warmup_steps": "train.warmup",
    "warmup_ratio": "train.warmup",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.clip",
    "optim": "train.optimizer",
    "seed": "train.seed",
    "device": "train.device",
    "precision": "train.precision",
    "attn_implementation": "train.attention",
    "eval_steps": "train.eval_every",
    "gpus": "parallel.gpus",
    "deepspeed": "parallel.deepspeed",
    "output_dir": "save.folder",
    "save_dir": "save.folder",
    "save_steps": "save.every_steps",
    "save_total_limit": "save.keep",
    "resume": "save.resume",
    "resume_from_checkpoint": "save.resume",
    "logging_steps": "log.every_steps",
    "max_time": "limits.time",
    "budget": "limits.budget",
    "price_per_hour": "limits.price_per_hour",
    "price": "limits.price_per_hour",
}

# A name that stands alone: the key, what it is set to, and what `false` after it sets (nothing, when None).
SWITCHES: dict[str, tuple[str, Any, Any]] = {
    "use_amp": ("train.precision", "auto", "fp32"),
    "fp16": ("train.precision", "fp16", None),
    "bf16": ("train.precision", "bf16", None),
    "fp32": ("train.precision", "fp32", None),
    "gradient_checkpointing": ("train.checkpointing", "full", "off"),
    "torch_compile": ("train.compile", "on", "off"),
    "fsdp": ("parallel.engine", "fsdp", None),
    "ddp": ("parallel.engine", "ddp", None),
    "load_in_4bit": ("method.kind", "qlora", None),
}

BATCH = ("batch_size", "per_device_train_batch_size")
ACCUMULATION = ("gradient_accumulation_steps", "gradient_accumulation")

# Names that other trainers need and this one does not, and why.
NEEDLESS = {
    "num_workers": "prepared data is memory-mapped, so no loader processes are needed",
    "dataloader_num_workers": "prepared data is memory-mapped, so no loader processes are needed",
    "dataloader_pin_memory": "pinned memory is used where it helps",
    "device_map": "the model is placed by parallel.gpus and parallel.engine",
}

FLAGS = (*VALUES, *SWITCHES, *BATCH, *ACCUMULATION, *NEEDLESS, "config")


def meaning(name: str) -> str | None:
    """The key, or the `key: value`, that someone who wrote `name` as a key has in mind."""
    if name in SWITCHES:
        key, value, _ = SWITCHES[name]
        return f"{key}: {value}"
    return "train.global_batch" if name in (*BATCH, *ACCUMULATION) else VALUES.get(name)
