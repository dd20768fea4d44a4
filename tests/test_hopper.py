"""Decoder layers with Hopper kernels compute what torch computes. The kernels themselves need a Hopper GPU; our use of
them, above all the RMSNorm after its matmul, is tested everywhere with torch in their place."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from sojourn.catalog.fused_families import LAYERS_LIKE_LLAMA
from sojourn.config.load import load_run
from sojourn.data.artefact import Batch
from sojourn.errors import UserError
from sojourn.machine.probe_software import importable
from sojourn.model.activation_checkpointing import apply_activation_checkpointing
from sojourn.model.attention import AttentionParams, attend
from sojourn.model.kernels import fused_forwards as forwards
from sojourn.model.kernels import hopper, smoke_test
from sojourn.model.kernels.qkv_rope import apply_rope
from sojourn.model.layout import make_layout
from sojourn.model.network import wrap_model
from sojourn.resolve.device_spec import HOPPER_PACKAGES, DeviceSpec
from sojourn.resolve.kernels import hopper_unsupported_reason
from sojourn.train.batcher import Batcher
from sojourn.train.objective.supervised import Supervised
from sojourn.train.resolve import resolve_here

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(
    not (HOPPER and importable("quack") and importable("flash_attn.cute")),
    reason="needs an H100 or H200, and the packages of sojourn[hopper]",
)


@pytest.fixture(autouse=True)
def _no_kernels():
    yield
    smoke_test.disable_hopper_kernels()


def _gate_and_up(pairs):
    return pairs.unflatten(-1, (-1, 2)).unbind(-1)


class ByTorch:
    """The GEMMs of `hopper._gemms` by torch, each with its epilogue."""

    tile_128x128 = tile_128x192 = tile_128x256 = None

    def __init__(self):
        self.called = []

    def _gemm(self, name, a, b, config, tuned):
        self.called.append(name)
        assert tuned is False
        return (a.float() @ b.float()).to(torch.float32)

    def add(self, a, b, c, out, **how):
        out["D"].copy_(self._gemm("add", a, b, **how) + c)

    def add_and_square(self, a, b, c, out, **how):
        summed = self._gemm("add_and_square", a, b, **how) + c
        out["D"].copy_(summed)
        return {"squares": summed.square().sum(-1)[None]}

    def scale_and_swiglu(self, a, b, out, row_scale, **how):
        made = self._gemm("scale_and_swiglu", a, b, **how) * row_scale[0][:, None]
        one, other = _gate_and_up(made)
        out["D"].copy_(made)
        out["activated"].copy_(F.silu(one) * other)

    def swiglu_backward(self, a, b, c, out, row_scale, **how):
        made = self._gemm("swiglu_backward", a, b, **how)
        with torch.enable_grad():
            pairs = c.float().detach().requires_grad_()
            one, other = _gate_and_up(pairs)
            (grad,) = torch.autograd.grad(F.silu(one) * other, pairs, made)
        out["D"].copy_(grad * row_scale[0][:, None])
        return {"dots": (grad * pairs.detach()).sum(-1)[None]}

    def rms_norm_backward(self, a, b, c, out, other, factor, **how):
        out["D"].copy_(self._gemm("rms_norm_backward", a, b, **how) + c + other * factor[0][:, None])


@pytest.fixture
def by_torch(monkeypatch):
    products = ByTorch()
    monkeypatch.setattr(hopper, "_gemms", lambda: products)
    monkeypatch.setattr(hopper.HopperKernels, "gemm", True)
    return products


def _relative_error(one, other) -> float:
    return float((one.detach().double() - other.detach().double()).norm() / other.detach().double().norm())


def test_rms_norm_after_the_matmul_changes_nothing_forward_or_backward(by_torch):
    torch.manual_seed(0)
    given = [one.requires_grad_() for one in smoke_test._mlp_inputs()]
    found, wanted = (
        smoke_test._output_and_gradients(way, given) for way in (smoke_test._mlp, smoke_test._mlp_by_torch)
    )
    assert [_relative_error(*both) < 1e-5 for both in zip(found, wanted, strict=True)] == [True] * 6
    assert by_torch.called == ["add_and_square", "scale_and_swiglu", "add", "swiglu_backward", "rms_norm_backward"]


def _loss_and_gradients(network, batch):
    loss = Supervised().loss_sum(network, Batcher(2, 32, 0, "cpu", "bf16").to_device(batch))
    loss.backward()
    made = {name: one.grad.clone() for name, one in network.model.named_parameters()}
    network.model.zero_grad()
    return loss.detach(), made


def _model(family, width, head_dim, **sizes):
    sizes |= {"hidden_size": width, "head_dim": head_dim, "num_attention_heads": 4, "intermediate_size": 96}
    sizes |= {"pad_token_id": None, "no_rope_layers": [1, 0]}  # of SmolLM3
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=128, **sizes))


def _network(family):
    torch.manual_seed(0)
    model = _model(family, 64, 16, num_hidden_layers=2, num_key_value_heads=2, sliding_window=None)
    for name, one in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(one, 0.5, 1.5)  # so that a forgotten weight shows
    network = wrap_model(model, "sdpa", torch.bfloat16)
    forwards.apply_fused_forwards(network.base_model)
    return network


def _batch():
    ids = np.random.default_rng(0).integers(0, 128, (2, 32))
    return Batch(ids, np.roll(ids, -1, 1), np.tile(np.arange(32), (2, 1)), np.zeros((2, 32), np.int32))


@pytest.mark.parametrize("family", LAYERS_LIKE_LLAMA)
def test_decoder_layers_compute_the_same_with_hopper_kernels(family, by_torch, monkeypatch):
    network = _network(family)
    found, by = _loss_and_gradients(network, _batch())
    assert by_torch.called.count("scale_and_swiglu") == 2 == by_torch.called.count("rms_norm_backward")
    monkeypatch.setattr(hopper.HopperKernels, "gemm", False)
    wanted, plain = _loss_and_gradients(network, _batch())
    assert (
        _relative_error(found, wanted) < 0.002 and max(_relative_error(by[name], plain[name]) for name in plain) < 0.05
    )
    assert by_torch.called.count("scale_and_swiglu") == 2


def test_selective_activation_checkpointing_goes_without_hopper_gemms(by_torch):
    """It recognizes matmuls and attention by the names of their ops, and would recompute ours."""
    assert "attention" in str(hopper.qkv_rope_attention)
    network = _network("llama")
    apply_activation_checkpointing(network.base_model, "selective", False)
    _loss_and_gradients(network, _batch())
    assert not by_torch.called
    network = _network("llama")
    apply_activation_checkpointing(network.base_model, "full", False)
    _loss_and_gradients(network, _batch())
    assert by_torch.called.count("scale_and_swiglu") == 4  # and once more in the backward


@pytest.mark.parametrize("group", [1, 3])
def test_the_attention_smoke_test_compares_with_what_layers_compute(group):
    torch.manual_seed(0)
    case = smoke_test.AttentionCase(16, group)
    x, weight, bias = case.inputs()
    joined = F.linear(x, weight, bias).unflatten(-1, (-1, 16))
    query, key, value = joined.split([2 * group, 2, 2], 2)
    documents = np.zeros((2, 160), np.int32)
    layout = make_layout("math", documents, torch.from_numpy(documents), None, ())
    plain = attend(*apply_rope(query, key, *case.cos_sin("cpu")), value, layout, AttentionParams(16**-0.5))
    assert _relative_error(case.by_torch(x, weight, bias), plain.flatten(2)) < 1e-5


def test_kernels_that_fail_or_raise_are_reported_and_not_used(monkeypatch, capsys):
    def ask(ours):
        given = (torch.device("cpu"), ours, lambda x: 2 * x, lambda: [torch.ones(3)])
        return smoke_test._passes("numpy", "GEMMs", *given)

    assert ask(lambda x: x + x) and not capsys.readouterr().out
    assert (
        not ask(lambda x: 3 * x) and "numpy's GEMMs failed their smoke test (wrong results" in capsys.readouterr().out
    )
    assert not ask(lambda x: x.missing) and "AttributeError" in capsys.readouterr().out
    assert smoke_test._passes("no_such_package.cute", "GEMMs", *(None,) * 4) is False and not capsys.readouterr().out


def test_hopper_kernels_where_they_are_unsupported_are_refused_with_the_reason():
    def settings(*words):
        return resolve_here(load_run(["tiny", *words, "train.device=cpu"]).config).config

    cpu = DeviceSpec("cpu", "cpu", "fp32")
    assert settings().advanced.hopper_kernels == "off" and "on cpu" in hopper_unsupported_reason(
        settings(), cpu, "llama"
    )
    with pytest.raises(
        UserError, match=r"advanced\.hopper_kernels: needs an H100 or H200, but this run is on cpu; use auto"
    ):
        settings("advanced.hopper_kernels=on")
    ready = {"device": "cuda", "precision": "bf16", "fp8": "off", "deterministic": "off",
             "activation_checkpointing": "off"}  # fmt: skip
    h200 = DeviceSpec("cuda", "H200", "bf16", compute_capability=(9, 0), packages=HOPPER_PACKAGES)

    def reason(kind="pretrain", engine="single", device=h200, family="llama", **changes):
        advanced = {"fused_forwards": changes.pop("fused", "on")}
        parts = {"train": {**ready, **changes}, "advanced": advanced, "method": {"kind": kind},
                 "parallel": {"engine": engine}}  # fmt: skip
        config = SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()})
        return hopper_unsupported_reason(config, device, family)

    assert reason() is None is reason(engine="ddp")
    reasons = (reason("lora"), reason(engine="fsdp"), reason(fused="off"), reason(fp8="on"), reason(precision="fp16"))
    reasons += (reason(deterministic="on"),)
    assert "only the fused forwards of Llama, " in reason(family="gemma3_text")
    for word, found in zip(("lora", "fsdp", "fused", "fp8", "fp16", "deterministic"), reasons, strict=True):
        assert word in found
    assert "pip install 'sojourn[hopper]'" in reason(device=replace(h200, packages=frozenset({"quack"})))
    assert "A100" in reason(device=replace(h200, name="A100", compute_capability=(8, 0)))


@needs_hopper
@pytest.mark.parametrize("size", [64, 128])
def test_the_real_kernels_compute_what_torch_computes(size):
    smoke_test.smoke_test_hopper_kernels(_model("llama", 4 * size, size, num_hidden_layers=1).cuda())
    assert hopper.HopperKernels.gemm and hopper.HopperKernels.attention
