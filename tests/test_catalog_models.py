"""Shapes of models: their parameters are those of the publishers' files and of transformers' own classes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import called
from sojourn.catalog.models import ModelSpec, RefusedModel, find_model, models
from sojourn.errors import UserError

MONTH = re.compile(r"20\d\d-(0[1-9]|1[0-2])$")
PUBLISHED = {  # as the publishers' weights have them
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "glm-4-9b-0414": 9_400_279_040,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "smollm2-135m": 134_515_008,
    "smollm3-3b": 3_075_098_624,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3-small-8k": 7_392_272_384,
    "phi-3.5-moe": 41_873_153_344,
    "phi-4": 14_659_507_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_404_352,
    "tinyllama-1.1b": 1_100_048_384,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "yi-1.5-6b": 6_061_035_520,
}
TEXT_PARTS = {  # of transformers' own classes, made from config.json without weights; and billions for one token
    "qwen3.5-0.8b": (752_393_024, 0.75), "qwen3.5-4b": (4_205_751_296, 4.21), "qwen3.5-9b": (8_953_803_264, 8.95),
    "qwen3.5-27b": (26_895_998_464, 26.9), "qwen3.5-35b-a3b": (34_660_610_688, 2.95),
    "llama-4-scout": (107_769_861_120, 16.14), "llama-4-maverick": (400_711_848_960, 16.15),
    "gemma-4-e2b": (4_628_569_344, 4.63), "gemma-4-e4b": (7_463_013_376, 7.46),
    "gemma-4-26b-a4b": (25_233_141_760, 3.82), "gemma-4-31b": (30_697_345_280, 30.7),
    "glm-4.5": (352_797_814_784, 32.86), "glm-4.5-air": (106_852_245_504, 12.8), "glm-4.6": (352_797_814_784, 32.86),
    "deepseek-v3": (671_026_404_352, 36.63), "gpt-oss-20b": (20_914_757_184, 3.61),
    "gpt-oss-120b": (116_829_156_672, 5.13),
}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "catalog.toml"


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters_are_those_of_the_published_weights(name, parameters):
    assert find_model(name).parameters == parameters


@pytest.mark.parametrize(("name", "counts"), TEXT_PARTS.items())
def test_parameters_of_sparse_and_hybrid_models_are_those_of_transformers_classes(name, counts):
    shape = find_model(name)
    assert shape.parameters == counts[0] and shape.active_parameters == pytest.approx(1e9 * counts[1], rel=0.005)
    assert (
        shape.layers * shape.layer_parameters()
        <= shape.parameters
        < 1.7 * shape.layers * shape.layer_parameters() + 3e9
    )


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-VL-7B-Instruct", "qwen2-vl-2b", "llava-1.5-7b", "meta-llama/Llama-3.2-11B-Vision"]
)
def test_a_model_that_sees_is_refused_in_one_line(name):
    with pytest.raises(RefusedModel, match="sees images"):
        find_model(name)
    said = called("plan", name)
    assert said.returncode == 2 and "sees images" in said.stderr and len(said.stderr.splitlines()) == 1


def test_with_its_vision_tower_gemma_3_has_what_is_published():
    tower = 416_866_032  # SigLIP so400m at 896 pixels, as its own weights have it
    for name, published in {"4b": 4_300_079_472, "12b": 12_187_325_040, "27b": 27_432_406_640}.items():
        shape = find_model(f"gemma-3-{name}")
        assert shape.parameters + tower + 1152 * shape.hidden + 1152 == published, name


@pytest.mark.parametrize("row", models(), ids=lambda row: row.name)
def test_every_model_has_a_source_a_date_and_a_shape_that_can_be(row):
    assert row.source and MONTH.match(row.date)
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", row.hub)
    assert row.published in (None, row.parameters)
    assert 12 <= row.layers <= 126 and 512 <= row.hidden <= 16_384
    assert row.heads % row.kv_heads == 0 and row.head_dim in (64, 96, 128, 192, 256)
    assert 0.4 <= row.heads * row.head_dim / row.hidden <= 3.5
    assert (0.2 if row.experts else 1.2) <= row.ffn / row.hidden <= 8.1
    assert 32_000 <= row.vocab <= 262_208 and row.positions >= 1024
    assert row.sliding_window is None or row.sliding_window < row.positions
    assert row.active_parameters < row.parameters if row.experts else row.active_parameters == row.parameters


def test_no_name_means_two_models():
    names: dict[str, str] = {}
    for row in models():
        for spelled in (row.name, row.hub, *row.also):
            assert find_model(spelled).name == row.name
            assert names.setdefault(spelled.casefold(), row.name) == row.name


def test_the_families_people_train_are_all_there():
    said = "qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b qwen2.5-14b qwen2.5-32b qwen2.5-72b qwen3-0.6b qwen3-1.7b"
    said += " qwen3-4b qwen3-8b qwen3-14b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b llama-2-7b llama-2-13b llama-2-70b"
    said += " llama-3-8b llama-3-70b llama-3.1-8b llama-3.1-70b llama-3.1-405b llama-3.2-1b llama-3.2-3b llama-3.3-70b"
    said += " glm-4-9b glm-4-9b-0414 mistral-7b-v0.1 mistral-7b-v0.3 mistral-nemo mistral-small mixtral-8x7b gemma-2b"
    said += " gemma-7b gemma-2-2b gemma-2-9b gemma-2-27b gemma-3-270m gemma-3-1b gemma-3-4b gemma-3-12b gemma-3-27b"
    said += " smollm-135m smollm-360m smollm-1.7b smollm2-135m smollm2-360m smollm2-1.7b smollm3-3b phi-3-mini"
    said += " phi-3-small phi-3-medium phi-3.5-mini phi-3.5-moe phi-4 phi-4-mini qwen3.5-0.8b qwen3.5-4b qwen3.5-9b"
    said += " qwen3.5-27b qwen3.5-35b-a3b llama-4-scout llama-4-maverick gemma-4-e2b gemma-4-e4b gemma-4-26b-a4b"
    said += " gemma-4-31b gpt-oss-20b gpt-oss-120b glm-4.5 glm-4.5-air glm-4.6 deepseek-v3 internlm2-7b internlm3-8b"
    said += " yi-1.5-6b yi-1.5-9b yi-1.5-34b tinyllama gpt2 gpt2-xl"
    assert len({find_model(name).name for name in said.split()}) == len(said.split())


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("qwen2.5-7b", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen2.5 7B", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("/root/models/Qwen2.5-7B-Instruct/", "qwen2.5-7b"),
        ("unsloth/Qwen2.5-7B-Instruct-bnb-4bit", "qwen2.5-7b"),
        ("Qwen/Qwen3-4B-Base", "qwen3-4b"),
        ("Qwen/Qwen3-4B-Thinking-2507", "qwen3-4b-2507"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("llama3.1:8b", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("THUDM/glm-4-9b-chat-hf", "glm-4-9b"),
        ("THUDM/GLM-4-9B-0414", "glm-4-9b-0414"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("gemma-2b", "gemma-2b"),
        ("google/gemma-3-1b-it", "gemma-3-1b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini-4k"),
        ("microsoft/Phi-4-mini-instruct", "phi-4-mini"),
    ],
)
def test_a_model_is_found_however_people_spell_it(spelled, name):
    assert find_model(spelled).name == name


@pytest.mark.parametrize("name", ["qwen2.5-8b", "Qwen/Qwen2.5-7B-Instruct-1M", "meta-llama/Llama-3.2-11B", ""])
def test_an_unknown_model_is_an_error_that_guesses_and_never_another_model(name):
    with pytest.raises(UserError, match=r"no model called .* in the catalogue; .*Your own go into") as error:
        find_model(name)
    assert "\n" not in str(error.value)
    if name == "qwen2.5-8b":
        assert "did you mean qwen2.5-" in str(error.value)


def test_what_a_token_of_a_mixture_is_computed_with():
    """Without the input embedding, which is a lookup."""
    assert find_model("mixtral").active_parameters == 12_879_925_248 - 32_000 * 4096
    assert find_model("qwen3-30b-a3b").active_parameters == pytest.approx(3.04e9, rel=0.01)
    assert find_model("qwen3-235b-a22b").active_parameters == pytest.approx(21.6e9, rel=0.01)
    assert find_model("phi-3.5-moe").active_parameters == pytest.approx(6.5e9, rel=0.01)


def test_layers_that_look_back_to_the_start():
    assert find_model("llama-3.1-8b").full_layers == 32 and find_model("mistral-7b-v0.1").full_layers == 0
    assert find_model("gemma-2-9b").full_layers == 21 and find_model("gemma-3-1b").full_layers == 4


CLASSES = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mistral": "Mistral",
    "mixtral": "Mixtral", "gemma": "Gemma", "gemma2": "Gemma2", "gemma3_text": "Gemma3Text", "glm": "Glm",
    "glm4": "Glm4", "glm4_moe": "Glm4Moe", "smollm3": "SmolLM3", "phi3": "Phi3", "phimoe": "Phimoe",
}  # fmt: skip


def _config(shape: ModelSpec):
    """transformers' configuration of a shape, by hand."""
    transformers = pytest.importorskip("transformers")
    extra = {}
    if shape.family in ("glm", "glm4", "phimoe", "glm4_moe"):
        extra["attention_bias"] = shape.qkv_bias
    if shape.experts:
        extra |= {"num_experts_per_tok": shape.active_experts, "moe_intermediate_size": shape.expert_ffn}
        extra |= {"num_experts": shape.experts, "num_local_experts": shape.experts, "n_routed_experts": shape.experts}
        extra |= {
            "lm_head_bias": shape.head_bias,
            "first_k_dense_replace": shape.dense_layers or 0,
            "use_qk_norm": shape.qk_norm,
        }
    return getattr(transformers, f"{CLASSES[shape.family]}Config")(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.positions,
        pad_token_id=0,
        **extra,
    )


def _counted(shape: ModelSpec) -> int:
    torch = pytest.importorskip("torch")
    config = _config(shape)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    assert config.model_type == shape.family
    return sum(weight.numel() for weight in network.parameters())


# Models that two layers stand for: all are alike
ALIKE = [one for one in models() if one.family in CLASSES and not (one.attention_total or one.other)]


def test_the_other_models_are_compared_with_what_was_counted():
    """But for families whose classes transformers lacks, and GPT-2, which test_plan_models.py counts."""
    others = [one for one in models() if one not in ALIKE and one.name not in TEXT_PARTS | PUBLISHED]
    assert {one.family for one in others} == {"internlm2", "internlm3", "phi3small", "gpt2"}


@pytest.mark.parametrize("shape", ALIKE, ids=lambda row: row.name)
def test_parameters_are_those_of_transformers_own_model(shape):
    """With two layers; a whole model is below."""
    cut = replace(shape, layers=2, dense_layers=1 if shape.dense_layers else None)
    assert _counted(cut) == cut.parameters


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama-3.2-1b", "gemma-3-270m", "smollm2-135m", "phi-4-mini"])
def test_a_whole_model_of_transformers_has_as_many(name):
    assert _counted(find_model(name)) == PUBLISHED.get(name, find_model(name).published)


def test_experts_that_every_token_visits_are_counted_as_transformers_does():
    shape = replace(
        find_model("qwen3-30b-a3b"),
        family="glm4_moe",
        layers=2,
        experts=4,
        active_experts=2,
        shared_ffn=768,
        qkv_bias=True,
    )
    assert _counted(shape) == shape.parameters


OWN = """
[models."My 7B"]
hidden = 4096
layers = 32
heads = 32
ffn = 11008
vocab = 32000
positions = 4096
"""


def test_a_user_adds_a_model_with_the_least_of_keys(own):
    own.write_text(OWN)
    mine = find_model("my-7b", own)
    assert mine.parameters == find_model("llama-2-7b").parameters
    assert (mine.kv_heads, mine.head_dim, mine.family, mine.source) == (32, 128, "llama", str(own))


def test_a_user_changes_a_model_of_ours(own):
    own.write_text('[model."Qwen2.5-7B"]\nvocab = 152_192\n')
    grown = find_model("Qwen/Qwen2.5-7B-Instruct", own)
    assert grown.parameters == 7_615_616_512 + 2 * 128 * 3584
    assert len(models(own)) == len(models())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (OWN.replace("layers = 32\n", ""), "`layers` is missing; every model needs it"),
        (OWN.replace("heads = 32", 'heads = "32"'), "`heads` is '32': it must be a whole number above 0"),
        (OWN.replace("heads = 32", "heads = 0"), "`heads` is 0: it must be a whole number above 0"),
        (OWN + "kv_heads = 5\n", r"`kv_heads` is 5: it must divide heads \(32\)"),
        (OWN + "experts = 8\n", "`active_experts` is missing; a model with experts needs it"),
        (OWN + "experts = 2\nactive_experts = 4\nexpert_ffn = 64\n", "`active_experts` is 4: there are only 2"),
        (OWN + "full_every = 2\n", "`full_every` goes with `sliding_window`"),
        (OWN + "published = 7\n", "`published` is 7, but the shape gives 6,738,415,616"),
        (OWN + "hiden = 7\n", "unknown key `hiden`; did you mean hidden"),
    ],
)
def test_a_mistake_in_a_users_model_names_the_file_the_row_and_the_key(own, text, says):
    own.write_text(text)
    with pytest.raises(UserError, match=says) as error:
        models(own)
    assert str(error.value).startswith(f'{own}: model."My 7B": ') and "\n" not in str(error.value)
