"""The flags of Hugging Face, LLaMA-Factory and other trainers, and the setting that each means here."""

from __future__ import annotations

from typing import Any

# Flags with a value, and the key that each sets.
VALUE_FLAGS = {
    "name": "name",
    "run_name": "name",
    "params": "model.params",
    "depth": "model.depth",
    "d_model": "model.d_model",
    "hidden_size": "model.d_model",
    "num_layers": "model.num_layers",
    "num_hidden_layers": "model.num_layers",
    "num_heads": "model.num_heads",
    "num_attention_heads": "model.num_heads",
    "num_kv_heads": "model.num_kv_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "intermediate_size": "model.ffn_size",
    "rope_theta": "model.rope_theta",
    "model": "model.base",
    "model_name": "model.base",
    "model_name_or_path": "model.base",
    "model_path": "model.base",
    "revision": "model.revision",
    "method": "method.kind",
    "finetuning_type": "method.kind",
    "r": "method.rank",
    "rank": "method.rank",
    "lora_r": "method.rank",
    "lora_rank": "method.rank",
    "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout",
    "target_modules": "method.targets",
    "lora_target": "method.targets",
    "modules_to_save": "method.modules_to_save",
    "additional_target": "method.modules_to_save",
    "loraplus_lr_ratio": "method.loraplus_lr_ratio",
    "adapter": "method.adapter",
    "adapter_name_or_path": "method.adapter",
    "dataset": "data.sources",
    "dataset_name": "data.sources",
    "dataset_dir": "data.dataset_dir",
    "data_files": "data.sources",
    "train_file": "data.sources",
    "input_dir": "data.sources",
    "val_file": "data.eval_sources",
    "validation_file": "data.eval_sources",
    "eval_dataset": "data.eval_sources",
    "val_size": "data.eval_fraction",
    "dataset_text_field": "data.columns.text",
    "tokenizer": "data.tokenizer",
    "tokenizer_name": "data.tokenizer",
    "tokenizer_path": "data.tokenizer",
    "vocab_size": "data.vocab_size",
    "template": "data.template",
    "packing": "data.packing",
    "max_samples": "data.take",
    "max_train_samples": "data.take",
    "num_workers": "data.workers",
    "preprocessing_num_workers": "data.workers",
    "dataset_num_proc": "data.workers",
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
    "adam_beta1": "train.beta1",
    "adam_beta2": "train.beta2",
    "max_grad_norm": "train.clip",
    "router_aux_loss_coef": "train.router_aux_loss_coef",
    "neftune_noise_alpha": "train.neftune_noise_alpha",
    "optim": "train.optimizer",
    "seed": "train.seed",
    "device": "train.device",
    "precision": "train.precision",
    "torch_dtype": "train.precision",
    "dtype": "train.precision",
    "bnb_4bit_compute_dtype": "train.precision",
    "attn_implementation": "train.attention",
    "flash_attn": "train.attention",
    "eval_steps": "train.eval_every",
    "early_stopping_patience": "train.patience",
    "gpus": "parallel.gpus",
    "nproc_per_node": "parallel.gpus",
    "deepspeed": "parallel.deepspeed",
    "nnodes": "parallel.nodes",
    "node_rank": "parallel.node",
    "master_addr": "parallel.master",
    "master_port": "parallel.port",
    "max_restarts": "parallel.restarts",
    "ddp_timeout": "parallel.timeout",
    "output_dir": "save.folder",
    "save_dir": "save.folder",
    "save_steps": "save.every_steps",
    "save_total_limit": "save.keep",
    "resume": "save.resume",
    "resume_from_checkpoint": "save.resume",
    "logging_steps": "log.every_steps",
    "report_to": "log.trackers",
    "project": "log.project",
    "wandb_project": "log.project",
    "max_time": "limits.time",
    "budget": "limits.budget",
    "price_per_hour": "limits.price_per_hour",
    "price": "limits.price_per_hour",
}

# Flags without a value: the key, its value, and the value for `--flag false` (None: sets nothing).
SWITCH_FLAGS: dict[str, tuple[str, Any, Any]] = {
    "use_amp": ("train.precision", "auto", "fp32"),
    "fp16": ("train.precision", "fp16", None),
    "bf16": ("train.precision", "bf16", None),
    "fp32": ("train.precision", "fp32", None),
    "gradient_checkpointing": ("train.activation_checkpointing", "full", "off"),
    "torch_compile": ("train.compile", "on", "off"),
    "fsdp": ("parallel.engine", "fsdp", None),
    "ddp": ("parallel.engine", "ddp", None),
    "bnb_4bit_use_double_quant": ("method.double_quant", True, False),
    "double_quantization": ("method.double_quant", True, False),
    "use_rslora": ("method.rslora", True, False),
    "use_dora": ("method.dora", True, False),
    "use_flash_attention_2": ("train.attention", "flash_attention_2", None),
    "use_liger_kernel": ("advanced.fused_forwards", "on", "off"),
    "enable_liger_kernel": ("advanced.fused_forwards", "on", "off"),
    "assistant_only_loss": ("data.train_on", "assistant", "all"),
    "completion_only_loss": ("data.train_on", "assistant", "all"),
    "train_on_prompt": ("data.train_on", "all", "assistant"),
    "mask_history": ("data.train_on", "last", None),
    "neat_packing": ("data.packing", "packed", None),
    "use_cpu": ("train.device", "cpu", None),
    "no_cuda": ("train.device", "cpu", None),
    "full_determinism": ("train.deterministic", "on", "off"),
    "trust_remote_code": ("model.trust_remote_code", True, False),
}

_DTYPES = {
    f"{torch}{name}": f"train.precision={precision}"
    for torch in ("", "torch.")
    for name, precision in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"))
}
_MEASURED = "the held-out loss is measured at the end, and every train.eval_every=STEPS where that is set"
_BEST = "final/ is the last step's model; with train.eval_every=STEPS the best one is in best/"

# Values with another name here: the settings that each stands for, or why it changes nothing. Other values are used as
# they are if VALUE_FLAGS has the flag. A flag that lists `true` may be given without a value.
VALUE_MEANINGS: dict[str, dict[str, str]] = {
    "load_in_4bit": {"true": "method.kind=qlora method.bits=4", "false": ""},
    "load_in_8bit": {"true": "method.kind=qlora method.bits=8", "false": ""},
    "quantization_bit": {bits: f"method.kind=qlora method.bits={bits}" for bits in ("4", "8")},
    "lora_target": {"all": "method.targets=all-linear"},
    "stage": {"sft": "chats train their answers, texts every token", "pt": "texts train every token"},
    "num_workers": {"0": "data.workers=1"},
    "max_steps": {"-1": ""},
    "nproc_per_node": {"gpu": "parallel.gpus=all", "auto": "parallel.gpus=all"},
    "truncation": {
        **dict.fromkeys(("true", "longest_first", "only_first"), "data.long_texts=truncate data.long_chats=truncate"),
        "false": "",
    },
    "bnb_4bit_quant_type": {"nf4": "4-bit bases are always NF4"},
    "bnb_4bit_compute_dtype": _DTYPES,
    "torch_dtype": _DTYPES,
    "dtype": _DTYPES,
    "bias": {"none": "adapters have no biases"},
    "task_type": {"causal_lm": "only causal language models are trained here"},
    "attn_implementation": {"eager": "train.attention=math", "flex_attention": "train.attention=flex"},
    "flash_attn": {"fa2": "train.attention=flash_attention_2", "disabled": "train.attention=math"},
    "optim": {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "train.optimizer=adamw"),
        "adamw_bnb_8bit": "train.optimizer=adamw_8bit",
        "paged_adamw_32bit": "train.optimizer=paged_adamw",
    },
    "lr_scheduler_type": {
        "constant_with_warmup": "train.schedule=constant",
        "warmup_stable_decay": "train.schedule=wsd",
    },
    "packing": {
        "true": "data.packing=packed",
        "false": "data.packing=off",
        **{word: f"data.packing={word}" for word in ("packed", "padded", "off")},
    },
    "report_to": {"none": "log.trackers=[] log.tensorboard=off", "tensorboard": "log.tensorboard=on"},
    "save_strategy": {"epoch": "save.every_steps=epoch", "steps": "", "no": "a run is always saved, every save.every"},
    "eval_strategy": {"steps": "", "epoch": _MEASURED, "no": _MEASURED},
    "evaluation_strategy": {"steps": "", "epoch": _MEASURED, "no": _MEASURED},
    "logging_strategy": {"steps": "", **dict.fromkeys(("epoch", "no"), "log.every_steps=N sets how often")},
    "load_best_model_at_end": {"true": _BEST, "false": ""},
}

_UPLOAD = (
    "no model is uploaded by itself; when the run is done: hf upload USER/REPO runs/NAME/final; to keep checkpoints "
    "and models on the hub while training: save.mirror=hub:USER/REPO"
)
BATCH_SIZE_FLAGS = ("batch_size", "per_device_train_batch_size")
ACCUMULATION_FLAGS = ("gradient_accumulation_steps", "gradient_accumulation")

# Flags that are not needed here, and why.
IGNORED_FLAGS = {
    "dataloader_num_workers": "prepared data is memory-mapped, so no loader processes are needed",
    "dataloader_pin_memory": "pinned memory is used where it helps",
    "device_map": "parallel.gpus and parallel.engine place the model",
    "auto_find_batch_size": "train.micro_batch=auto is fitted to the GPU's memory",
    "per_device_eval_batch_size": "evaluation uses the training micro batch",
    "group_by_length": "packed rows have almost no padding",
    "remove_unused_columns": "only recognised columns are read",
    "overwrite_output_dir": "an existing run is resumed; for a new run use another name or folder",
    "do_train": "sojourn train trains",
    "do_eval": "the held-out loss is measured at the end of every run",
    "ddp_find_unused_parameters": "every parameter is used",
    "use_fast": "only fast tokenizers are used",
    "use_fast_tokenizer": "only fast tokenizers are used",
    "overwrite_cache": "prepared data is found by its content, so it is never out of date",
    "save_only_model": "checkpoints always have the optimizer states, so that the run can be resumed; final/ has the "
    "model alone",
    "plot_loss": "every run draws its losses in loss.svg, in its folder",
    "use_unsloth": "Sojourn has fused kernels of its own, used wherever the model supports them",
    "include_num_input_tokens_seen": "metrics.jsonl counts the tokens of every step",
    "disable_tqdm": "without a terminal the progress is plain lines",
    "low_cpu_mem_usage": "weights are always loaded without a second copy",
    "local_rank": "the launcher's environment variables have the rank",
    "logging_dir": "logs are in the run's folder, under logs",
    "metric_for_best_model": _BEST,
    "greater_is_better": _BEST,
}
IGNORED_WITH_VALUE = ("logging_dir", "metric_for_best_model")  # these always have a value

# Flags of features that do not exist here, and what to do instead.
UNSUPPORTED_FLAGS = {
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo"), _UPLOAD),
}

ALL_FLAGS = tuple(
    dict.fromkeys(
        (
            *VALUE_FLAGS,
            *SWITCH_FLAGS,
            *VALUE_MEANINGS,
            *BATCH_SIZE_FLAGS,
            *ACCUMULATION_FLAGS,
            *IGNORED_FLAGS,
            *UNSUPPORTED_FLAGS,
            "config",
        )
    )
)


def meant_setting(name: str) -> str | None:
    """The key, or `key: value`, that this flag of another trainer means."""
    if name in SWITCH_FLAGS:
        key, value, _ = SWITCH_FLAGS[name]
        return f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
    if "=" in VALUE_MEANINGS.get(name, {}).get("true", ""):
        return VALUE_MEANINGS[name]["true"].split()[0].replace("=", ": ")
    return "train.global_batch" if name in (*BATCH_SIZE_FLAGS, *ACCUMULATION_FLAGS) else VALUE_FLAGS.get(name)
