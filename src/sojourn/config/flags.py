"""The flags that the guides' commands use, in `-` and `_` spelling, and `key=value`: what each means here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from sojourn.config.explain import closest, every_key
from sojourn.errors import UserError

KeyPath = tuple[str, ...]

# A flag with a value, and the key it sets.
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

# A flag that stands alone, and what it sets.
SWITCHES: dict[str, tuple[str, Any]] = {
    "use_amp": ("train.precision", "auto"),
    "fp16": ("train.precision", "fp16"),
    "bf16": ("train.precision", "bf16"),
    "fp32": ("train.precision", "fp32"),
    "gradient_checkpointing": ("train.checkpointing", "full"),
    "torch_compile": ("train.compile", "on"),
    "fsdp": ("parallel.engine", "fsdp"),
    "ddp": ("parallel.engine", "ddp"),
    "load_in_4bit": ("method.kind", "qlora"),
}

_BATCH = ("batch_size", "per_device_train_batch_size")
_ACCUMULATION = ("gradient_accumulation_steps", "gradient_accumulation")
_NEEDLESS = {
    "num_workers": "prepared data is memory-mapped, so no loader processes are needed",
    "dataloader_num_workers": "prepared data is memory-mapped, so no loader processes are needed",
    "dataloader_pin_memory": "pinned memory is used where it helps",
}


@dataclass(frozen=True)
class Setting:
    key: KeyPath
    value: Any
    origin: str


@dataclass
class Typed:
    """A command line, understood."""

    run: str | None = None
    settings: list[Setting] = field(default_factory=list)
    batch_size: int | None = None
    accumulation: int | None = None
    notes: list[str] = field(default_factory=list)


def read_words(words: list[str]) -> Typed:
    typed, position = Typed(), 0
    while position < len(words):
        word = words[position]
        position += 1
        if word.startswith("-") and word != "-":
            position = _flag(typed, words, position)
        elif "=" in word:
            _override(typed, word)
        elif typed.run is None:
            typed.run = word
        else:
            raise UserError(f"“{word}” comes after “{typed.run}”, which already says what to run; overrides are key=value")
    return typed


def _override(typed: Typed, word: str) -> None:
    name, _, value = word.partition("=")
    key = tuple(part.replace("-", "_") for part in name.strip().split("."))
    if not all(re.fullmatch(r"\w+", part) for part in key):
        raise UserError(f"command line: “{word[:60]}” is not key=value; an example: train.lr=1e-4")
    typed.settings.append(Setting(key, value, f"command line {name.strip()}=…"))


def _flag(typed: Typed, words: list[str], position: int) -> int:
    spelled, equals, value = words[position - 1].partition("=")
    name = spelled.lstrip("-").replace("-", "_").lower()
    origin = f"command line {spelled}"
    if name in SWITCHES:
        following = words[position].lower() if position < len(words) else ""
        if not equals and following in ("true", "false"):
            value, position = following, position + 1
        if value.lower() != "false":
            key, set_to = SWITCHES[name]
            typed.settings.append(Setting(tuple(key.split(".")), set_to, origin))
        return position
    dotted = tuple(name.split("."))
    if not (name in VALUES or name in (*_BATCH, *_ACCUMULATION, *_NEEDLESS, "config") or dotted in every_key()):
        flags = {known.replace("_", "-"): known for known in (*VALUES, *SWITCHES, *_BATCH, *_ACCUMULATION, "config")}
        near = closest(name, flags.values())
        raise UserError(f"no such flag: {spelled}{near.replace('mean ', 'mean --')}")
    if not equals:
        if position >= len(words) or words[position].startswith("--"):
            raise UserError(f"{spelled} needs a value, such as {spelled} {_example(name)}")
        value, position = words[position], position + 1
    if name == "config":
        if typed.run is not None:
            raise UserError(f"{spelled} {value}: “{typed.run}” already says what to run; remove one")
        typed.run = value
    elif name in _BATCH:
        typed.batch_size = _whole(spelled, value)
    elif name in _ACCUMULATION:
        typed.accumulation = _whole(spelled, value)
    elif name in _NEEDLESS:
        typed.notes.append(f"{spelled} is not needed: {_NEEDLESS[name]}")
    else:
        key = tuple(VALUES[name].split(".")) if name in VALUES else dotted
        typed.settings.append(Setting(key, value, origin))
    return position


def _whole(flag: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and 0 < len(value) < 8 and int(value) > 0):
        raise UserError(f"command line {flag}: “{value[:60]}” given; allowed: a whole number from 1")
    return int(value)


def _example(name: str) -> str:
    if name == "config":
        return "small"
    words = {"batch": "16", "gpus": "0", "rate": "1e-4", "lr": "1e-4", "time": "11h30m", "budget": "30", "dir": "FOLDER",
             "file": "data.jsonl", "dataset": "data.jsonl", "model": "FOLDER", "tokenizer": "FOLDER", "resume": "FOLDER"}
    return next((example for part, example in words.items() if part in name), "8")
