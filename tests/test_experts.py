"""LoRA and QLoRA of mixture-of-experts models against plain transformers and peft, on a CPU in fp32."""

import copy
import json

import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from sojourn.config.schema import MethodConfig
from sojourn.data.artefact import Batch
from sojourn.errors import UserError
from sojourn.model.activation_checkpointing import apply_activation_checkpointing
from sojourn.model.adapter import add_adapter, load_adapter, write_adapter
from sojourn.model.base import BaseModelSource, load_base_model
from sojourn.model.experts import WEIGHTS, expert_modules, quantize_expert_weight
from sojourn.model.kernels import experts as kernels
from sojourn.model.load_balancing import load_balancing_loss
from sojourn.model.network import wrap_model
from sojourn.train.batcher import Batcher
from sojourn.train.objective.supervised import Supervised

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "num_experts_per_tok": 2,
}  # fmt: skip
ROUTED = {"moe_intermediate_size": 32}
FAMILIES = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True, **ROUTED},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "glm4_moe": {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, **ROUTED},
}
LORA = {"kind": "lora", "rank": 4}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of tiny models with random weights, by family."""
    folder = tmp_path_factory.mktemp("bases")
    for family, changed in FAMILIES.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **changed}))
        for name, parameter in model.named_parameters():
            if name.endswith(("router.bias", "_proj_bias")):
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder / family)
    return folder


def _open(folder, bits=None):
    model = load_base_model(BaseModelSource(str(folder), quant_bits=bits), torch.float32, "cpu")
    return model.requires_grad_(False)


def _with_adapter(model, *targets):
    """With an adapter whose B is not zero."""
    model = add_adapter(model, MethodConfig(**LORA, targets=list(targets)), 0)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter.data, std=0.1)
    return model


def _loss_and_gradients(model, **given):
    ids = torch.arange(48).view(2, 24) * 7 % 128
    loss = model.train()(**{"input_ids": ids, "labels": ids, "use_cache": False, **given}).loss
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def _assert_alike(ours, theirs):
    (loss, by), (expected, plain) = ours, theirs
    assert loss == pytest.approx(expected, rel=1e-5) and by.keys() == plain.keys() and by
    for name in by:
        torch.testing.assert_close(by[name], plain[name], rtol=1e-4, atol=1e-7, msg=name)


def _save(model, folder, base):
    weights = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    write_adapter(model, weights, folder, str(base), None)
    return folder


def _dequantized(folder, quantized):
    """The plain model with the weights that the quantized one computes with."""
    model = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
    for name, parameter in model.named_parameters():
        module, _, weight = name.rpartition(".")
        packed = quantized.get_submodule(module)._parameters[weight]
        if (state := getattr(packed, "quant_state", None)) is not None:
            parameter.data = dequantize_4bit(packed.data, state).view_as(parameter)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_attention_and_experts_equal_plain_pefts(bases, tmp_path, family):
    ours = _with_adapter(_open(bases / family), "all-linear", "experts")
    plain = AutoModelForCausalLM.from_pretrained(bases / family)
    theirs = PeftModel.from_pretrained(plain, _save(ours, tmp_path, bases / family), is_trainable=True)
    _assert_alike(_loss_and_gradients(ours), _loss_and_gradients(theirs))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_s_gate_is_one_kernel(bases, monkeypatch, family):
    """Transformers has had two classes for SiLU."""
    computed = []
    for name in ("weighted_swiglu", "weighted_clamped_swiglu"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *given, real=real: computed.append(1) or real(*given))
    _loss_and_gradients(_with_adapter(_open(bases / family), "all-linear"))
    assert len(computed) == len(expert_modules(_open(bases / family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_nf4_equal_the_same_weights_dequantized(bases, tmp_path, family):
    quantized = _open(bases / family, bits=4)
    plain = _dequantized(bases / family, quantized)
    assert all(m._parameters[w].dtype == torch.uint8 for _, m in expert_modules(quantized) for w in WEIGHTS)
    ours = _with_adapter(quantized, "q_proj", "experts")
    theirs = PeftModel.from_pretrained(plain, _save(ours, tmp_path, bases / family), is_trainable=True)
    _assert_alike(_loss_and_gradients(ours), _loss_and_gradients(theirs))


@pytest.mark.parametrize("double_quant", [True, False])
def test_quantizing_expert_by_expert_equals_bitsandbytes_on_the_whole_tensor(double_quant):
    weight = torch.randn(3, 32, 64)
    ours = quantize_expert_weight(weight.unbind(), (3, 32, 64), double_quant)
    packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=double_quant, quant_type="nf4")
    assert torch.equal(ours.data, packed)
    assert torch.equal(dequantize_4bit(ours.data, ours.quant_state), dequantize_4bit(packed, state))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_nothing_and_skips_the_down_projection(bases, monkeypatch, mode):
    plain = _with_adapter(_open(bases / "qwen3_moe", bits=4), "q_proj")
    model, calls = copy.deepcopy(plain), []
    expected = _loss_and_gradients(plain)
    apply_activation_checkpointing(model.get_base_model(), mode, False)
    real = kernels.grouped_mm
    monkeypatch.setattr(kernels, "grouped_mm", lambda x, w, o: calls.append(w.shape[1:]) or real(x, w, o))
    _assert_alike(_loss_and_gradients(model), expected)
    gate_up, down = torch.Size((64, 64)), torch.Size((32, 64))
    # In each of two layers: forward, gradient of the input (which is (64, 32) for down), and with `full` recomputing.
    assert calls.count(down) == 2 and calls.count(gate_up) == (6 if mode == "full" else 4)


@pytest.fixture(scope="module")
def in_mxfp4(bases, tmp_path_factory):
    """A tiny gpt-oss whose experts are stored as OpenAI stores them."""
    folder = tmp_path_factory.mktemp("mxfp4")
    model = AutoModelForCausalLM.from_pretrained(bases / "gpt_oss", dtype=torch.bfloat16)
    stored = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(WEIGHTS)}
    for name, module in expert_modules(model):
        for weight in WEIGHTS:
            experts, inputs, outputs = getattr(module, weight).shape
            stored[f"{name}.{weight}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16)).byte()
            stored[f"{name}.{weight}_scales"] = torch.randint(118, 123, (experts, outputs, inputs // 32)).byte()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "self_attn"]}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_experts_in_mxfp4_stay_so_and_compute_what_transformers_dequantizes(in_mxfp4, tmp_path):
    quantized, plain = _open(in_mxfp4, bits=4), _open(in_mxfp4).float()
    packed = [m._parameters[w] for _, m in expert_modules(quantized) for w in WEIGHTS]
    assert all(one.dtype == torch.uint8 and one.quant_state.quant_type == "mxfp4" for one in packed)
    for name, parameter in plain.named_parameters():
        module, _, weight = name.rpartition(".")
        state = getattr(quantized.get_submodule(module)._parameters[weight], "quant_state", None)
        if state is not None and state.quant_type == "nf4":
            parameter.data = dequantize_4bit(quantized.get_submodule(module).weight.data, state).view_as(parameter)
    ours = _with_adapter(quantized, "q_proj", "experts")
    theirs = PeftModel.from_pretrained(plain, _save(ours, tmp_path, in_mxfp4), is_trainable=True)
    _assert_alike(_loss_and_gradients(ours), _loss_and_gradients(theirs))


def test_experts_that_no_token_visits_and_odd_ranks_are_fine(bases):
    model = _with_adapter(_open(bases / "qwen3_moe"), "experts")
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            module.weight.data[2:] = 0
            module.weight.data[:2] = 0
            module.weight.data[:, 0] = torch.tensor([9.0, 8, 0, 0, 0, 0, 0, 0])
    _, gradients = _loss_and_gradients(model)
    assert all(torch.isfinite(g).all() for g in gradients.values())


def test_an_adapter_on_experts_is_loaded_again_on_nf4(bases, tmp_path):
    base = bases / "mixtral"
    ours = _with_adapter(_open(base, bits=4), "all-linear", "experts")
    again = load_adapter(_open(base, bits=4), _save(ours, tmp_path, base), trainable=True)
    _assert_alike(_loss_and_gradients(again), _loss_and_gradients(ours))


def test_experts_that_stay_as_they_are_are_counted(bases, capsys):
    _open(bases / "mixtral", bits=4)
    assert "stay as they are" not in capsys.readouterr().out
    _open(bases / "mixtral", bits=8)
    weights = 2 * 4 * 3 * 96 * 64
    assert f"method.bits: {weights:,} weights of experts stay as they are; method.bits=4" in capsys.readouterr().out


def test_what_all_linear_leaves_out_is_said(bases, capsys):
    _with_adapter(_open(bases / "glm4_moe"), "all-linear")
    assert "not experts, router, gate_proj, up_proj, down_proj" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("glm4_moe", {"targets": ["q_proj", "up_proj"]}, "peft takes up_proj for this model's experts; use experts"),
        ("mixtral", {"targets": ["experts"], "dropout": 0.1}, "peft has no dropout for adapters on experts"),
        ("mixtral", {"targets": ["experts"], "dora": True}, "peft has no dora for adapters on experts"),
        ("mixtral", {"targets": ["expert"]}, "this model has no “expert”"),
    ],
)
def test_targets_that_peft_has_not_are_one_line(bases, family, changed, message):
    with pytest.raises(UserError, match=message):
        add_adapter(_open(bases / family), MethodConfig(**LORA, **changed), 0)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_the_load_balancing_loss_is_that_of_transformers(bases, family):
    model = AutoModelForCausalLM.from_pretrained(bases / family)
    ids = torch.randint(0, 128, (3, 12))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    out = model(ids, attention_mask=mask, output_router_logits=True)
    ours = load_balancing_loss(list(out.router_logits), 2, mask.bool().flatten())
    assert ours.item() == pytest.approx(out.aux_loss.item(), rel=1e-5)


@pytest.mark.parametrize("mode", ["off", "full"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_training_adds_the_load_balancing_loss_as_transformers_does(bases, family, mode):
    plain = AutoModelForCausalLM.from_pretrained(bases / family, output_router_logits=True, router_aux_loss_coef=0.5)
    plain = _with_adapter(plain.requires_grad_(False), "q_proj", "v_proj")
    model, (batch, ids, mask, labels) = copy.deepcopy(plain), _padded_batch()
    expected = _loss_and_gradients(plain, input_ids=ids, attention_mask=mask, labels=labels)
    if mode != "off":
        apply_activation_checkpointing(model.get_base_model(), mode, False)
    network = wrap_model(model.train(), None if family == "gpt_oss" else "sdpa")
    objective = Supervised(router_aux_loss_coef=0.5)
    batcher = Batcher(2, 12, 0, "cpu", backend=network.attention_backend, needs_padding=objective.needs_padding)
    loss = objective.loss_sum(network, batcher.to_device(batch)) / objective.weight(batch)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    _assert_alike((float(loss.detach()), found), expected)


def _padded_batch():
    """Two rows of one document each, the second one padded: as ours, and as transformers gets it."""
    ids, lengths = np.arange(24).reshape(2, 12) * 11 % 128, np.array([12, 7])
    is_real = np.arange(12) < lengths[:, None]
    labels = np.where(is_real, ids, -100)
    shifted = np.full_like(labels, -100)
    shifted[:, :-1] = labels[:, 1:]
    batch = Batch(ids, shifted, np.tile(np.arange(12), (2, 1)), np.where(is_real, 0, -1).astype(np.int32))
    return batch, torch.tensor(ids), torch.tensor(is_real.astype(np.int64)), torch.tensor(labels)


def test_a_load_balancing_loss_of_padding_alone_is_zero():
    assert load_balancing_loss([torch.randn(4, 8)], 2, torch.zeros(4, dtype=torch.bool)) == 0
