"""The presets: each loads, has the shape the guides give it, and can be listed, shown and copied."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sojourn.config.load import load_run, read_config
from sojourn.config.preset import ALIASES, FOLDER, ORDER, find_preset, presets
from sojourn.config.schema import RunConfig
from test_config_errors import sojourn


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(name: str) -> RunConfig:
    return load_run([name]).config


def test_every_file_is_a_preset_and_every_preset_a_file() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_preset_is_valid_and_named_after_its_file(name: str) -> None:
    config = load(name)
    assert config.name == name
    assert read_config(FOLDER / f"{name}.yaml") == config.model_copy(update={"name": None})


@pytest.mark.parametrize("name", ORDER)
def test_a_preset_says_what_it_is_in_its_first_line(name: str) -> None:
    first = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ") and len(first) < 110


@pytest.mark.parametrize("name", [name for name in ORDER if name not in ("demo", "smoke")])
def test_a_preset_helps_a_newcomer_with_a_few_words(name: str) -> None:
    assert (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").count("# ") >= 2


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_its_preset_in_every_spelling(alias: str) -> None:
    for word in (alias, alias.upper(), alias.replace("-", "_")):
        assert load(word) == load(ALIASES[alias])


@pytest.mark.parametrize(
    "name", ["configs/small", "../small", "small.yaml", "", ".", "small\0", "x" * 9999, "demo/../small"]
)
def test_what_is_no_name_is_no_preset(name: str) -> None:
    assert find_preset(name) is None


@pytest.mark.parametrize(
    ("name", "d_model", "layers", "heads"),
    [
        ("small", 256, 2, 4),
        ("tiny", 256, 2, 4),
        ("medium", 512, 6, 8),
        ("large", 768, 6, 12),
        ("xl", 1024, 12, 16),
        ("xxl", 2048, 24, 16),
        ("smoke", 128, 1, 2),
    ],
)
def test_from_scratch_presets_have_the_guides_shapes(name: str, d_model: int, layers: int, heads: int) -> None:
    config = load(name)
    assert config.method.kind == "pretrain" and config.model.base is None
    assert (config.model.d_model, config.model.num_layers, config.model.num_heads) == (d_model, layers, heads)
    assert config.data.sources


@pytest.mark.parametrize(("name", "batch", "epochs"), [("medium", 16, 10), ("large", 8, 20), ("small", 16, 1)])
def test_from_scratch_presets_have_the_guides_batch_and_length(name: str, batch: int, epochs: int) -> None:
    train = load(name).train
    assert (train.global_batch, train.epochs) == (batch, epochs)


@pytest.mark.parametrize(
    ("name", "rank"), [("lora-r64", 64), ("paper_r64", 64), ("lora-r320", 320), ("pretrained_r320", 320)]
)
def test_the_papers_presets(name: str, rank: int) -> None:
    config = load(name)
    assert (config.method.kind, config.method.rank, config.train.epochs) == ("lora", rank, 3)
    assert config.train.global_batch == 64 and config.train.micro_batch == 8
    assert config.train.activation_checkpointing == "auto" and config.save.every_steps == "epoch"


@pytest.mark.parametrize(("name", "take"), [("lora-20k", 20_000), ("lora-50k", 50_000), ("lora-100k", 100_000)])
def test_the_data_size_presets(name: str, take: int) -> None:
    config = load(name)
    assert config.method.kind == "lora" and config.data.take == take


@pytest.mark.parametrize("size", ["7b", "14b"])
def test_the_qlora_presets(size: str) -> None:
    config = load(f"qlora-{size}")
    method, train = config.method, config.train
    assert (method.kind, method.bits, method.rank, method.alpha, method.dropout) == ("qlora", 4, 16, 32, 0.05)
    assert method.targets == ["q_proj", "v_proj"]
    assert (train.micro_batch, train.global_batch, config.data.max_length) == (1, 16, 2048)
    assert config.model.base == f"Qwen/Qwen2.5-{size.upper()}"


def test_the_full_preset() -> None:
    config = load("full-7b")
    assert config.method.kind == "full" and config.model.base == "Qwen/Qwen2.5-7B"


def test_list_names_every_preset_and_alias() -> None:
    code, out, err = sojourn("presets", "list")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[: len(ORDER)]] == list(ORDER)
    assert all(alias in out for alias in ALIASES) and "sojourn presets show NAME" in lines[-1]


def test_list_as_json() -> None:
    code, out, _ = sojourn("presets", "list", "--json")
    listed: list[dict[str, Any]] = json.loads(out)
    assert code == 0 and [item["name"] for item in listed] == [item.name for item in presets()]


@pytest.mark.parametrize("name", [*ORDER, "tiny", "lora_20k"])
def test_show_prints_the_file(name: str) -> None:
    path = find_preset(name)
    assert path is not None
    assert sojourn("presets", "show", name) == (0, path.read_text(encoding="utf-8"), "")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("smal", "small"),
        ("medum", "medium"),
        ("lora20k", "lora-20k"),
        ("qlora_7", "qlora-7b"),
        ("papr_r64", "paper-r64"),
    ],
)
def test_an_unknown_preset_is_suggested(word: str, meant: str) -> None:
    for verb in (["presets", "show"], ["presets", "copy"], ["config", "check"]):
        code, out, err = sojourn(*verb, word)
        assert (code, out) == (2, "") and f"; did you mean {meant}? (see: sojourn presets list)" in err
        assert len(err.splitlines()) == 1


def test_a_word_like_no_preset_gets_no_suggestion() -> None:
    assert sojourn("presets", "show", "zzz\nzzz") == (
        2,
        "",
        "sojourn: no preset called “zzz zzz” (see: sojourn presets list)\n",
    )


@pytest.mark.parametrize("name", ORDER)
def test_a_copy_checks_out_and_is_the_same_run(name: str) -> None:
    code, out, err = sojourn("presets", "copy", name)
    assert (code, err) == (0, "") and f"sojourn config check {name}.yaml" in out
    assert sojourn("config", "check", f"{name}.yaml")[0] == 0
    assert load(f"./{name}.yaml") == load(name)


def test_copy_never_overwrites() -> None:
    Path("mine.yaml").write_text("precious")
    code, out, err = sojourn("presets", "copy", "small", "mine.yaml")
    assert (code, out) == (2, "") and Path("mine.yaml").read_text() == "precious"
    assert err == "sojourn: mine.yaml already exists; choose another name: sojourn presets copy small FILE\n"


def test_copy_into_a_folder_and_to_a_place_that_does_not_exist() -> None:
    Path("runs").mkdir()
    assert sojourn("presets", "copy", "tiny", "runs")[0] == 0 and Path("runs/small.yaml").is_file()
    code, _, err = sojourn("presets", "copy", "small", "none/mine.yaml")
    assert code == 2 and err == "sojourn: none/mine.yaml cannot be written: No such file or directory\n"


_GPUS = r"RTX \d+|A100 \d+ ?GB|H\d00\b|T4"


@pytest.mark.parametrize("name", [name for name in ORDER if not name.startswith(("demo", "smoke"))])
def test_a_presets_words_agree_with_its_plan(name: str) -> None:
    """It fits on each GPU that its summary names, and takes as long as it says there, within a fifth."""
    (summary,) = [preset.summary for preset in presets() if preset.name == name]
    gpus = [gpu.replace(" GB", "GB") for gpu in re.findall(_GPUS, summary)]
    times = re.findall(r"(\d+) (minute|hour)s?", summary)
    assert not re.search(r"evening|night|\bday", summary) and (gpus or not times)
    for gpu in gpus:
        code, out, err = sojourn("plan", name, "--gpu", gpu, "--json")
        assert code == 0, err
        offers = [offer for offer in json.loads(out)["offers"] if offer["count"] == 1]
        assert offers and all(offer["fits"] for offer in offers), (summary, gpu)
        for number, unit in times:
            said = int(number) * {"minute": 1 / 60, "hour": 1}[unit]
            assert said == pytest.approx(min(offer["hours"] for offer in offers), rel=0.2), summary
