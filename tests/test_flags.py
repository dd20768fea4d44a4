"""The guides' commands work as typed: every flag, in `-` and in `_` spelling, sets what the guide means by it."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from sojourn.config.load import Loaded, load_run
from sojourn.config.other_trainers import ALL_FLAGS, VALUE_FLAGS, VALUE_MEANINGS
from sojourn.config.quantities import Money
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def value(config: RunConfig, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    return found


def run(command: str) -> Loaded:
    return load_run(shlex.split(command))


# What follows the script's name in each training or preprocessing command of the guides, and what it means.
GUIDES: dict[str, dict[str, Any]] = {
    "--d_model 128 --num_layers 1 --batch_size 2 --num_epochs 1": {
        "model.d_model": 128,
        "model.num_layers": 1,
        "model.num_heads": "auto",
        "train.micro_batch": 2,
        "train.global_batch": 2,
        "train.epochs": 1,
        "data.sources.0.path": "builtin:text",
    },
    "--dataset wikitext2 --d_model 512 --num_layers 6 --num_heads 8 --batch_size 16 --num_epochs 10 --use_amp "
    "--max_seq_len 512": {
        "data.sources.0.path": "wikitext2",
        "model.d_model": 512,
        "model.num_layers": 6,
        "model.num_heads": 8,
        "train.global_batch": 16,
        "train.epochs": 10,
        "train.precision": "auto",
        "data.max_length": 512,
    },
    "--dataset wikitext2 --d_model 768 --num_layers 6 --num_heads 12 --batch_size 8 --num_epochs 20 --use_amp "
    "--max_seq_len 512": {"model.d_model": 768, "model.num_heads": 12, "train.global_batch": 8, "train.epochs": 20},
    "--d_model 256 --num_layers 2 --num_epochs 1": {"model.d_model": 256, "model.num_layers": 2, "train.epochs": 1},
    "--batch_size 8 --use_amp --d_model 384 --num_layers 4": {"model.d_model": 384, "model.num_layers": 4},
    "--input_dir data/raw --output_dir data/processed --vocab_size 32000": {
        "data.sources.0.path": "data/raw",
        "save.folder": "data/processed",
        "data.vocab_size": 32000,
    },
    "--train_file data/processed/train.jsonl --val_file data/processed/validation.jsonl --tokenizer_path "
    "data/processed/tokenizer.model --output_dir outputs/my_model --device cuda --batch_size 32 --learning_rate 5e-5 "
    "--num_epochs 10": {
        "data.sources.0.path": "data/processed/train.jsonl",
        "data.eval_sources.0.path": "data/processed/validation.jsonl",
        "data.tokenizer": "data/processed/tokenizer.model",
        "save.folder": "outputs/my_model",
        "train.device": "cuda",
        "train.global_batch": 32,
        "train.lr": 5e-5,
        "train.epochs": 10,
    },
    "--gradient_accumulation_steps 4 --batch_size 8": {"train.micro_batch": 8, "train.global_batch": 32},
    "--fp16 --batch_size 64": {"train.precision": "fp16", "train.global_batch": 64},
    "--config configs/lora_20k.yaml": {"name": "lora-20k", "method.kind": "lora", "data.take": 20_000},
    "--config paper_r64": {"name": "lora-r64", "method.rank": 64, "train.global_batch": 64},
    "--config paper_r64 --gpus 0": {"parallel.gpus": [0], "train.global_batch": 64},
    "--config pretrained_r320 --gpus 0": {"method.rank": 320, "parallel.gpus": [0]},
    "--config paper_r64 --gpus 0,1,2,3": {"parallel.gpus": [0, 1, 2, 3], "train.global_batch": 64},
    "--config paper_r64 --gpus 0,1,2,3 --fsdp": {"parallel.engine": "fsdp", "parallel.gpus": [0, 1, 2, 3]},
    "--config paper_r64 --gpus 0,1,2,3 --deepspeed ds_config.json": {"parallel.deepspeed": "ds_config.json"},
    "--config paper_r64 --gpus 0,1 --epochs 5 --batch-size 16 --gradient-accumulation 4 --learning-rate 3e-5": {
        "train.epochs": 5,
        "train.micro_batch": 16,
        "train.global_batch": 16 * 4 * 2,
        "train.lr": 3e-5,
        "parallel.gpus": [0, 1],
    },
    "--config paper_r64 --gpus 0 --fp16": {"train.precision": "fp16"},
    "--config paper_r64 --batch-size 4 --gradient-accumulation 16": {"train.micro_batch": 4, "train.global_batch": 64},
    "--config paper_r64 --deepspeed ds_config.json": {"parallel.deepspeed": "ds_config.json"},
    "--config paper_r64 --resume-from-checkpoint output/paper_r64/checkpoint-80": {
        "save.resume": "output/paper_r64/checkpoint-80"
    },
    # the names of the guides' TrainingArguments, LoraConfig and from_pretrained
    "--model_name Qwen/Qwen2.5-7B --load_in_4bit True --attn_implementation flash_attention_2 --device_map auto --r 16 "
    "--lora_alpha 32 --target_modules q_proj,v_proj --lora_dropout 0.05 --output_dir ./out --max_length 2048 "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 16 --logging_steps 10 --num_train_epochs 3 "
    "--fp16 True --data_files train.json": {
        "model.base": "Qwen/Qwen2.5-7B",
        "method.kind": "qlora",
        "train.attention": "flash_attention_2",
        "method.rank": 16,
        "method.alpha": 32,
        "method.targets": ["q_proj", "v_proj"],
        "method.dropout": 0.05,
        "save.folder": "./out",
        "data.max_length": 2048,
        "train.micro_batch": 1,
        "train.global_batch": 16,
        "log.every_steps": 10,
        "train.epochs": 3,
        "train.precision": "fp16",
        "data.sources.0.path": "train.json",
    },
    "lora_20k --fp16 --gradient_checkpointing --per_device_train_batch_size 2 --gradient_accumulation_steps 8 "
    "--save_steps 500 --save_total_limit 3": {
        "train.precision": "fp16",
        "train.activation_checkpointing": "full",
        "train.global_batch": 16,
        "save.every_steps": 500,
        "save.keep": 3,
    },
    "paper_r64 --bf16 True --dataloader_pin_memory True --dataloader_num_workers 4": {"train.precision": "bf16"},
    "medium --resume checkpoints/best_model.pt --num_workers 4": {"save.resume": "checkpoints/best_model.pt"},
    "medium --max_time 11h30m --budget 30 --price '2.19 CNY'": {
        "limits.time": 41400,
        "limits.budget": Money.parse("30"),
        "limits.price_per_hour": Money.parse("2.19 CNY"),
    },
}


def _spell(command: str, mark: str) -> str:
    return re.sub(r"--[\w-]+", lambda flag: "--" + re.sub("[-_]", mark, flag[0][2:]), command)


@pytest.mark.parametrize("mark", ["-", "_"])
@pytest.mark.parametrize("command", GUIDES)
def test_a_guides_command_means_what_the_guide_means(command: str, mark: str) -> None:
    config = run(_spell(command, mark)).config
    assert {key: value(config, key) for key in GUIDES[command]} == GUIDES[command]


@pytest.mark.parametrize("command", [command for command in GUIDES if "--" in command])
def test_a_flag_may_carry_its_value_behind_an_equals_sign(command: str) -> None:
    joined = re.sub(r"(--[\w-]+) (?!--|$)('[^']*'|\S+)", r"\1=\2", command)
    assert run(joined).config == run(command).config


@pytest.mark.parametrize("key", sorted(set(VALUE_FLAGS.values())))
def test_every_flag_sets_a_key_that_exists(key: str) -> None:
    assert value(run("small").config, key) is not Ellipsis


@pytest.mark.parametrize(
    ("command", "micro", "whole"),
    [
        ("lora-r64", 8, 64),
        ("lora-r64 --gpus 0,1,2,3", 8, 64),
        ("lora-r64 --gradient-accumulation 4", 8, 32),
        ("lora-r64 --gradient-accumulation 4 --gpus 0,1", 8, 64),
        ("lora-r64 --batch-size 4", 4, 4),
        ("lora-r64 --batch-size 4 --gpus 0,1,2", 4, 12),
        ("lora-r64 --gpus 3 --batch-size 4", 4, 4),
        ("lora-r64 --gpus all --batch-size 4", 4, 4),
        ("medium", "auto", 16),
        ("medium --gradient_accumulation_steps 4", 16, 64),
        ("medium train.global_batch=64 --batch_size 4", 4, 64),
        ("medium train.micro_batch=2 --gradient_accumulation_steps 4", 2, 8),
        ("medium parallel.gpus=[0,1] --batch_size 4", 4, 8),
        ("--model_name gpt2 --gradient_accumulation_steps 2", 32, 64),
    ],
)
def test_global_batch_is_batch_size_by_accumulation_by_gpus(command: str, micro: Any, whole: int) -> None:
    train = run(command).config.train
    assert (train.micro_batch, train.global_batch) == (micro, whole)


def test_all_gpus_cannot_be_counted_and_a_note_says_so() -> None:
    (note,) = run("lora-r64 --gpus all --batch-size 4").notes
    assert "the global batch is 4 rows on any number of GPUs" in note


def test_a_command_that_names_no_run_starts_from_small_and_says_so() -> None:
    loaded = run("--fp16")
    assert (
        loaded.config.model.d_model == 256
        and loaded.config.name == "256x2"
        and loaded.notes == ("no run named; starting 256x2 from the preset small",)
    )


def test_a_file_that_is_not_here_but_is_called_like_a_preset_is_that_preset() -> None:
    assert run("--config configs/lora_20k.yaml").notes == (
        "configs/lora_20k.yaml does not exist; using the preset lora-20k",
    )
    Path("configs").mkdir()  # there, so that a file of the user's own is meant
    with pytest.raises(UserError, match=r"configs/lora_20k.yaml: no such file; did you mean lora-20k\?"):
        run("--config configs/lora_20k.yaml")
    Path("configs/lora_20k.yaml").write_text("extends: small\nname: own\n")
    assert run("--config configs/lora_20k.yaml").config.name == "own"


def test_a_length_typed_replaces_the_presets_length() -> None:
    train = run("medium --max_steps 50").config.train
    assert (train.steps, train.epochs, train.tokens) == (50, None, None)
    assert run("medium train.tokens=2M").config.train.epochs is None


@pytest.mark.parametrize("epochs", ["--num_train_epochs 3", "--num_epochs 3", "--epochs 3", "train.epochs=3"])
def test_of_steps_and_epochs_typed_together_the_steps_count_and_a_note_says_so(epochs: str) -> None:
    for words in (f"{epochs} --max_steps 50", f"--max_steps 50 {epochs}"):
        loaded = run(f"medium {words}")
        assert (loaded.config.train.steps, loaded.config.train.epochs) == (50, None)
        typed = epochs if "=" in epochs else epochs.partition(" ")[0]
        assert loaded.notes == (f"train.steps=50 sets the length; {typed} is not used",)
    loaded = run(f"medium {epochs} --max_steps -1")
    assert (loaded.config.train.steps, loaded.config.train.epochs, loaded.notes) == (None, 3, ())


def test_a_width_typed_drops_the_presets_heads_but_not_ones_own() -> None:
    assert run("medium --d_model 384").config.model.num_heads == "auto"
    assert run("medium --num_heads 6 --d_model 384").config.model.num_heads == 6
    Path("own.yaml").write_text("extends: medium\nmodel: {num_heads: 4}\n")
    assert run("own.yaml --d_model 384").config.model.num_heads == 4


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        ("--use_amp false", "train.precision", "fp32"),
        ("--fp16 false", "train.precision", "auto"),
        ("--gradient_checkpointing False", "train.activation_checkpointing", "off"),
        ("--torch_compile", "train.compile", "on"),
        ("--warmup_steps 100", "train.warmup", 100),
        ("--warmup_steps 1", "train.warmup", 0),
        ("--warmup_ratio 0.1", "train.warmup", 0.1),
        ("--train.lr 1e-3", "train.lr", 1e-3),
        ("--Learning_Rate 1e-3", "train.lr", 1e-3),
        ("-lr 1e-3", "train.lr", 1e-3),
    ],
)
def test_switches_and_spellings(words: str, key: str, expected: Any) -> None:
    assert value(run(f"small {words}").config, key) == expected


@pytest.mark.parametrize(
    ("word", "key", "expected"),
    [
        ("train.lr=1e-4", "train.lr", 1e-4),
        ("train.lr=auto", "train.lr", "auto"),
        ("train.steps=1e3", "train.steps", 1000),
        ("train.global-batch=8", "train.global_batch", 8),
        ("train.compile=false", "train.compile", "off"),
        ("method.dora=no", "method.dora", False),
        ("name=2024", "name", "2024"),
        ("name=true", "name", "true"),
        ("name=null", "name", None),
        ("data.tokenizer=007", "data.tokenizer", "007"),
        ("data.tokenizer=a: b #c", "data.tokenizer", "a: b #c"),
        ("data.tokenizer='5'", "data.tokenizer", "5"),
        ("data.tokenizer=[draft] x", "data.tokenizer", "[draft] x"),
        ("data.tokenizer=C:\\models\\x", "data.tokenizer", "C:\\models\\x"),
        ("data.sources=a.jsonl", "data.sources.0.path", "a.jsonl"),
        ("data.sources=2024", "data.sources.0.path", "2024"),
        ("data.sources=[a.jsonl, {path: b.jsonl, take: 20k}]", "data.sources.1.take", 20_000),
        ("data.sources={path: a, size: 4MB}", "data.sources.0.size", 4_000_000),
        ("parallel.gpus=[2, 3]", "parallel.gpus", [2, 3]),
        ("save.every_steps=epoch", "save.every_steps", "epoch"),
        ("limits={time: 5m}", "limits.time", 300),
    ],
)
def test_overrides_are_read_as_a_person_means_them(word: str, key: str, expected: Any) -> None:
    found = value(load_run(["small", word]).config, key)
    assert found == expected and (found is True or found is False) == (expected is True or expected is False)


def test_later_words_win_over_earlier_ones_and_over_the_file() -> None:
    assert run("small --lr 1 train.lr=2").config.train.lr == 2
    assert run("train.lr=2 --lr 1 small").config.train.lr == 1


def test_what_other_trainers_need_is_noted_and_left_out() -> None:
    notes = run("small --dataloader_num_workers 4 --dataloader_pin_memory --use_unsloth --device_map auto").notes
    flags = ["--dataloader_num_workers", "--dataloader_pin_memory", "--use_unsloth", "--device_map"]
    assert [note.split()[0] for note in notes] == flags


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--optim adamw_torch", {"train.optimizer": "adamw"}),
        ("--optim muon", {"train.optimizer": "muon"}),
        ("--lr_scheduler_type linear", {"train.schedule": "linear"}),
        ("--report_to tensorboard,wandb", {"log.tensorboard": "on", "log.trackers": ["wandb"]}),
        ("--report_to none", {"log.tensorboard": "off", "log.trackers": []}),
        ("--report_to swanlab,mlflow", {"log.trackers": ["swanlab", "mlflow"]}),
        ("--load_in_8bit", {"method.kind": "qlora", "method.bits": 8}),
        ("--load_in_8bit False", {"method.kind": "lora", "method.bits": 4}),
        ("--dtype torch.bfloat16", {"train.precision": "bf16"}),
        ("--attn_implementation eager", {"train.attention": "math"}),
        ("--packing", {"data.packing": "packed"}),
        ("--packing padded", {"data.packing": "padded"}),
        ("--packing=False", {"data.packing": "off"}),
        ("--save_strategy EPOCH", {"save.every_steps": "epoch"}),
        ("--val_size 0.1", {"data.eval_fraction": 0.1}),
        ("--val_size 100", {"data.eval_fraction": 100}),
        ("--quantization_bit 4", {"method.kind": "qlora", "method.bits": 4}),
        ("--quantization_bit 8", {"method.kind": "qlora", "method.bits": 8}),
        ("--neftune_noise_alpha 5", {"train.neftune_noise_alpha": 5.0}),
        ("--loraplus_lr_ratio 16", {"method.loraplus_lr_ratio": 16.0}),
        ("--ddp_timeout 180000000", {"parallel.timeout": 180_000_000}),
        ("--assistant_only_loss", {"data.train_on": "assistant"}),
        ("--assistant_only_loss false", {"data.train_on": "all"}),
        ("--train_on_prompt", {"data.train_on": "all"}),
        ("--mask_history true", {"data.train_on": "last"}),
        ("--lora_target all", {"method.targets": ["all-linear"]}),
        ("--truncation", {"data.long_texts": "truncate", "data.long_chats": "truncate"}),
        ("--truncation false", {"data.long_texts": "split"}),
        ("--num_workers 4", {"data.workers": 4}),
        ("--num_workers 0", {"data.workers": 1}),
        ("--nproc_per_node 2", {"parallel.gpus": [0, 1]}),
        ("--nproc_per_node=gpu", {"parallel.gpus": "all"}),
        ("--nproc_per_node 2 --batch_size 3", {"train.global_batch": 6}),
        ("--push_to_hub false", {"save.mirror": None}),
    ],
)
def test_values_of_other_trainers_are_translated(words: str, expected: dict[str, Any]) -> None:
    for command in (f"{words} lora-20k", f"lora-20k {words}"):
        config = run(command).config
        assert {key: value(config, key) for key in expected} == expected


@pytest.mark.parametrize("flag", VALUE_MEANINGS)
def test_every_translated_value_is_a_valid_setting_or_a_note(flag: str) -> None:
    for word, meant in VALUE_MEANINGS[flag].items():
        loaded = run(f"qlora-7b --{flag} {word}")
        told = [note for note in loaded.notes if note.startswith(f"--{flag} {word}: ")]
        assert bool(told) == (not all("=" in part for part in meant.split()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--lr_scheduler_type cosine_with_restarts",
            "train.schedule: “cosine_with_restarts” given; allowed: cosine or",
        ),
        ("--optim adafactor", "train.optimizer: “adafactor” given; allowed: adamw or adamw_8bit"),
        ("--bnb_4bit_quant_type fp4", "--bnb_4bit_quant_type: “fp4” given; allowed: nf4"),
        ("--save_strategy best", "--save_strategy: “best” given; allowed: epoch or steps or no"),
        ("--bias all", "--bias: “all” given; allowed: none"),
        ("--logging_dir", "--logging_dir: needs a value"),
        ("--push_to_hub", "--push_to_hub: no model is uploaded by itself; when the run is done: hf upload"),
        ("--hub_model_id me/mine", "--hub_model_id: no model is uploaded by itself"),
        ("--quantization_bit 3", "--quantization_bit: “3” given; allowed: 4 or 8"),
        ("--stage dpo", "--stage: “dpo” given; allowed: sft or pt"),
        ("--nproc_per_node none", "--nproc_per_node: parallel.gpus: “none” given; allowed: GPU numbers such as 0"),
    ],
)
def test_what_other_trainers_can_and_this_one_cannot_is_reported(words: str, message: str) -> None:
    with pytest.raises(UserError) as told:
        run(f"lora-20k {words}")
    assert message in str(told.value)


@pytest.mark.parametrize("flag", ALL_FLAGS)
def test_a_flag_with_a_letter_too_many_is_suggested(flag: str) -> None:
    typo = f"{flag}x" if flag != "r" else "lora_rr"
    with pytest.raises(UserError, match=rf"--{typo}: no such flag; did you mean --\w+\?"):
        run(f"small --{typo} 1")


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--save_only_model", "final/ has the model alone"),
        ("--plot_loss", "loss.svg"),
        ("--use_unsloth", "fused kernels of its own"),
    ],
)
def test_a_flag_that_is_not_needed_says_why_and_changes_nothing(flag: str, answer: str) -> None:
    for words in (flag, f"{flag} true", f"{flag}=false"):
        loaded = run(f"lora-20k {words}")
        (note,) = loaded.notes
        assert note.startswith(f"{flag} is not needed: ") and answer in note
        assert loaded.config == run("lora-20k").config


def test_no_setting_of_other_trainers_is_taken_for_another() -> None:
    """What is not a slip of the fingers is not suggested: `--tf32` is not `--fp32`."""
    from peft import LoraConfig
    from transformers import TrainingArguments

    names = {field.name for kind in (TrainingArguments, LoraConfig) for field in fields(kind)}
    names |= {"freeze_layers", "use_badam", "pref_beta", "rope_scaling", "dataset_dir"}
    assert len(names) > 100
    for name in names - set(ALL_FLAGS):
        with pytest.raises(UserError) as told:
            run(f"small --{name} 1")
        assert "did you mean" not in str(told.value), name
