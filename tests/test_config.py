"""From a file to a run: layers, reading back what was written, any input at all, and how little is imported for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shared import MORE
from sojourn.config.fields import Section
from sojourn.config.keys import all_keys
from sojourn.config.load import dump, load_run, read_config, to_yaml
from sojourn.config.other_trainers import ALL_FLAGS, VALUE_FLAGS
from sojourn.config.preset import ALIASES, FOLDER, ORDER
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from test_config_errors import sojourn

QUICK = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(content: str, *words: str) -> RunConfig:
    Path("run.yaml").write_text(content, encoding="utf-8")
    return load_run(["run.yaml", *words]).config


# --- layers ---


def test_a_file_lies_over_what_it_extends_and_the_command_line_over_both() -> None:
    Path("base.yaml").write_text("extends: small\ntrain: {lr: 1.0e-3, clip: 2, seed: 7}\n")
    config = load("extends: base.yaml\ntrain: {lr: 2.0e-3, clip: 3}\n", "train.clip=4")
    assert (config.train.seed, config.train.lr, config.train.clip, config.model.d_model) == (7, 2e-3, 4, 256)


def test_a_run_is_named_after_its_file_and_never_after_what_it_extends() -> None:
    Path("base.yaml").write_text("name: base\nextends: small\n")
    assert load("extends: base.yaml\n").name == "run"
    Path("my first run!.yaml").write_text("extends: small\n")
    assert load_run(["my first run!.yaml"]).config.name == "my-first-run"
    Path("我的.yaml").write_text("extends: small\n")
    assert load_run(["我的.yaml"]).config.name == "我的"
    assert load("extends: small\nname: own\n").name == "own"


def test_extends_is_looked_for_beside_the_file_then_among_the_presets() -> None:
    Path("runs").mkdir()
    Path("runs/small.yaml").write_text("extends: small\ntrain: {seed: 5}\n")
    Path("runs/mine.yaml").write_text("extends: small.yaml\n")
    assert load_run(["runs/mine.yaml"]).config.train.seed == 5
    assert load_run(["small"]).config.train.seed == 0


def test_a_length_in_one_file_replaces_a_length_in_another_unit_below_it() -> None:
    train = load("extends: medium\ntrain: {tokens: 5M}\n").train
    assert (train.epochs, train.steps, train.tokens) == (None, None, 5_000_000)


def test_a_width_in_a_file_drops_the_presets_heads() -> None:
    assert load("extends: medium\nmodel: {d_model: 384}\n").model.num_heads == "auto"
    assert load("extends: medium\nmodel: {d_model: 384, num_heads: 8}\n").model.num_heads == 8


def test_another_method_drops_what_the_preset_says_of_its_own() -> None:
    assert load("extends: lora-20k\nmethod: {kind: full}\n").method.alpha == "auto"
    assert load_run(["qlora-7b", "method.kind=lora"]).config.method.rank == 16


def test_an_empty_section_changes_nothing_and_a_list_replaces_a_list() -> None:
    config = load("extends: small\nmodel: {}\ndata: {sources: [a.txt, b.txt]}\n")
    assert config.model.d_model == 256 and [source.path for source in config.data.sources] == ["a.txt", "b.txt"]


def test_null_takes_a_presets_setting_back() -> None:
    assert load("extends: lora-20k\ndata: {take: null}\n").data.take is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1e-4", 1e-4), ("1E0", 1.0), ("1_0", 10.0), (".5", 0.5), ("+.5", 0.5), ("2", 2.0), ("auto", "auto")],
)
def test_numbers_are_read_as_people_write_them(text: str, expected: Any) -> None:
    assert load(f"extends: small\ntrain: {{lr: {text}}}\n").train.lr == expected


def test_words_that_old_yaml_takes_for_something_else_stay_words() -> None:
    config = load("extends: small\nname: off\ndata: {tokenizer: 11:30}\ntrain: {compile: off}\n")
    assert (config.name, config.data.tokenizer, config.train.compile) == ("off", "11:30", "off")


# --- writing and reading back ---


@pytest.mark.parametrize("name", [*ORDER, *ALIASES])
def test_every_preset_reads_back_as_written(name: str) -> None:
    config = load_run([name]).config
    Path("run.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert read_config(Path("run.yaml")) == config
    assert RunConfig.model_validate(json.loads(json.dumps(dump(config)))) == config
    assert to_yaml(read_config(Path("run.yaml"))) == to_yaml(config)


text = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20) | st.sampled_from(
    [
        "1e5",
        "yes",
        "null",
        "~",
        "1:30",
        "=",
        "<<",
        "2026-01-01",
        "0x1f",
        "# a",
        "a: b",
        "'",
        '"',
        " a ",
        "- a",
        "é\u2028",
    ]
)
share = st.floats(0, 1, allow_nan=False)
switch = st.sampled_from(["auto", "on", "off"])
money = st.sampled_from(["5", "30 CNY", "¥2.50", "2.19 CNY", "1000000 CNY", 7, 0.125])


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


sources = st.lists(
    st.builds(
        lambda path, rest: {"path": path, **rest},
        text,
        some(weight=st.floats(0.1, 9), take=st.integers(1, 10**9), size=st.sampled_from(["4MB", "1GiB", 12345])),
    ),
    max_size=3,
)
methods = st.builds(lambda kind, rest: {"kind": kind, **rest}, st.sampled_from(["lora", "qlora"]), some(
    rank=st.integers(1, 4096), alpha=st.just("auto") | st.floats(0.1, 999), dropout=st.floats(0, 0.9),
    targets=st.lists(text, min_size=1, max_size=3), rslora=st.booleans(), dora=st.booleans(),
))  # fmt: skip
lengths = st.sampled_from([{}, {"epochs": 0.5}, {"steps": 7}, {"tokens": "2M"}, {"tokens": 12345}, {"epochs": 3}])
scratch = st.builds(
    lambda width, layers, more: {"model": {"d_model": 64 * width, "num_layers": layers, **more}},
    st.integers(1, 16),
    st.integers(1, 99),
    some(rope_theta=st.floats(1, 1e9), tie_embeddings=st.booleans()),
)
adapted = st.builds(lambda name, method: {"model": {"base": name}, "method": method}, text, methods)
configs = st.builds(
    lambda base, length, train, **rest: {**base, **rest, "train": {**length, **train}},
    base=scratch | adapted,
    length=lengths,
    train=some(
        **dict.fromkeys(("min_lr", "weight_decay", "clip"), share),
        global_batch=st.integers(1, 10**6),
        lr=st.floats(1e-9, 1, allow_nan=False),
        warmup=share | st.integers(2, 10**6),
        seed=st.integers(0, 2**63 - 1),
        compile=switch,
        precision=st.sampled_from(["auto", "bf16", "fp16", "fp32"]),
        attention=st.sampled_from(["auto", "sdpa", "flash_attention_2"]),
    ),
    data=some(
        **dict.fromkeys(("sources", "eval_sources"), sources),
        take=st.integers(1, 10**12),
        tokenizer=text,
        max_length=st.integers(8, 10**7),
        vocab_size=st.integers(256, 10**6),
    ),
    parallel=some(gpus=st.sampled_from(["auto", "all", [0], [3, 1], "0,1"]), engine=st.sampled_from(["ddp", "fsdp"])),
    save=some(
        **dict.fromkeys(("folder", "resume"), text),
        every=st.floats(0, 1e9, allow_nan=False),
        every_steps=st.integers(1, 999) | st.just("epoch"),
        min_free=st.integers(0, 10**15),
    ),
    limits=st.sampled_from([{}, {"time": "11h30m"}, {"time": 0.5}])
    | st.builds(lambda budget, price: {"budget": budget, "price_per_hour": price}, money, money),
    log=some(every_steps=st.integers(1, 10**9), tensorboard=switch),
)


@settings(QUICK, max_examples=10 * MORE)
@given(configs)
def test_any_valid_config_reads_back_as_written(values: dict[str, Any]) -> None:
    config = RunConfig.model_validate(values)
    path = Path("run.yaml")
    path.write_text(to_yaml(config), encoding="utf-8")
    assert read_config(path) == config
    assert yaml.safe_load(to_yaml(config)).keys() == dump(config).keys()


# --- any input at all ---


def valid_or_told(words: list[str]) -> None:
    try:
        config = load_run(words).config
    except UserError as error:
        assert str(error) and len(str(error).splitlines()) == 1 and str(error).isprintable(), repr(str(error))
        assert len(str(error)) < 1500
        return
    assert isinstance(config, RunConfig)


keys = st.sampled_from([part for key in all_keys() for part in key] + ["extends", "path", "take", "size", "weight"])
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "small", "lora", "0,1", "30 CNY", "20k", "4MB", "11h", "fp16", 10**400, 64, 8, 1, 0])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | st.text(max_size=5), inner, max_size=5),
    max_leaves=12,
)
section_names = st.sampled_from(list(RunConfig.model_fields))
structures = st.dictionaries(section_names | keys, values | st.dictionaries(keys, scalars, max_size=4), max_size=5)


@settings(QUICK, max_examples=25 * MORE)
@given(structures)
def test_any_structure_is_a_config_or_one_line(structure: dict[str, Any]) -> None:
    Path("run.yaml").write_text(yaml.safe_dump(structure, allow_unicode=True), encoding="utf-8")
    valid_or_told(["run.yaml"])


yamlish = st.text(
    st.sampled_from("abtrain model:lr0123456789.eE-+\n\t  []{},&*!|>%@`'\"#?~：é\0\x85\u2028🚀"), max_size=80
)


@settings(QUICK, max_examples=50 * MORE)
@given(st.binary(max_size=60) | (st.text(max_size=60) | yamlish).map(str.encode))
def test_any_bytes_in_a_file_are_a_config_or_one_line(content: bytes) -> None:
    Path("run.yaml").write_bytes(content)
    valid_or_told(["run.yaml"])


word = (
    st.sampled_from(
        [f"--{flag}" for flag in ALL_FLAGS] + [*ORDER, "-", "--", "=", "run.yaml", "true", "false", "0,1", "~x", "."]
    )
    | st.text(st.characters(), max_size=12)
    | st.builds("--{}={}".format, st.sampled_from(ALL_FLAGS), st.text(st.characters(), max_size=8))
    | scalars.map(str)
)


@settings(QUICK, max_examples=50 * MORE)
@given(st.lists(word, max_size=6))
def test_any_command_line_is_a_config_or_one_line(words: list[str]) -> None:
    valid_or_told(words)
    valid_or_told(["small", *words])


@settings(QUICK, max_examples=50 * MORE)
@given(
    st.lists(
        st.builds(
            "{}={}".format,
            st.sampled_from([".".join(key) for key in all_keys()]) | st.text(st.characters(), max_size=10),
            scalars | yamlish | st.text(st.characters(), max_size=10) | values.map(json.dumps),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["small", "qlora-7b"]),
)
def test_any_override_is_a_config_or_one_line(overrides: list[str], run: str) -> None:
    valid_or_told([run, *overrides])


# --- the schema holds what it promises ---


def sections(section: type[Section]) -> list[type[Section]]:
    inner = [field.annotation for field in section.model_fields.values()]
    found = [kind for kind in inner if isinstance(kind, type) and issubclass(kind, Section)]
    return [section, *(deeper for kind in found for deeper in sections(kind))]


def test_a_config_cannot_be_changed_and_knows_no_other_keys() -> None:
    config = load_run(["small"]).config
    with pytest.raises(ValidationError):
        config.train.lr = 1.0  # type: ignore[misc]
    for section in sections(RunConfig):
        assert section.model_config["extra"] == "forbid" and section.model_config["frozen"]


@pytest.mark.parametrize("key", [key for key in all_keys() if len(key) > 1])
def test_a_typo_in_any_key_is_suggested(key: tuple[str, ...]) -> None:
    typo = key[-1] + "x" if len(key[-1]) > 2 else key[-1] * 2
    section = ".".join(key[:-1])
    with pytest.raises(UserError, match=rf"{section}\.{typo}: no such key; did you mean {section}\.{key[-1]}\?"):
        load_run(["small", f"{section}.{typo}=1"])


@pytest.mark.parametrize("section", [name for name in RunConfig.model_fields if name != "name"])
def test_a_typo_in_any_section_is_suggested(section: str) -> None:
    with pytest.raises(UserError, match=rf"no such key; did you mean {section}\?"):
        load(f"extends: small\n{section[:-1]}: {{}}\n")


@pytest.mark.parametrize("name", [name for name in VALUE_FLAGS if VALUE_FLAGS[name].split(".")[-1] != name])
def test_another_trainers_name_as_a_key_is_suggested(name: str) -> None:
    if name in RunConfig.model_fields:
        return
    with pytest.raises(UserError, match=r"no such key; did you mean [a-z]"):
        load(f"extends: small\n{name}: 1\n")


# --- the door ---


def test_check_says_what_the_run_comes_to() -> None:
    code, out, err = sojourn("config", "check", "small", "train.steps=5")
    assert (code, err) == (0, "")
    assert out == "ok: small is a valid run (a new 256×2 model, 5 steps, global batch 16, rows of 512 tokens)\n"


def test_check_shows_a_whole_config_that_can_be_used_again() -> None:
    code, out, _ = sojourn("config", "check", "lora-r64", "--show")
    assert code == 0
    assert load(out.rsplit("ok: ", 1)[0]) == load_run(["lora-r64"]).config


def test_check_as_json() -> None:
    code, out, _ = sojourn("config", "check", "--json", "--fp16")
    found = json.loads(out)
    assert code == 0 and found["ok"] and found["notes"] == ["no run named; starting 256x2 from the preset small"]
    assert found["config"]["train"]["precision"] == "fp16"


# --- nothing heavy is imported for it ---


def test_presets_travel_with_the_package() -> None:
    assert FOLDER.is_dir() and FOLDER.parent == Path(sys.modules["sojourn.config.load"].__file__ or "").parent
