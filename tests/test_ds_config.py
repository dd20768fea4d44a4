"""A DeepSpeed file beside the run's settings: `auto` is filled in, another value than the run's is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sojourn.config.load import load_run
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.resolve.ds_config import config_from_file, default_config
from sojourn.resolve.ds_fields import KNOWN, PASSED_THROUGH

WORDS = (
    "small", "train.global_batch=32", "train.micro_batch=4", "train.lr=2e-5", "train.precision=bf16", "train.clip=1",
    "train.steps=1000", "train.warmup=0.03", "train.schedule=cosine", "train.min_lr=0.1", "train.weight_decay=0.1",
)  # fmt: skip

# What a guide for several GPUs tells its readers to write.
GUIDE: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
    "fp16": {"enabled": False},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
}
# The usual file for ZeRO-3 with transformers.
ZERO_3: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "wall_clock_breakdown": False,
}


def run(*words: str) -> RunConfig:
    return load_run([*WORDS, *words]).config


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("ds.json")


def fill(file: Path, content: Any, *words: str, processes: int = 2) -> tuple[dict[str, Any], list[str]]:
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return config_from_file(file, run(*words), processes)


def refusal(file: Path, content: Any, *words: str, processes: int = 2) -> str:
    with pytest.raises(UserError) as caught:
        fill(file, content, *words, processes=processes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def nested(field: str, value: Any) -> Any:
    for key in reversed(field.split(".")):
        value = {key: value}
    return value


def test_the_guides_file_is_taken_and_its_scheduler_noted(file: Path) -> None:
    given, notes = fill(file, GUIDE, processes=4)
    assert given == {
        "zero_optimization": {
            **GUIDE["zero_optimization"],
            "allgather_bucket_size": 200_000_000,
            "reduce_bucket_size": 200_000_000,
        },
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**12,
    }
    assert notes == [
        "ds.json: scheduler.type is WarmupLR, but train.schedule is cosine, and that is used; "
        "to follow the file, type train.schedule=constant"
    ]
    assert fill(file, GUIDE, "train.schedule=constant")[1] == []


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_autos_are_filled_or_left_to_deepspeed(file: Path, precision: str) -> None:
    given, notes = fill(file, ZERO_3, f"train.precision={precision}")
    assert not notes and "auto" not in json.dumps(given)
    assert (given["fp16"]["enabled"], given["bf16"]["enabled"]) == (precision == "fp16", precision == "bf16")
    assert given["fp16"]["loss_scale_window"] == 1000
    zero = given["zero_optimization"]
    assert zero["sub_group_size"] == 10**9 and not {"reduce_bucket_size", "stage3_prefetch_bucket_size"} & set(zero)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train_batch_size", 32.0),
        ("train_micro_batch_size_per_gpu", "4"),
        ("gradient_accumulation_steps", 4),
        ("gradient_clipping", "1"),
        ("optimizer.type", "adam"),
        ("optimizer.params.lr", 0.00002),
        ("optimizer.params.betas", ["0.90", 0.95]),
        ("optimizer.params.eps", 0.00000001),
        ("optimizer.params.weight_decay", 1e-1),
        ("scheduler.params.warmup_max_lr", "2e-05"),
        ("scheduler.params.warmup_num_steps", 30),
        ("scheduler.params.total_num_steps", 1e3),
        ("scheduler.params.cos_min_ratio", 0.1),
        ("amp", {"enabled": False, "opt_level": "O1"}),
        ("zero_optimization.zero_quantized_weights", False),
        ("gradient_clipping", None),
    ],
)
def test_the_same_in_other_words_is_no_contradiction(file: Path, field: str, value: Any) -> None:
    given, notes = fill(file, nested(field, value))
    assert given == fill(file, {})[0] and notes == []


@pytest.mark.parametrize(
    ("field", "value", "ours", "use"),
    [
        ("train_batch_size", 64, "train.global_batch is 32", "train.global_batch=64"),
        ("train_micro_batch_size_per_gpu", 8, "train.micro_batch is 4", "train.micro_batch=8"),
        ("gradient_accumulation_steps", 8, "train.global_batch is 32", "train.global_batch=64"),
        ("gradient_clipping", 0.5, "train.clip is 1.0", "train.clip=0.5"),
        ("fp16.enabled", True, "train.precision is bf16", "train.precision=fp16"),
        ("bf16.enabled", False, "train.precision is bf16", "train.precision=fp32"),
        ("optimizer.type", "Lamb", "train.optimizer is adamw", "allowed: Adam or AdamW"),
        ("optimizer.params.lr", 5e-5, "train.lr is 2e-05", "train.lr=5e-05"),
        ("optimizer.params.betas", [0.9, 0.999], "train.beta2 0.95", "train.beta1=0.9 train.beta2=0.999"),
        ("optimizer.params.eps", 1e-6, "always 1e-08", "write that"),
        ("optimizer.params.weight_decay", 0, "train.weight_decay is 0.1", "train.weight_decay=0"),
        ("optimizer.params.adam_w_mode", False, "always true", "write that"),
        ("scheduler.type", "OneCycle", "train.schedule is cosine", "allowed: WarmupLR, WarmupDecayLR, WarmupCosineLR"),
        ("scheduler.params.warmup_max_lr", 1e-4, "train.lr is 2e-05", "train.lr=0.0001"),
        ("scheduler.params.warmup_min_lr", 1e-6, "always 0", "write that"),
        ("scheduler.params.warmup_num_steps", 100, "train.warmup is 0.03 (30 steps)", "train.warmup=100"),
        ("scheduler.params.total_num_steps", 500, "train.steps is 1000", "train.steps=500"),
        ("scheduler.params.cos_min_ratio", 0, "train.min_lr is 0.1", "train.min_lr=0"),
        ("zero_force_ds_cpu_optimizer", True, "always false", "write that"),
    ],
)
def test_a_contradiction_names_both_and_what_to_type(file: Path, field: str, value: Any, ours: str, use: str) -> None:
    said = refusal(file, nested(field, value))
    start = f"ds.json: {field} {'are' if field.endswith('betas') else 'is'} "
    assert said.startswith(start) and str(value).strip("[]").split(",")[0].lower() in said.lower()
    assert ours in said and use in said


def test_typing_what_a_contradiction_says_settles_it(file: Path) -> None:
    content = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4, "fp16": {"enabled": True}}
    words: list[str] = []
    for _ in range(3):
        words.append(refusal(file, content, *words).split("type ")[1].split(",")[0])
    assert words == ["train.micro_batch=8", "train.precision=fp16", "train.global_batch=64"]
    assert fill(file, content, *words)[0]["fp16"]["enabled"] is True


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.schedule=cosine"], "train.schedule=linear train.min_lr=0"),
        (["train.schedule=linear"], "train.min_lr is 0.1, and that is used; to follow the file, type train.min_lr=0"),
        (["train.schedule=linear", "train.min_lr=0"], None),
    ],
)
def test_another_shape_of_the_rate_is_a_note(file: Path, words: list[str], told: str | None) -> None:
    given, notes = fill(file, {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}, *words)
    assert "scheduler" not in given and [note.endswith(told or "") for note in notes] == [True] * (told is not None)


def test_lengths_that_only_the_data_decide_are_noted_not_refused(file: Path) -> None:
    params = {"warmup_num_steps": 100, "total_num_steps": 500}
    config = run()
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": None, "epochs": 3.0})})
    file.write_text(json.dumps({"scheduler": {"type": "WarmupCosineLR", "params": params}}))
    notes = config_from_file(file, config, 1)[1]
    assert [note.split("type ")[1] for note in notes] == ["train.warmup=100", "train.steps=500"]


def test_fields_without_effect_are_left_out_with_a_note_for_each_reason(file: Path) -> None:
    content = {"steps_per_print": 10, "tensorboard": {"enabled": True}, "wandb": {"enabled": False}, "aio": {"a": 1}}
    given, notes = fill(file, content)
    assert given == fill(file, {})[0]
    assert [note.split(": ignored")[0] for note in notes] == ["ds.json: steps_per_print, tensorboard", "ds.json: aio"]


ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"pipeline": {"stages": 2}}, "pipeline splits the model"),
        ({"amp": {"enabled": True}}, "train.precision"),
        ({"sparse_attention": {"mode": "fixed"}}, "train.attention"),
        ({"data_efficiency": {"enabled": True}}, "order of rows"),
        ({"compression_training": {"layer_reduction": {"enabled": True}}}, "compression_training is not supported"),
        ({ZERO: {"stage": 3, "zero_quantized_weights": True}}, "no longer be comparable"),
        ({ZERO: {"stage": 3, "zero_hpz_partition_size": 8}}, "always 1"),
        ({ZERO: {"stage": 2, "cpu_offload": True}}, "write offload_optimizer"),
        ({ZERO: {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}}}, "write cpu or none"),
        (
            {ZERO: {"stage": 2, "offload_param": {"device": "cpu"}}},
            "stage is 2, but offload_param needs 3 or above",
        ),
        (
            {ZERO: {"offload_optimizer": {"device": "cpu"}}},
            "stage is 0, but offload_optimizer needs 1 or above",
        ),
        ({ZERO: {"stage": 4}}, "stage: 4 given; allowed: 0, 1, 2, 3"),
        ({ZERO: {"stage": "auto"}}, f'{ZERO}.stage: "auto" given, but no setting'),
        ({ZERO: {"overlap_comm": "auto"}}, f"{ZERO}.overlap_comm"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "write zero_optimization.stage 1, 2 or 3"),
        ({"communication_data_type": "int8"}, "allowed: fp32, fp16, bf16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
    ],
)
def test_what_cannot_be_honoured_is_refused(file: Path, content: Any, said: str) -> None:
    message = refusal(file, content)
    assert message.startswith("ds.json: ") and said in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "ds.json:1:1: not valid JSON: the file is empty"),
        ("[1]", "ds.json:1:1: [1] given; a DeepSpeed file is an object"),
        ('{\n  "fp16": {"enabled": true,}\n}', "ds.json:2:"),
        ('{"train_batch_size": 32,\n  // rows\n  "fp16": {}}', "ds.json:2:3: not valid JSON: JSON has no comments"),
        ('{"fp16": {"enabled": True}}', "ds.json:1:22: not valid JSON: this is Python"),
        ('{"fp16": {"enabled": true}', "it ends too early; close every brace"),
        ('{"a" 1}', "ds.json:1:6: not valid JSON"),
        ('{"bf16": {"enabled": true, "enabled": false}}', '"enabled" appears twice in the same object; keep one'),
        ('{"gradient_clipping": NaN}', "NaN is not a JSON number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"train_batch_size": "many"}', 'train_batch_size: "many" given; it takes a number'),
        ('{"train_batch_size": 2.5}', "it takes a whole number"),
        ('{"train_batch_size": {"a": 1}}', "train_batch_size: an object given"),
        ('{"gradient_accumulation_steps": 0}', "it takes a whole number, 1 or more"),
        ('{"gradient_clipping": true}', "it takes a number"),
        ('{"bf16": {"enabled": "true"}}', 'bf16.enabled: "true" given; it takes true or false, without quotes'),
        ('{"zero_optimization": true}', 'zero_optimization: true given; it takes an object, such as {"'),
        ('{"zero_optimization": {"reduce_bucket_size": -1}}', "it takes a whole number, 1 or more"),
        ('{"optimizer": {"params": {"betas": 0.9}}}', "it takes two numbers, such as [0.9, 0.95]"),
        ('{"zero_optimisation": {"stage": 2}}', "did you mean zero_optimization.stage?"),
        ('{"optimizer": {"params": {"qqq": 1}}}', "optimizer.params.qqq is not a known field"),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_line_with_its_place(file: Path, content: str, said: str) -> None:
    message = refusal(file, content)
    assert message.startswith("ds.json:") and said in message


def test_a_comma_too_many_is_named(file: Path) -> None:
    assert refusal(file, '{"fp16": {"enabled": false,}}').endswith("remove the comma")


def test_a_file_that_cannot_be_read_is_one_line(file: Path) -> None:
    with pytest.raises(UserError, match=r"^ds.json: no such file; correct parallel.deepspeed"):
        config_from_file(file, run(), 1)
    with pytest.raises(UserError, match="cannot be read"):
        config_from_file(file.parent, run(), 1)
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UserError, match="save the file as UTF-8"):
        config_from_file(file, run(), 1)


def test_offload_is_added_where_the_file_says_nothing_of_it(file: Path) -> None:
    added = {"device": "cpu", "pin_memory": True}
    word, part = "train.offload=optimizer", "offload_optimizer"
    assert fill(file, {ZERO: {"stage": 1}}, word)[0][ZERO] == {"stage": 1, part: added}
    own = {"device": "cpu"}
    assert fill(file, {ZERO: {"stage": 1, part: own}}, word)[0][ZERO][part] == own
    assert default_config(run(word), 1)[ZERO][part] == added and part not in default_config(run(), 1)[ZERO]
    assert "train.offload=off" in refusal(file, {ZERO: {"stage": 1, part: {"device": "none"}}}, word)
    assert "stage is 0, but train.offload=optimizer needs 1 or above" in refusal(file, {}, word)
    every = {"stage": 3, part: added, "offload_param": added}
    assert fill(file, {ZERO: {"stage": 3}}, "train.offload=all")[0][ZERO] == every
    assert default_config(run("train.offload=all"), 1)[ZERO].items() >= every.items()
    assert "train.offload=all needs 3 or above" in refusal(file, {ZERO: {"stage": 2}}, "train.offload=all")


def test_other_optimizers_are_refused_with_and_without_a_file(file: Path) -> None:
    assert "optimizer.type is AdamW, but train.optimizer is muon" in refusal(file, GUIDE, "train.optimizer=muon")
    with pytest.raises(UserError, match=r"^train.optimizer: muon given.*train.optimizer=adamw"):
        default_config(run("train.optimizer=muon"), 2)


@pytest.mark.parametrize("content", [GUIDE, ZERO_3, {}, None], ids=["guide", "zero-3", "empty", "no file"])
@pytest.mark.parametrize("offload", ["off", "optimizer"])
def test_deepspeed_itself_takes_what_we_give_it(file: Path, content: Any, offload: str) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from deepspeed.runtime.config import DeepSpeedConfig

    if content == {} and offload == "optimizer":
        content = {ZERO: {"stage": 1}}
    word = f"train.offload={offload}"
    given = default_config(run(word), 1) if content is None else fill(file, content, word, processes=1)[0]
    read = DeepSpeedConfig(given)
    assert read.zero_config.stage == given[ZERO]["stage"] and read.bfloat16_config.enabled
    assert (read.train_batch_size, read.gradient_clipping, read.zero_force_ds_cpu_optimizer) == (1, 1.0, False)
    assert read.optimizer_name is None and read.scheduler_name is None


def test_a_field_stands_in_one_table_only() -> None:
    assert len(set(KNOWN)) == len(KNOWN)


def test_deepspeed_knows_every_field_that_is_kept(file: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from deepspeed.runtime.config import DeepSpeedConfig

    example = {"flag": True, "size": 7, "count": 7, "number": 7, (0, 1, 2, 3): 3}
    content: dict[str, Any] = {}
    for field, kind in PASSED_THROUGH.items():
        *sections, last = field.split(".")
        inner = content
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = example.get(kind) or kind[1]
    given = fill(file, content, processes=1)[0]
    DeepSpeedConfig(given)
    for section in (ZERO, "fp16", "bf16"):
        assert given[section].items() >= content[section].items()
