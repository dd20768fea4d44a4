"""Every mistake in a configuration is told in one line: where, which key, what was given, what to type instead."""
# ruff: noqa: E501 - the tables below read best with one case a line

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import called, ordinary_user
from sojourn.config.attention_backends import ATTENTION_BACKENDS

SMALL = "extends: small\n"
ATTENTION = " or ".join(["auto", *(name for name, backend in ATTENTION_BACKENDS.items() if not backend.fused_qkv)])
BIG = "1" + "0" * 400
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 10)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


def sojourn(*words: str) -> tuple[int, str, str]:
    """Runs the command in this process: exit code, stdout, stderr."""
    ran = called(*words)
    return ran.returncode, ran.stdout, ran.stderr


# name: (the file's content, what the line must say)
FILES: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    # values of the wrong kind
    "word for a number": (SMALL + "train:\n  lr: fast\n", ("run.yaml:3: train.lr: “fast” given", "a number above 0 up to 10, or auto")),
    "word for a whole number": (SMALL + "train:\n  steps: many\n", ("run.yaml:3: train.steps: “many”", "a whole number from 1")),
    "quoted number": (SMALL + "train:\n  steps: '8'\n", ("run.yaml:3: train.steps: “8” given (remove the quotes)",)),
    "fraction for a whole number": (SMALL + "train:\n  steps: 8.5\n", ("run.yaml:3: train.steps: 8.5 given", "a whole number")),
    "true for a number": (SMALL + "train:\n  lr: true\n", ("run.yaml:3: train.lr: true given", "a number")),
    "true for a whole number": (SMALL + "train:\n  seed: true\n", ("run.yaml:3: train.seed: true given", "a whole number")),
    "true for a count": (SMALL + "data:\n  take: true\n", ("run.yaml:3: data.take: true given", "a count such as")),
    "true for a duration": (SMALL + "limits:\n  time: true\n", ("run.yaml:3: limits.time: true", "11h30m")),
    "number for a switch": (SMALL + "method:\n  dora: 1\n", ("run.yaml:3: method.dora: 1 given; allowed: true or false",)),
    "word for a switch": (SMALL + "method:\n  dora: maybe\n", ("method.dora: “maybe” given; allowed: true or false",)),
    "list for a number": (SMALL + "train:\n  lr: [1e-4]\n", ("run.yaml:3: train.lr: a list of 1 given", "a number")),
    "list for text": (SMALL + "data:\n  tokenizer: [a, b]\n", ("run.yaml:3: data.tokenizer: a list of 2 given", "text")),
    "mapping for a number": (SMALL + "train:\n  lr: {max: 1}\n", ("train.lr: keys below it (max) given; allowed: a number",)),
    "number for text": (SMALL + "data:\n  tokenizer: 5\n", ("run.yaml:3: data.tokenizer: 5 given (put it in quotes); allowed: text",)),
    "number for a name": ("name: 2024\n" + SMALL, ("run.yaml:1: name: 2024 given (put it in quotes); allowed: a name of letters",)),
    "name with a slash": ("name: ../up\n" + SMALL, ("run.yaml:1: name: “../up” given; allowed: a name of letters",)),
    "name with an emoji": ("name: 🚀\n" + SMALL, ("run.yaml:1: name: “🚀” given", "a name of letters")),
    "empty name": ("name: ''\n" + SMALL, ("run.yaml:1: name: “” given", "a name of letters")),
    "text with a line break": (SMALL + 'data:\n  tokenizer: "a\\nb"\n', ("data.tokenizer: “a b” given", "one line")),
    "text with a NUL": (SMALL + 'data:\n  tokenizer: "a\\0b"\n', ("run.yaml:3: data.tokenizer: “a b” given", "text")),
    "null for a number": (SMALL + "train:\n  global_batch:\n", ("run.yaml:3: train.global_batch: nothing (null) given", "whole")),
    "unknown choice": (SMALL + "train:\n  optimizer: adam\n", ("train.optimizer: “adam” given; allowed: adamw",)),
    "unknown precision": (SMALL + "train:\n  precision: int8\n", ("“int8” given; allowed: bf16 or fp16 or fp32, or auto",)),
    "unknown attention": (SMALL + "train:\n  attention: flash3\n", (f"“flash3” given; allowed: {ATTENTION}",)),
    "unknown bits": ("extends: qlora-7b\nmethod:\n  bits: 3\n", ("run.yaml:3: method.bits: 3 given; allowed: 4 or 8",)),
    "GPU by name": (SMALL + "parallel:\n  gpus: rtx4090\n", ("parallel.gpus: “rtx4090” given", "such as 0 or 0,1, or all, or auto")),
    "GPU of -1": (SMALL + "parallel:\n  gpus: [-1]\n", ("run.yaml:3: parallel.gpus: -1 given", "GPU numbers")),
    "source without a path": (SMALL + "data:\n  sources:\n    - take: 5\n", ("data.sources.0.path: not given; add it",)),
    "source of a number": (SMALL + "data:\n  sources: 5\n", ("run.yaml:3: data.sources: 5 given", "builtin:NAME")),
    "targets of numbers": ("extends: lora\nmethod:\n  targets: [1]\n", ("method.targets.0: 1 given (put it in quotes); allowed: text",)),
    "no targets": ("extends: lora\nmethod:\n  targets: []\n", ("run.yaml:3: method.targets", "such as [q_proj, v_proj]")),
    # numbers out of range
    "negative": (SMALL + "train:\n  lr: -1e-4\n", ("run.yaml:3: train.lr: -0.0001 given", "above 0")),
    "zero": (SMALL + "train:\n  steps: 0\n", ("run.yaml:3: train.steps: 0 given", "from 1 up to 1,000,000,000")),
    "zero batch": (SMALL + "train:\n  global_batch: 0\n", ("train.global_batch: 0 given", "from 1 up to 1,000,000")),
    "nan": (SMALL + "train:\n  lr: .nan\n", ("run.yaml:3: train.lr: nan given", "a number above 0")),
    "inf": (SMALL + "train:\n  clip: .inf\n", ("run.yaml:3: train.clip: inf given", "from 0 up to 1,000,000")),
    "1e999": (SMALL + "train:\n  lr: 1e999\n", ("run.yaml:3: train.lr: inf given", "a number")),
    "1e999 epochs": (SMALL + "train:\n  epochs: 1e999\n", ("run.yaml:3: train.epochs: inf given", "a number above 0")),
    "1e999 tokens": (SMALL + "train:\n  tokens: 1e999\n", ("run.yaml:3: train.tokens: inf given", "a count such as")),
    "10^400 for a number": (SMALL + f"train:\n  lr: {BIG}\n", ("run.yaml:3: train.lr: a number of more than 60 digits",)),
    "10^400 for a whole number": (SMALL + f"train:\n  seed: {BIG}\n", ("train.seed: a number of more than 60 digits", "from 0")),
    "10^400 for a count": (SMALL + f"data:\n  take: {BIG}\n", ("run.yaml:3: data.take: a number of more than 60 digits",)),
    "10^400 for money": (SMALL + f"limits:\n  budget: {BIG}\n", ("limits.budget: a number of more than 60 digits", "30 CNY")),
    "10^400 for a GPU": (SMALL + f"parallel:\n  gpus: {BIG}\n", ("parallel.gpus: a number of more than 60 digits",)),
    "5000 digits": (SMALL + f"train:\n  seed: {'7' * 5000}\n", ("run.yaml:3: train.seed: a number of 5000 digits given",)),
    "too wide": (SMALL + "model:\n  d_model: 100000\n", ("model.d_model: 100000 given", "from 32 up to 65,536")),
    "vocabulary too small": (SMALL + "data:\n  vocab_size: 10\n", ("data.vocab_size: 10 given", "from 256 up to 1,000,000")),
    "nothing to take": (SMALL + "data:\n  sources:\n    - {path: x, take: 0}\n", ("run.yaml:4: data.sources.0.take: 0", "from 1")),
    "dropout of one": ("extends: lora\nmethod:\n  dropout: 1\n", ("run.yaml:3: method.dropout: 1 given", "from 0 below 1")),
    # quantities that are none
    "duration nonsense": (SMALL + "limits:\n  time: soon\n", ("limits.time: “soon” given", "90s, 10m or 11h30m")),
    "duration backwards": (SMALL + "limits:\n  time: 30m11h\n", ("run.yaml:3: limits.time: “30m11h” given", "11h30m")),
    "no time at all": (SMALL + "limits:\n  time: 0\n", ("run.yaml:3: limits.time: 0 given", "above 0")),
    "size nonsense": (SMALL + "save:\n  min_free: 3 bananas\n", ("save.min_free: “3 bananas” given", "500MB or 24GiB")),
    "size of an i": (SMALL + "save:\n  min_free: 5i\n", ("run.yaml:3: save.min_free: “5i” given", "24GiB")),
    "decimal comma": (SMALL + "data:\n  take: 1,5k\n", ("run.yaml:3: data.take: “1,5k” given", "20k, 2M or 1.5B")),
    "half an example": (SMALL + "data:\n  take: 2.5\n", ("run.yaml:3: data.take: 2.5 given", "a count such as")),
    "money nonsense": (SMALL + "limits:\n  budget: a lot\n", ("limits.budget: “a lot” given", "30 CNY, ¥30 or $5")),
    "money of no country": (SMALL + "limits:\n  budget: 30 CYN\n", ("run.yaml:3: limits.budget: “30 CYN” given", "30 CNY")),
    "money in two currencies": (SMALL + "limits:\n  budget: $30 CNY\n", ("limits.budget: “$30 CNY” given", "an amount such as")),
    "negative money": (SMALL + "limits:\n  budget: -3\n", ("run.yaml:3: limits.budget: -3 given", "an amount such as")),
    "a budget per hour": (SMALL + "limits:\n  budget: 3 CNY/h\n", ("limits.budget: “3 CNY/h” given", "an amount such as")),
    # keys that do not exist
    "section typo": (SMALL + "trian:\n  lr: 1e-4\n", ("run.yaml:2: trian: no such key; did you mean train?",)),
    "key typo": (SMALL + "train:\n  epoch: 3\n", ("run.yaml:3: train.epoch: no such key; did you mean train.epochs?",)),
    "key typo in model": (SMALL + "model:\n  d_modle: 3\n", ("run.yaml:3: model.d_modle: no such key; did you mean model.d_model?",)),
    "key typo in save": (SMALL + "save:\n  evry: 3\n", ("run.yaml:3: save.evry: no such key; did you mean save.every?",)),
    "key typo in limits": (SMALL + "limits:\n  bugdet: 3\n", ("did you mean limits.budget?",)),
    "key typo in parallel": (SMALL + "parallel:\n  gpu: 0\n", ("run.yaml:3: parallel.gpu: no such key; did you mean parallel.gpus?",)),
    "key typo in a source": (SMALL + "data:\n  sources:\n    - path: x\n      wieght: 2\n", ("run.yaml:5: data.sources.0.wieght", "data.sources.0.weight?")),
    "key with a dash": (SMALL + "train:\n  global-batch: 8\n", ("did you mean train.global_batch?",)),
    "key in capitals": (SMALL + "Train:\n  lr: 1\n", ("run.yaml:2: Train: no such key; did you mean train?",)),
    "half a key": (SMALL + "log:\n  every: 5\n", ("run.yaml:3: log.every: no such key; did you mean log.every_steps?",)),
    "key at the top": (SMALL + "lr: 1e-4\n", ("run.yaml:2: lr: no such key; did you mean train.lr?",)),
    "key in the wrong section": (SMALL + "model:\n  rank: 8\n", ("run.yaml:3: model.rank: no such key; did you mean method.rank?",)),
    "rank at the top is not train": (SMALL + "rank: 8\n", ("did you mean method.rank?",)),
    "another trainer's key": (SMALL + "train:\n  learning_rate: 1\n", ("train.learning_rate: no such key; did you mean train.lr?",)),
    "another trainer's key at the top": (SMALL + "save_steps: 5\n", ("save_steps: no such key; did you mean save.every_steps?",)),
    "another trainer's batch": (SMALL + "train:\n  batch_size: 8\n", ("did you mean train.global_batch?",)),
    "another trainer's switch": (SMALL + "fp16: true\n", ("run.yaml:2: fp16: no such key; did you mean train.precision: fp16?",)),
    "another trainer's yes or no": (SMALL + "use_dora: true\n", ("use_dora: no such key; did you mean method.dora: true?",)),
    "another trainer's quantisation": (SMALL + "load_in_8bit: true\n", ("load_in_8bit: no such key; did you mean method.kind: qlora?",)),
    "dotted key": (SMALL + "train.lr: 1e-4\n", ("run.yaml:2: train.lr: no such key; write it in two lines: train:",)),
    "extends below the top": ("train:\n  extends: small\n", ("run.yaml:2: train.extends: no such key", "at the top of a YAML file")),
    "key like no other": (SMALL + "train:\n  zzz: 1\n", ("run.yaml:3: train.zzz: no such key; allowed: epochs, steps, tokens",)),
    "unicode key": (SMALL + "训练:\n  lr: 1\n", ("run.yaml:2: 训练: no such key; allowed: name, model, method, data",)),
    "emoji key": (SMALL + "train:\n  🚀: 1\n", ("run.yaml:3: train.🚀: no such key; allowed:",)),
    "empty key": (SMALL + "'': 1\n", ("run.yaml:2: “”: no such key; allowed: name",)),
    "merge key": (SMALL + "train:\n  <<: {lr: 1}\n", ("run.yaml:3: train.<<: no such key",)),
    "several mistakes": (SMALL + "train:\n  lr: x\n  stpes: 1\nmodle: 1\n", ("train.lr: “x”", "(also wrong: train.stpes, modle)")),
    # sections that are none
    "number for a section": (SMALL + "train: 5\n", ("run.yaml:2: train: 5 given; allowed: its keys, indented below it: epochs",)),
    "text for a section": (SMALL + "model: Qwen/Qwen2.5-7B\n", ("run.yaml:2: model: “Qwen/Qwen2.5-7B” given", "base, revision")),
    "list for a section": (SMALL + "train:\n  - lr: 1\n", ("run.yaml:2: train: a list of 1 given", "epochs, steps")),
    "empty section": (SMALL + "train:\n", ("run.yaml:2: train: nothing below it; remove the line", "epochs, steps")),
    # settings that cannot hold together
    "epochs and steps": (SMALL + "train:\n  epochs: 1\n  steps: 5\n", ("run.yaml:4: train.steps: train.epochs already sets the length",)),
    "micro batch that does not divide": (SMALL + "train:\n  micro_batch: 5\n", ("train.micro_batch: 5 does not divide the global batch of 16 rows; use 4 or auto",)),
    "warmup of 2.5 steps": (SMALL + "train:\n  warmup: 2.5\n", ("run.yaml:3: train.warmup: 2.5 given", "a share of the run up to 1")),
    "heads that do not divide": (SMALL + "model:\n  num_heads: 7\n", ("model.num_heads: 7 heads do not divide d_model 256", "use 8")),
    "heads of odd size": (SMALL + "model: {d_model: 66, num_heads: 2}\n", ("run.yaml:2: model.num_heads: 2 heads", "use 1")),
    "width that is no multiple": (SMALL + "model:\n  d_model: 300\n", ("run.yaml:3: model.d_model: 300 is not a multiple of 64", "use 256 or 320")),
    "key/value heads": (SMALL + "model:\n  num_kv_heads: 3\n", ("model.num_kv_heads: 3 key/value heads do not divide 4 heads; use 2",)),
    "base and size": (SMALL + "model:\n  base: gpt2\n", ("run.yaml:3: model.d_model: sizes a new model, but model.base", "lora-20k")),
    "revision of nothing": (SMALL + "model:\n  revision: main\n", ("run.yaml:3: model.revision: belongs to model.base, which is not set",)),
    "neither base nor size": ("train:\n  lr: 1e-4\n", ("run.yaml: model.d_model: not set, but a new model needs it", "extends: small")),
    "width but no layers": ("model:\n  d_model: 64\n", ("run.yaml:1: model.num_layers: not set, but a new model needs it",)),
    "lora of nothing": (SMALL + "method:\n  kind: lora\n", ("run.yaml:3: model.base: not set, but method.kind lora", "set model.base, such as Qwen")),
    "rank without lora": (SMALL + "method:\n  rank: 8\n", ("run.yaml:3: method.rank: belongs to lora and qlora, but method.kind is pretrain",)),
    "bits without qlora": ("extends: lora\nmethod:\n  bits: 8\n", ("run.yaml:3: method.bits: belongs to qlora, but method.kind is lora",)),
    "adapters in full": ("extends: lora\nmethod:\n  kind: full\n  rank: 8\n", ("run.yaml:4: method.rank: belongs to lora and qlora",)),
    "fp16 on a CPU": (SMALL + "train: {precision: fp16, device: cpu}\n", ("train.precision: fp16 needs a GPU, but train.device is cpu",)),
    "qlora on a Mac": ("extends: qlora\ntrain:\n  device: mps\n", ("run.yaml:3: train.device: mps cannot run qlora", "lora")),
    "a GPU twice": (SMALL + "parallel:\n  gpus: 0,0\n", ("run.yaml:3: parallel.gpus: 0,0 given; name each GPU once",)),
    "no GPU": (SMALL + "parallel:\n  gpus: []\n", ("run.yaml:3: parallel.gpus: no GPU named; allowed: numbers such as 0",)),
    "single on two GPUs": (SMALL + "parallel: {engine: single, gpus: [0, 1]}\n", ("parallel.engine: single uses one GPU, but 2 are named",)),
    "DeepSpeed file with FSDP": (SMALL + "parallel: {engine: fsdp, deepspeed: ds.json}\n", ("run.yaml:2: parallel.deepspeed", "parallel.engine is fsdp; remove one")),
    "budget with a price of 0": (SMALL + "limits: {budget: 30, price_per_hour: 0}\n", ("limits.price_per_hour: 0 given", "above 0")),
    "currencies that differ": (SMALL + "limits: {budget: $30, price_per_hour: 2 CNY/h}\n", ("limits.budget: in USD, but the price per hour in CNY",)),
    # extends
    "extends itself": ("extends: run.yaml\n", ("run.yaml:1: extends: circular: run.yaml → run.yaml",)),
    "extends a typo": ("extends: smal\n", ("run.yaml:1: extends: “smal” is neither a file beside this one nor a preset; did you mean small?",)),
    "extends a missing file": ("extends: other.yaml\n", ("run.yaml:1: extends: “other.yaml” is neither a file beside this one",)),
    "extends a folder": ("extends: .\n", ("run.yaml:1: extends: “.” is neither a file",)),
    "extends a list": ("extends: [small, medium]\n", ("run.yaml:1: extends: a list of 2 given; allowed: the name of a preset or of one YAML file",)),
    "extends a number": ("extends: 5\n", ("run.yaml:1: extends: 5 given; allowed: the name of a preset",)),
    "extends nothing": ("train: {lr: 1}\nextends:\n", ("run.yaml:2: extends: nothing (null) given; allowed: the name of a preset",)),
    "extends a name too long": (f"extends: {'x' * 5000}\n", ("run.yaml:1: extends: “xxx", "is neither a file")),
    # not YAML
    "tab": ("train:\n\tlr: 1\n", ("run.yaml:2: not valid YAML: a tab; indent with spaces",)),
    "open bracket": ("train: {lr: 1\n", ("run.yaml:2: not valid YAML: a list or mapping in brackets is not closed",)),
    "open quote": ("name: 'x\ntrain: {}\n", ("run.yaml:1: not valid YAML: a quote opened here is never closed",)),
    "bad indentation": ("train:\n    lr: 1\n  seed: 1\n", ("run.yaml:3: not valid YAML: this line is not indented like",)),
    "no space after the colon": ("name:x\ntrain: {}\n", ("run.yaml:2: not valid YAML", "the space after “:”")),
    "two colons": ("name: a: b\n", ("run.yaml:1: not valid YAML", "quote values with “: ”")),
    "full-width colon": ("name： x\ntrain: {}\n", ("not valid YAML: a full-width colon “：”; write “: ” after a key",)),
    "only a full-width colon": ("name： x\n", ("run.yaml:1: expected `key: value` lines", "the colon is full-width")),
    "at sign": ("name: @x\n", ("run.yaml:1: not valid YAML: a value cannot start with '@'; put it in quotes",)),
    "unknown alias": ("name: *x\n", ("run.yaml:1: not valid YAML: undefined alias 'x'", "quotes")),
    "bad escape": ('name: "\\q"\n', ("run.yaml:1: not valid YAML: in double quotes a backslash begins an escape; use single quotes",)),
    "two documents": ("name: a\n---\nname: b\n", ("run.yaml:2: not valid YAML: a second document begins here",)),
    "list": ("- a\n- b\n", ("run.yaml:1: expected `key: value` lines, found a list",)),
    "one word": ("hello\n", ("run.yaml:1: expected `key: value` lines, found “hello”",)),
    "one number": ("5\n", ("run.yaml:1: expected `key: value` lines, found “5”",)),
    "key twice": (SMALL + "train:\n  lr: 1e-4\n  lr: 1e-5\n", ("run.yaml:4: train.lr: given twice (first on line 3); keep one",)),
    "section twice": (SMALL + "train: {}\nmodel: {}\ntrain: {}\n", ("run.yaml:4: train: given twice (first on line 2)",)),
    "number as a key": (SMALL + "train:\n  5: x\n", ("run.yaml:3: train: a key must be a word, found “5”",)),
    "true as a key": ("true: x\n", ("run.yaml:1: a key must be a word, found “true”",)),
    "null as a key": ("~: x\n", ("run.yaml:1: a key must be a word, found “~”",)),
    "list as a key": ("? [a, b]\n: x\n", ("run.yaml:1: a key must be a word, found a list",)),
    "python tag": ("name: !!python/object/apply:os.system [echo]\n", ("run.yaml:1: name: the tag !!python/object/apply:os.system is not allowed",)),
    "own tag": ("name: !secret x\n", ("run.yaml:1: name: the tag !secret is not allowed; write a plain value",)),
    "binary tag": ("name: !!binary aGk=\n", ("run.yaml:1: name: the tag !!binary is not allowed",)),
    "set tag": ("name: !!set {a}\n", ("run.yaml:1: name: the tag !!set is not allowed",)),
    "tag that lies": ("train:\n  lr: !!int abc\n", ("run.yaml:2: train.lr: the tag !!int is not allowed",)),
    "bool tag that lies": ("name: !!bool perhaps\n", ("run.yaml:1: name: the tag !!bool is not allowed",)),
    "anchor in itself": ("train: &a\n  lr: *a\n", ("run.yaml:1: train.lr: an anchor that contains itself",)),
    "list in itself": ("train: &a [*a]\n", ("run.yaml:1: train.0: an anchor that contains itself",)),
    "billion laughs": (LAUGHS, ("run.yaml: more than 5,000 values; this does not look like a run's YAML file",)),
    "deep lists": ("a: " + "[" * 1500 + "]" * 1500, ("run.yaml: nested too deeply",)),
    "deep mappings": ("".join(" " * n + "a:\n" for n in range(50)), ("run.yaml:12: a.a.a: nested too deeply; a run's file has sections, keys and lists",)),
    "lone surrogate": ('name: "\\ud800"\n', ("run.yaml:1: name: half a character",)),
    # not text
    "empty": ("", ("run.yaml: model.d_model: not set, but a new model needs it", "start from a preset (extends: small)")),
    "only a comment": ("# later\n", ("run.yaml: model.d_model: not set",)),
    "GBK": ("name: 训练\n".encode("gbk"), ("run.yaml: not UTF-8 text (byte 8); save the file as UTF-8",)),
    "UTF-16": ("name: x\n".encode("utf-16"), ("run.yaml: not UTF-8 text (byte 0); save the file as UTF-8",)),
    "UTF-16 without a mark": ("name: x\n".encode("utf-16-le"), ("run.yaml:1: not valid YAML", "is it UTF-16? save the file as UTF-8")),
    "NUL bytes": (b"name: x\ntrain: \0\0\n", ("run.yaml:2: not valid YAML: an invisible control character",)),
    "control character": (b"name: x\n\ntrain: \x07\n", ("run.yaml:3: not valid YAML: an invisible control character; remove it",)),
    "random bytes": (bytes(range(128, 256)), ("run.yaml: not UTF-8 text (byte 0)",)),
    "too large": ("# " + "x" * 300_000, ("run.yaml: larger than 200 kB",)),
}  # fmt: skip

# name: (the words after `sojourn config check`, what the line must say)
LINES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "nothing": ([], ("name a run: a preset or a YAML file, such as small (see: sojourn presets list)",)),
    "preset typo": (["medum"], ("“medum” is neither a preset nor a file; did you mean medium? (see: sojourn presets list)",)),
    "preset typo with underscores": (["qlora_7"], ("did you mean qlora-7b?",)),
    "alias typo": (["paper_r46"], ("did you mean paper-r64?",)),
    "preset unlike any": (["zzzzzz"], ("“zzzzzz” is neither a preset nor a file (see: sojourn presets list)",)),
    "missing file": (["none.yaml"], ("none.yaml: no such file (presets: sojourn presets list)",)),
    "missing file near a preset": (["configs/lora_20.yaml"], ("configs/lora_20.yaml: no such file; did you mean lora-20k?",)),
    "folder": (["folder"], ("folder: a folder; give a YAML file or a preset",)),
    "folder named like a file": (["folder.yaml"], ("folder.yaml: a folder; give a YAML file",)),
    "name too long": (["x" * 5000], ("“xxxxx", "is neither a preset nor a file")),
    "path too long": (["x/" * 5000 + "a.yaml"], ("x/x/", "no such file")),
    "unknown home": (["~nobody-here/a.yaml"], ("~nobody-here/a.yaml: no such file",)),
    "line break in the name": (["a\nb"], ("“a b” is neither a preset nor a file",)),
    "not UTF-8": (["small", "name=\udcff"], ("command line: “name=?” is not UTF-8 text",)),
    "two runs": (["small", "medium"], ("command line: “small” already names the run, so “medium” is one argument too many",)),
    "two configs": (["--config", "small", "--config", "xl"], ("command line --config: “xl” given, but “small” already names",)),
    "run and config": (["small", "--config=xl"], ("command line --config: “xl” given, but “small” already names the run",)),
    "key without a value": (["train.lr"], ("command line: “train.lr” is a key; write train.lr=VALUE",)),
    "key with an empty value": (["small", "train.lr="], ("command line train.lr=: train.lr: nothing (null) given",)),
    "no key": (["small", "=5"], ("command line: “=5” is not key=value; an example: train.lr=1e-4",)),
    "key with a space": (["small", "train lr=5"], ("command line: “train lr=5” is not key=value",)),
    "key with an empty part": (["small", "train..lr=5"], ("command line: “train..lr=5” is not key=value",)),
    "override typo": (["small", "train.lrr=5"], ("command line train.lrr=5: train.lrr: no such key; did you mean train.lr?",)),
    "override section typo": (["small", "trian.lr=5"], ("command line trian.lr=5: trian: no such key; did you mean train?",)),
    "override at the top": (["small", "epochs=5"], ("command line epochs=5: epochs: no such key; did you mean train.epochs?",)),
    "override below a value": (["small", "train.lr.max=5"], ("command line train.lr.max=5: train.lr has no keys below it; write train.lr=VALUE",)),
    "override in a list": (["small", "data.sources.0.path=x"], ("data.sources has no keys below it; write data.sources=VALUE",)),
    "override of a section": (["small", "train=5"], ("command line train=5: train: 5 given; allowed: its keys",)),
    "override with a word": (["small", "train.lr=fast"], ("command line train.lr=fast: train.lr: “fast” given", "a number")),
    "override with a huge number": (["small", f"train.seed={'9' * 5000}"], ("command line train.seed=999", "allowed: a whole number")),
    "override that loops": (["small", "train.lr=[&a [*a]]"], ("train.lr: “[&a [*a]]” given; allowed: a number",)),
    "override extends": (["small", "extends=xl"], ("extends: no such key; extends goes at the top of a YAML file",)),
    "override against a preset": (["small", "train.global_batch=7", "train.micro_batch=2"], ("command line", "2 does not divide the global batch of 7")),
    "override against a preset's other key": (["lora-r64", "train.global_batch=9"], ("command line train.global_batch=9: train.micro_batch: 8 does not divide", "use 3")),
    "flag typo": (["small", "--bacth_size", "8"], ("command line --bacth_size: no such flag; did you mean --batch_size?",)),
    "flag typo with dashes": (["small", "--learning-rat", "8"], ("command line --learning-rat: no such flag; did you mean --learning-rate?",)),
    "flag that is a key": (["small", "--global-batch", "8"], ("command line --global-batch: no such flag; did you mean train.global_batch=VALUE?",)),
    "flag unlike any": (["small", "--zzzzz"], ("command line --zzzzz: no such flag; any setting can be given as key=value",)),
    "short flag unlike any": (["small", "-z"], ("command line -z: no such flag",)),
    "flag without a value": (["small", "--lr"], ("command line --lr: needs a value, such as --lr 1e-4",)),
    "flag before another flag": (["small", "--batch_size", "--fp16"], ("command line --batch_size: needs a value, such as --batch_size 16",)),
    "config without a value": (["--config"], ("command line --config: needs a value, such as --config small",)),
    "flag with an empty value": (["small", "--lr="], ("command line --lr: train.lr: nothing (null) given",)),
    "flag with a wrong value": (["small", "--lr", "fast"], ("command line --lr: train.lr: “fast” given; allowed: a number",)),
    "negative flag": (["small", "--lr", "-1"], ("command line --lr: train.lr: -1 given", "above 0")),
    "negative batch": (["small", "--batch_size", "-4"], ("command line --batch_size: “-4” given; allowed: a whole number from 1",)),
    "zero batch": (["small", "--batch-size=0"], ("command line --batch-size: “0” given; allowed: a whole number from 1",)),
    "word for a batch": (["small", "--batch_size", "big"], ("command line --batch_size: “big” given",)),
    "huge batch": (["small", "--batch_size", "9" * 5000], ("command line --batch_size: “999", "a whole number from 1")),
    "batch beyond all bounds": (["small", "--batch_size", "1000000", "--gradient_accumulation_steps", "4"], ("command line --gradient_accumulation_steps: train.global_batch: 4000000 given", "up to 1,000,000")),
    "accumulation and global batch": (["small", "--gradient-accumulation", "4", "train.global_batch=8"], ("command line --gradient-accumulation: train.global_batch is given too",)),
    "switch with a word": (["small", "--fp16=perhaps"], ("command line --fp16: “perhaps” given; allowed: nothing, true or false",)),
    "fp16 on a CPU by flags": (["small", "--fp16", "--device", "cpu"], ("command line --fp16: train.precision: fp16 needs a GPU",)),
    "DeepSpeed and FSDP by flags": (["lora-r64", "--fsdp", "--deepspeed", "ds_config.json"], ("command line --deepspeed: parallel.deepspeed: a DeepSpeed file is given, but parallel.engine is fsdp; remove one",)),
    "currencies by flag": (["small", "--budget", "$30", "--price", "2.19 CNY"], ("command line --budget: limits.budget: in USD, but the price per hour in CNY",)),
    "time by flag": (["small", "--max_time", "later"], ("command line --max_time: limits.time: “later” given", "11h30m")),
    "4 bit of a new model": (["small", "--load_in_4bit"], ("command line --load_in_4bit: model.base: not set, but method.kind qlora",)),
    "model for a new model's preset": (["small", "--model", "gpt2"], ("command line --model: model.d_model: sizes a new model",)),
    "size for an existing model": (["lora", "--d_model", "512"], ("command line --d_model: model.d_model: sizes a new model",)),
    "tokens and steps by flag": (["small", "--tokens", "1M", "--max_steps", "5"], ("command line --tokens: train.tokens: train.steps already sets",)),
    "more than half held out": (["small", "--val_size", "0.7"], ("command line --val_size: data.eval_fraction: 0.7 given; allowed: a share of the documents from 0 up to 0.5, or a whole number",)),
    "one and a half documents": (["small", "--val_size", "1.5"], ("command line --val_size: data.eval_fraction: 1.5 given; allowed: a share",)),
    "fewer than no documents": (["small", "--val_size", "-3"], ("command line --val_size: data.eval_fraction: -3 given; allowed: a share",)),
    "held out twice": (["small", "--val_size", "100", "--val_file", "v.jsonl"], ("command line --val_size: data.eval_fraction: 100 documents given, but data.eval_sources",)),
}  # fmt: skip


def told(words: list[str]) -> str:
    """What `config check` says on stderr, which must be one line, with exit code 2 and nothing on stdout."""
    code, out, err = sojourn("config", "check", *words)
    assert (code, out) == (2, ""), err
    assert err.startswith("sojourn: ") and err.endswith("\n") and len(err.splitlines()) == 1, err
    assert "Traceback" not in err and len(err) < 700
    return err


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("folder.yaml").mkdir()


def write(content: str | bytes, name: str = "run.yaml") -> None:
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("name", FILES)
def test_a_malformed_file_is_reported_in_one_line(name: str) -> None:
    content, parts = FILES[name]
    write(content)
    line = told(["run.yaml"])
    assert line.startswith("sojourn: run.yaml")
    for part in parts:
        assert part in line


@pytest.mark.parametrize("name", LINES)
def test_a_malformed_command_line_is_reported_in_one_line(name: str) -> None:
    words, parts = LINES[name]
    line = told(words)
    for part in parts:
        assert part in line


def test_there_are_many_cases() -> None:
    assert len(FILES) + len(LINES) >= 60


@pytest.mark.parametrize("length", [2, 3])
def test_files_that_extend_each_other_in_a_circle_are_reported(length: int) -> None:
    for number in range(length):
        write(f"train: {{seed: 1}}\nextends: {(number + 1) % length}.yaml\n", f"{number}.yaml")
    line = told(["0.yaml"])
    circle = " → ".join(f"{number % length}.yaml" for number in range(length + 1))
    assert f"{length - 1}.yaml:2: extends: circular: {circle}; remove one of them" in line


def test_a_chain_of_extends_has_an_end() -> None:
    for number in range(30):
        write(f"extends: {number + 1}.yaml\n", f"{number}.yaml")
    assert "extends: more than 20 files deep" in told(["0.yaml"])


def test_a_mistake_in_an_extended_file_names_that_file() -> None:
    write("extends: small\n\ntrain:\n  lr: fast\n", "base.yaml")
    write("extends: base.yaml\nname: mine\n")
    assert "sojourn: base.yaml:4: train.lr: “fast” given" in told(["run.yaml"])


def test_of_two_settings_that_clash_the_one_given_last_is_named() -> None:
    write("extends: small\ntrain:\n  micro_batch: 8\n")
    assert "command line train.global_batch=20: train.micro_batch: 8 does not divide" in told(
        ["run.yaml", "train.global_batch=20"]
    )


def test_a_link_that_goes_in_a_circle_is_no_file() -> None:
    Path("loop.yaml").symlink_to("loop.yaml")
    assert "loop.yaml: no such file" in told(["loop.yaml"])


def test_a_file_that_may_not_be_read_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(["nosuchpreset"])
    with ordinary_user() as folder:
        monkeypatch.chdir(folder)
        write("extends: small\n")
        Path("run.yaml").chmod(0)
        assert "run.yaml: cannot be read: Permission denied" in told(["run.yaml"])


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("\ufeffextends: small\n", ""),
        ("extends: small\ntrain: {}\n", "a new 256×2 model"),
        ("extends: small\r\ntrain:\r\n  steps: 1_000\r\n", "1000 steps"),
        ("%YAML 1.2\n---\nextends: small\n...\n", ""),
        ("rate: &r 1e-4\n", None),
        ("extends: small\ntrain: {lr: &r 1e-4, clip: *r}\n", ""),
        ("extends: small\nlimits: {time: 11h30m, budget: 30元, price_per_hour: 2.19 元/小时}\n", ""),
        ("extends: small\ntrain: {compile: off, activation_checkpointing: true, precision: fp16}\n", ""),
        ("extends: small\nname: 我的模型\n", ""),
    ],
)
def test_what_only_looks_malformed_is_fine(content: str, part: str | None) -> None:
    write(content)
    code, out, err = sojourn("config", "check", "run.yaml")
    if part is None:
        assert code == 2
        return
    assert (code, err) == (0, "") and out.startswith("ok: run.yaml is a valid run") and part in out


def real(*words: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "sojourn", *words], capture_output=True, check=False, **options)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["config", "check", "run.yaml"], "run.yaml:3: train.lr: “fast” given"),
        (["config", "check", "smal"], "did you mean small?"),
        (["config", "check", "small", "--bacth-size", "8"], "did you mean --batch-size?"),
        (["presets", "show", "medum"], "no preset called “medum”; did you mean medium?"),
    ],
)
def test_the_command_itself_says_it_in_one_line(words: list[str], part: str) -> None:
    write(SMALL + "train:\n  lr: fast\n")
    done = real(*words)
    assert (done.returncode, done.stdout) == (2, b"")
    assert len(done.stderr.splitlines()) == 1 and part in done.stderr.decode()


def test_a_terminal_that_knows_only_ascii_gets_the_line_too() -> None:
    done = real("config", "check", "训练", env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (
        done.returncode == 2 and len(done.stderr.splitlines()) == 1 and b"is neither a preset nor a file" in done.stderr
    )
