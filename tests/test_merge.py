"""Merged weights give the logits of the adapter in plain peft; several adapters combine as the papers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from sojourn.errors import UserError
from sojourn.export.combine import Combine, dare_mask, parse_combine, ties, trim_threshold
from sojourn.export.merge import MergedWeights
from sojourn.infer.adapter_weights import open_adapter
from sojourn.infer.streamed import streamed_logits
from sojourn.infer.weight_source import FolderWeights
from sojourn.storage.files import read_json_object, write_json

IDS = [[5, 17, 3, 99, 42, 42, 8], [1, 2, 3]]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SIZES = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def make_model(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **changed: Any) -> Path:
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**SIZES, **changed})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():  # norms of 1 and biases of 0 would hide what is swapped or left out
            weight.add_(torch.randn_like(weight), alpha=0.1)
    model.to(dtype).save_pretrained(folder)
    return folder


def add_adapter(base: Path, folder: Path, seed: int = 2, **settings: Any) -> list[torch.Tensor]:
    """Writes an adapter with random weights; returns the logits of base and adapter, unmerged, in plain peft."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    given = {"r": 4, "lora_alpha": 16, "target_modules": ATTENTION, "task_type": "CAUSAL_LM", **settings}
    model = get_peft_model(model, LoraConfig(**given)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.05)
        logits = [model(torch.tensor([ids])).logits[0] for ids in IDS]
    model.save_pretrained(str(folder))
    return logits


def merged(base: Path, *adapters: Path, weights: tuple[float, ...] = (), combine: Combine | None = None) -> Any:
    opened = [open_adapter(folder, *weights[i : i + 1]) for i, folder in enumerate(adapters)]
    return MergedWeights(FolderWeights(base), opened, combine)


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, as a share of the largest logit."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({}, {}),
    "rslora": ({}, {"use_rslora": True}),
    "dora": ({}, {"use_dora": True}),
    "patterns": ({}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\.self_attn\.v_proj": 3}}),
    "all layers": ({}, {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"], "use_rslora": True}),
    "saved head": ({}, {"modules_to_save": ["lm_head"]}),
    "saved embedding and norm": ({}, {"modules_to_save": ["embed_tokens", "norm"], "use_dora": True}),
    "saved embedding, tied": ({"tie_word_embeddings": True}, {"modules_to_save": ["embed_tokens"]}),
    "saved head, tied": ({"tie_word_embeddings": True}, {"modules_to_save": ["lm_head"]}),
    "lora on a tied embedding": ({"tie_word_embeddings": True}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "dora on an embedding": ({}, {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
    "kept tied": (
        {"tie_word_embeddings": True},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "biases": ({"family": "qwen2"}, {"bias": "all", "target_modules": ["q_proj", "v_proj"]}),
    "bias of lora_B": ({"family": "qwen2"}, {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}),
    "transposed weights": (
        {"family": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    ),
    "transposed dora": (
        {"family": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
    ),
}


@pytest.mark.filterwarnings("ignore:Adapter 'default'")  # to show a PeftWarning, pytest imports peft once more
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_give_the_adapters_logits(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sojourn.infer.weight_source._PIECE", 200)  # several pieces of each matrix
    changed, settings = KINDS[kind]
    base = make_model(tmp_path / "base", **changed)
    plain = streamed_logits(FolderWeights(base), IDS)
    theirs = add_adapter(base, tmp_path / "adapter", **settings)
    source = merged(base, tmp_path / "adapter")
    assert worst(streamed_logits(source, IDS), theirs) < 1e-5
    assert worst(plain, theirs) > 1e-2, "the adapter changes nothing, so this test shows nothing"
    for name in source.names():
        assert source.load(name).shape == source.shape(name) and source.load(name).dtype == source.dtype(name)


def task_vectors(base: Path, *adapters: Path) -> list[dict[str, torch.Tensor]]:
    """What each adapter adds to the weights, by plain peft."""
    from peft import PeftModel

    found = []
    for folder in adapters:
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with_adapter = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        after = PeftModel.from_pretrained(with_adapter, str(folder)).merge_and_unload().state_dict()
        before = plain.state_dict()
        found.append({n: after[n] - before[n] for n in before if not torch.equal(after[n], before[n])})
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A base and two adapters on different layers, one of them DoRA."""
    folder = tmp_path_factory.mktemp("two")
    base = make_model(folder / "base")
    add_adapter(base, folder / "one", seed=2, target_modules=["q_proj", "v_proj"])
    add_adapter(base, folder / "two", seed=3, target_modules=["q_proj", "up_proj"], use_dora=True)
    return base, folder / "one", folder / "two"


def assert_adds(source: Any, base: Path, expected: dict[str, torch.Tensor]) -> None:
    plain = FolderWeights(base)
    for name in source.names():
        change = source.load(name) - plain.load(name)
        torch.testing.assert_close(change, expected.get(name, torch.zeros_like(change)), rtol=1e-4, atol=1e-6)


def test_linear_is_the_weighted_sum_of_the_changes(two: tuple[Path, Path, Path]) -> None:
    base, *adapters = two
    one, other = task_vectors(base, *adapters)
    names = one.keys() | other.keys()
    expected = {n: 0.7 * one.get(n, torch.zeros(1)) - 0.3 * other.get(n, torch.zeros(1)) for n in names}
    assert_adds(merged(base, *adapters, weights=(0.7, -0.3)), base, expected)


def test_half_of_an_adapter_is_half_of_its_change(two: tuple[Path, Path, Path]) -> None:
    base, _, dora = two
    (vector,) = task_vectors(base, dora)
    expected = {name: 0.5 * change for name, change in vector.items()}
    assert_adds(merged(base, dora, weights=(0.5,)), base, expected)


def test_ties_trims_over_the_whole_task_vector_elects_signs_and_averages(two: tuple[Path, Path, Path]) -> None:
    """Written here as the paper has it: on flat vectors, with a sort."""
    base, *adapters = two
    vectors, weights = task_vectors(base, *adapters), (1.0, 2.0)
    trimmed = []
    for vector, weight in zip(vectors, weights, strict=True):
        flat = torch.cat([change.flatten() for change in vector.values()]).abs().sort(descending=True).values
        least = flat[round(0.3 * len(flat)) - 1]
        trimmed.append({n: weight * torch.where(v.abs() >= least, v, torch.zeros(1)) for n, v in vector.items()})
    expected = {}
    for name in vectors[0].keys() | vectors[1].keys():
        stacked = torch.stack([one[name] for one in trimmed if name in one])
        agrees = (stacked.sign() == stacked.sum(0).sign()) & (stacked != 0)
        expected[name] = (stacked * agrees).sum(0) / agrees.sum(0).clamp(min=1)
    assert_adds(merged(base, *adapters, weights=weights, combine=Combine("ties", 0.3)), base, expected)


def test_ties_keeps_the_majority_by_mass_and_leaves_out_the_others() -> None:
    vectors = [torch.tensor([3.0, -1.0, 0.5]), torch.tensor([-1.0, -3.0, 2.0]), torch.tensor([2.0, 1.0, 0.1])]
    assert ties(vectors, [0.6] * 3).tolist() == [2.5, -2.0, 2.0]


@pytest.mark.parametrize("density", [0.001, 0.2, 0.5, 1.0])
def test_the_threshold_is_that_of_a_sort(density: float) -> None:
    torch.manual_seed(0)
    pieces = [torch.randn(40, 11) * 10.0**scale for scale in (-30, -3, 0, 3)]
    largest = torch.cat([piece.flatten() for piece in pieces]).abs().sort(descending=True).values
    assert trim_threshold(lambda: iter(pieces), density) == largest[max(1, round(density * len(largest))) - 1]


def test_dare_drops_at_random_rescales_and_keeps_the_same_values_however_rows_are_read(
    two: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, *adapters = two
    vectors, combine = task_vectors(base, *adapters), Combine("dare", 0.4, seed=5)
    expected: dict[str, torch.Tensor] = {}
    for number, vector in enumerate(vectors):
        for name, change in vector.items():
            kept = dare_mask(name, number, 0, len(change), change.shape[1], combine)
            assert 0.3 < kept.float().mean() < 0.5
            expected[name] = expected.get(name, torch.zeros(1)) + change * kept / 0.4
    source = merged(base, *adapters, combine=combine)
    assert_adds(source, base, expected)
    monkeypatch.setattr("sojourn.infer.weight_source._PIECE", 70)
    assert_adds(merged(base, *adapters, combine=combine), base, expected)
    assert not torch.equal(
        merged(base, *adapters, combine=Combine("dare", 0.4, seed=6)).load("model.layers.0.self_attn.q_proj.weight"),
        source.load("model.layers.0.self_attn.q_proj.weight"),
    )


def test_a_16_bit_base_is_rounded_once(tmp_path: Path) -> None:
    """Added in bf16, as peft does, a change below the base's rounding step would be lost twice."""
    base = make_model(tmp_path / "base", dtype=torch.bfloat16)
    add_adapter(base, tmp_path / "adapter")
    plain, source, adapter = FolderWeights(base), merged(base, tmp_path / "adapter"), open_adapter(tmp_path / "adapter")
    for name in adapter.modules():
        a, b, scaling = adapter.lora(name)
        exact = plain.load(name).double() + scaling * b.double() @ a.double()
        assert source.load(name).dtype == torch.bfloat16
        assert (source.load(name) == exact.to(torch.bfloat16)).float().mean() > 0.999  # but for ties of rounding


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "a IA3 adapter; only LoRA, rsLoRA and DoRA are merged"),
    "a changed base": ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4 changed the base's weights"),
    "trained tokens": ({"trainable_token_indices": [1]}, "trained with trainable_token_indices"),
    "experts": ({"target_parameters": ["experts.up"]}, "trained with target_parameters"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_an_adapter_that_would_be_merged_wrongly_is_refused(why: str, two: tuple[Path, ...], tmp_path: Path) -> None:
    import shutil

    changed, message = REFUSED[why]
    folder = Path(shutil.copytree(two[1], tmp_path / "adapter"))
    write_json(folder / "adapter_config.json", {**read_json_object(folder / "adapter_config.json"), **changed})
    with pytest.raises(UserError, match=message):
        open_adapter(folder)


def test_an_adapter_of_another_base_is_refused_with_both_sizes(two: tuple[Path, ...], tmp_path: Path) -> None:
    wider = make_model(tmp_path / "wider", hidden_size=64)
    with pytest.raises(UserError, match=r"q_proj.weight is 32×32, but is 32×64 there; name its own base: --base DIR"):
        merged(wider, two[1])
    gpt2 = make_model(tmp_path / "gpt2", "gpt2", n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(UserError, match="is not there; name its own base"):
        merged(gpt2, two[1])


def test_an_adapter_with_added_tokens_is_refused_in_one_line(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(SIZES["vocab_size"] + 3)
    get_peft_model(model, LoraConfig(r=4, target_modules=ATTENTION, modules_to_save=["embed_tokens"])).save_pretrained(
        str(tmp_path / "adapter")
    )
    with pytest.raises(UserError, match=r"with 3 tokens added to its base \(.*123 rows.*merge_and_unload") as refused:
        merged(base, tmp_path / "adapter")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_wherever_they_are(value: float, tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", dtype=torch.bfloat16)
    add_adapter(base, tmp_path / "adapter")
    add_adapter(base, tmp_path / "wrong")
    _plant(tmp_path / "wrong" / "adapter_model.safetensors", "layers.1.self_attn.v_proj.lora_B", value)
    with pytest.raises(UserError, match=r"wrong: .*v_proj.lora_B.weight has a NaN or an infinity"):
        merged(base, tmp_path / "wrong").load("model.layers.1.self_attn.v_proj.weight")
    _plant(base / "model.safetensors", "layers.0.self_attn.q_proj", value)
    with pytest.raises(UserError, match=r"base: .*layers.0.self_attn.q_proj.weight has a NaN or an infinity"):
        merged(base, tmp_path / "adapter").load("model.layers.0.self_attn.q_proj.weight")
    _plant(base / "model.safetensors", "embed_tokens", value)
    source = merged(base, tmp_path / "adapter")
    source.rows("model.embed_tokens.weight", 0, 90)
    with pytest.raises(UserError, match=r"base: model.embed_tokens.weight has a NaN or an infinity"):
        source.rows("model.embed_tokens.weight", 90, 110)


def test_a_merge_that_overflows_the_base_s_dtype_is_refused(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", dtype=torch.float16)
    add_adapter(base, tmp_path / "adapter")
    _plant(tmp_path / "adapter" / "adapter_model.safetensors", "layers.0.self_attn.q_proj.lora_A", 1e9)
    with pytest.raises(UserError, match=r"adapter: .*layers.0.self_attn.q_proj.weight has a NaN or an infinity"):
        merged(base, tmp_path / "adapter").load("model.layers.0.self_attn.q_proj.weight")


def _plant(file: Path, name: str, value: float) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    tensor = weights[next(key for key in weights if name in key)]
    tensor[100 % len(tensor)] = value
    save_file(weights, file, {"format": "pt"})


def test_large_finite_values_are_finite() -> None:
    from sojourn.model.weights import is_finite

    assert is_finite(torch.full((100,), 3e38, dtype=torch.bfloat16)) and is_finite(torch.full((9,), 6e4).half())
    assert is_finite(torch.tensor([1, 2])) and is_finite(torch.empty(0))


def test_an_unknown_way_to_combine_is_refused() -> None:
    with pytest.raises(UserError, match="--combine: no “tiess”; did you mean ties"):
        parse_combine("tiess", None)
    with pytest.raises(UserError, match="add --combine ties"):
        parse_combine("linear", 0.5)
