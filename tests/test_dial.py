"""One dial sizes a new model: `--params 100M` or `--depth 12` instead of width, layers, heads and feed-forward."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from conftest import called
from sojourn.config.load import load_run, read_config, summary
from sojourn.config.schema import ModelConfig
from sojourn.errors import UserError
from sojourn.model.scratch import build_model
from sojourn.resolve.new_model import new_model_spec
from sojourn.run.home import run_folder
from sojourn.train.loop import train
from sojourn.train.resolve import resolve_here


@pytest.mark.parametrize("vocabulary", [4_000, 8_192, 32_000, 64_000, 150_000])
def test_a_model_has_about_the_parameters_asked_for(vocabulary: int) -> None:
    for tenth in range(34):
        wanted = int(5e6 * 10 ** (tenth / 10))
        if wanted <= vocabulary * 64 or wanted > 10e9:
            continue
        shape = new_model_spec(ModelConfig.model_validate({"params": wanted}), vocabulary)
        assert abs(shape.parameters / wanted - 1) <= 0.05, (wanted, shape)
        assert shape.hidden % shape.heads == 0 and shape.head_dim in (64, 128)


@pytest.mark.parametrize("wanted", ["10M", "100M", "350M", "1B", "7B", "10B"])
def test_where_embeddings_leave_room_the_proportions_are_the_usual_ones(wanted: str) -> None:
    shape = new_model_spec(ModelConfig.model_validate({"params": wanted}), 8192)
    assert abs(math.log2(shape.hidden / shape.layers / 64)) < 1


@pytest.mark.parametrize(
    ("depth", "width", "heads"),
    [(1, 64, 1), (4, 256, 4), (12, 768, 12), (31, 1984, 31), (32, 2048, 16), (33, 2176, 17)],
)
def test_a_depth_sets_the_width_in_whole_heads(depth: int, width: int, heads: int) -> None:
    shape = new_model_spec(ModelConfig(depth=depth), 32_000)
    assert (shape.layers, shape.hidden, shape.heads) == (depth, width, heads)


@pytest.mark.parametrize(
    "setting", [{"depth": 2}, {"depth": 3}, {"params": "2M"}, {"params": "5M", "tie_embeddings": False}]
)
def test_the_planned_number_is_that_of_the_real_model(setting: dict[str, object]) -> None:
    model = ModelConfig.model_validate(setting)
    built = build_model(model, 500, 64, 0, [0], seed=0)
    assert new_model_spec(model, 500).parameters == sum(p.numel() for p in built.parameters())


def test_a_vocabulary_too_large_for_the_model_asked_for_is_named() -> None:
    with pytest.raises(UserError, match=r"model.params: 5M given, .* data.vocab_size 150000 has .* smaller data.vocab"):
        new_model_spec(ModelConfig.model_validate({"params": "5M"}), 150_000)


@pytest.mark.parametrize("dial", ["--depth 12", "--params 20M", "model.depth=12"])
def test_a_dial_takes_the_place_of_a_presets_sizes(dial: str) -> None:
    for preset in ("small", "medium", "demo"):
        model = load_run([preset, *dial.split()]).config.model
        assert (model.d_model, model.num_layers, model.num_heads, model.ffn_size) == (None, None, "auto", "auto")


def test_the_nearer_way_to_say_a_size_holds(home: Path) -> None:
    (home / "deep.yaml").write_text("extends: small\nmodel: {depth: 12}\n")
    (home / "wide.yaml").write_text("extends: deep.yaml\nmodel: {d_model: 512, num_layers: 6, num_heads: 4}\n")
    typed = load_run(["deep.yaml", "--d_model", "128", "--num_layers", "3"]).config.model
    assert (typed.depth, typed.d_model, typed.num_layers) == (None, 128, 3)
    assert load_run(["wide.yaml"]).config.model.depth is None
    assert load_run(["wide.yaml", "--params", "9M"]).config.model.d_model is None
    assert load_run(["deep.yaml", "--params", "9M"]).config.model.depth is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("small --depth 4 --params 9M", "--depth: model.depth: model.params already sets the size; remove one"),
        ("small --depth 4 --d_model 128", "--d_model: model.d_model: model.depth already sets the size; remove"),
        ("small --params 9M --num_heads 4", "--num_heads: model.num_heads: model.params already sets the size"),
        ("small --params 9M model.ffn_size=256", "model.ffn_size: model.params already sets the size; remove one"),
        ("lora-20k --depth 4", "--depth: model.depth: sizes a new model, but model.base names an existing one"),
        ("small --params many", "--params: model.params: “many” given; allowed: a count such as 5000, 20k, 2M"),
        ("small --depth 0", "--depth: model.depth: 0 given; allowed: a whole number from 1 up to 512"),
        ("small --params", "--params: needs a value, such as --params 100M"),
        ("small model.d_model=null", "model.d_model: not set, but a new model needs it; set it, or model.depth"),
    ],
)
def test_sizes_that_contradict_a_dial_are_reported_in_one_line(words: str, message: str) -> None:
    with pytest.raises(UserError) as told:
        load_run(words.split())
    assert message in str(told.value)


def test_a_summary_names_the_dial() -> None:
    assert summary(load_run(["small", "--depth", "4"]).config).startswith("a new model of depth 4, ")
    assert summary(load_run(["small", "--params", "20M"]).config).startswith("a new model of 20M parameters, ")


def test_the_plan_shows_what_a_dial_comes_to() -> None:
    said = called("plan", "small", "--params", "20M", "--json")
    plan = json.loads(said.stdout)
    assert 19e6 < plan["parameters"] < 21e6 and plan["model"]["hidden"] >= 256
    assert "small: 256×4, " in called("plan", "small", "--depth", "4").stdout


def test_the_rate_follows_the_width_that_the_dial_comes_to() -> None:
    dialled = resolve_here(load_run(["small", "--depth", "6", "train.device=cpu"]).config)
    sized = resolve_here(load_run(["small", "--d_model", "384", "--num_layers", "6", "train.device=cpu"]).config)
    assert dialled.config == sized.config
    assert dialled.reasons["model.num_layers"] == "6: what model.depth 6 comes to"


@pytest.mark.parametrize("dial", ["--depth 1", "--params 150k"])
def test_a_run_sized_by_a_dial_is_kept_in_full_and_continued_by_the_same_command(
    words: list[str], dial: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in words if "d_model" not in word] + dial.split()
    config = load_run(words).config
    run = run_folder("t")
    train(config, run)
    kept = read_config(run.config).model
    assert (kept.params, kept.depth) == (None, None) and kept.d_model == 64 and isinstance(kept.num_layers, int)
    train(config, run)
    assert "already done" in capsys.readouterr().out
    train(load_run([str(run.config)]).config, run)
    with pytest.raises(UserError, match=r"model\.d_model was 64, now 128"):
        train(load_run([*words[:-2], "--depth", "2"]).config, run)
