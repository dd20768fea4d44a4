"""Blocks by kernels for Hopper compute what torch computes. The kernels themselves need such a card; what we make of
them, norms that are put off above all, is tried everywhere, with torch in their place."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from sojourn.config.load import load_run
from sojourn.data.artefact import Batch
from sojourn.errors import UserError
from sojourn.machine.probe_software import importable
from sojourn.model.activation_checkpointing import apply_activation_checkpointing
from sojourn.model.attention import AttentionParams, attend
from sojourn.model.kernels import fused_forwards as forwards
from sojourn.model.kernels import hopper
from sojourn.model.kernels import smoke_test as trial
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
    trial.forget_kernels()


def _gates(pairs):
    return pairs.unflatten(-1, (-1, 2)).unbind(-1)


class ByTorch:
    """The products of `hopper._products`, each followed by what it is to do as it writes."""

    square = wide = large = None

    def __init__(self):
        self.asked = []

    def _product(self, name, a, b, config, tuned):
        self.asked.append(name)
        assert tuned is False
        return (a.float() @ b.float()).to(torch.float32)

    def add(self, a, b, c, out, **how):
        out["D"].copy_(self._product("add", a, b, **how) + c)

    def add_and_square(self, a, b, c, out, **how):
        summed = self._product("add_and_square", a, b, **how) + c
        out["D"].copy_(summed)
        return {"squares": summed.square().sum(-1)[None]}

    def gate(self, a, b, out, root, **how):
        made = self._product("gate", a, b, **how) * root[0][:, None]
        one, other = _gates(made)
        out["D"].copy_(made)
        out["gated"].copy_(F.silu(one) * other)

    def gate_back(self, a, b, c, out, root, **how):
        made = self._product("gate_back", a, b, **how)
        with torch.enable_grad():
            pairs = c.float().detach().requires_grad_()
            one, other = _gates(pairs)
            (grad,) = torch.autograd.grad(F.silu(one) * other, pairs, made)
        out["D"].copy_(grad * root[0][:, None])
        return {"dots": (grad * pairs.detach()).sum(-1)[None]}

    def norm_back(self, a, b, c, out, other, by, **how):
        out["D"].copy_(self._product("norm_back", a, b, **how) + c + other * by[0][:, None])


@pytest.fixture
def by_torch(monkeypatch):
    products = ByTorch()
    monkeypatch.setattr(hopper, "_products", lambda: products)
    monkeypatch.setattr(hopper.Kernels, "products", True)
    return products


def _apart(one, other) -> float:
    return float((one.detach().double() - other.detach().double()).norm() / other.detach().double().norm())


def test_a_norm_that_is_put_off_changes_nothing_forward_or_back(by_torch):
    torch.manual_seed(0)
    given = [one.requires_grad_() for one in trial._rest_given()]
    found, wanted = (trial._with_gradients(way, given) for way in (trial._rest, trial._rest_by_torch))
    assert [_apart(*both) < 1e-5 for both in zip(found, wanted, strict=True)] == [True] * 6
    assert by_torch.asked == ["add_and_square", "gate", "add", "gate_back", "norm_back"]


def _loss_and_gradients(network, batch):
    loss = Supervised().loss_sum(network, Batcher(2, 32, 0, "cpu", "bf16").to_device(batch))
    loss.backward()
    made = {name: one.grad.clone() for name, one in network.model.named_parameters()}
    network.model.zero_grad()
    return loss.detach(), made


def _model(family, width, head_dim, **sizes):
    sizes |= {"hidden_size": width, "head_dim": head_dim, "num_attention_heads": 4, "intermediate_size": 96}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=128, **sizes))


def _network(family):
    torch.manual_seed(0)
    model = _model(family, 64, 16, num_hidden_layers=2, num_key_value_heads=2, sliding_window=None)
    for name, one in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(one, 0.5, 1.5)  # so that a weight that is forgotten shows
    network = wrap_model(model, "sdpa", torch.bfloat16)
    forwards.apply_fused_forwards(network.base_model)
    return network


def _batch():
    ids = np.random.default_rng(0).integers(0, 128, (2, 32))
    return Batch(ids, np.roll(ids, -1, 1), np.tile(np.arange(32), (2, 1)), np.zeros((2, 32), np.int32))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_blocks_are_the_same_with_them(family, by_torch, monkeypatch):
    network = _network(family)
    found, by = _loss_and_gradients(network, _batch())
    assert by_torch.asked.count("gate") == 2 == by_torch.asked.count("norm_back")
    monkeypatch.setattr(hopper.Kernels, "products", False)
    wanted, plain = _loss_and_gradients(network, _batch())
    assert _apart(found, wanted) < 0.002 and max(_apart(by[name], plain[name]) for name in plain) < 0.05
    assert by_torch.asked.count("gate") == 2


def test_whoever_keeps_products_alone_goes_without(by_torch):
    """Selective recomputing knows products and attention by name, and would make others again."""
    assert "attention" in str(hopper.attention_of_heads)
    network = _network("llama")
    apply_activation_checkpointing(network.base_model, "selective", False)
    _loss_and_gradients(network, _batch())
    assert not by_torch.asked
    network = _network("llama")
    apply_activation_checkpointing(network.base_model, "full", False)
    _loss_and_gradients(network, _batch())
    assert by_torch.asked.count("gate") == 4  # and once more in the backward


@pytest.mark.parametrize("group", [1, 3])
def test_attention_is_tried_against_what_blocks_do(group):
    torch.manual_seed(0)
    heads = trial.Heads(16, group)
    x, weight, bias = heads.given()
    joined = F.linear(x, weight, bias).unflatten(-1, (-1, 16))
    query, key, value = joined.split([2 * group, 2, 2], 2)
    documents = np.zeros((2, 160), np.int32)
    layout = make_layout("math", documents, torch.from_numpy(documents), None, ())
    plain = attend(*forwards._turned(query, key, *heads.angles("cpu")), value, layout, AttentionParams(16**-0.5))
    assert _apart(heads.by_torch(x, weight, bias), plain.flatten(2)) < 1e-5


def test_kernels_that_fail_or_err_are_told_and_not_used(monkeypatch, capsys):
    def ask(ours):
        given = (torch.device("cpu"), ours, lambda x: 2 * x, lambda: [torch.ones(3)])
        return trial._tried("numpy", "products", *given)

    assert ask(lambda x: x + x) and not capsys.readouterr().out
    assert not ask(lambda x: 3 * x) and "numpy's products cannot be used here (they make" in capsys.readouterr().out
    assert not ask(lambda x: x.missing) and "AttributeError" in capsys.readouterr().out
    assert trial._tried("no_such_package.cute", "products", *(None,) * 4) is False and not capsys.readouterr().out


def test_where_they_cannot_be_the_reason_is_said():
    def settings(*words):
        return resolve_here(load_run(["tiny", *words, "train.device=cpu"]).config).config

    cpu = DeviceSpec("cpu", "cpu", "fp32")
    assert settings().advanced.hopper_kernels == "off" and "on cpu" in hopper_unsupported_reason(settings(), cpu)
    with pytest.raises(
        UserError, match=r"advanced\.hopper_kernels: needs an H100 or H200, but this run is on cpu; use auto"
    ):
        settings("advanced.hopper_kernels=on")
    ready = {"device": "cuda", "precision": "bf16", "fp8": "off", "deterministic": "off"}
    h200 = DeviceSpec("cuda", "H200", "bf16", compute_capability=(9, 0), packages=HOPPER_PACKAGES)

    def reason(kind="pretrain", engine="single", device=h200, **changes):
        advanced = {"fused_forwards": changes.pop("fused", "on")}
        parts = {"train": {**ready, **changes}, "advanced": advanced, "method": {"kind": kind},
                 "parallel": {"engine": engine}}  # fmt: skip
        config = SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()})
        return hopper_unsupported_reason(config, device)

    assert reason() is None is reason(engine="ddp")
    reasons = (reason("lora"), reason(engine="fsdp"), reason(fused="off"), reason(fp8="on"), reason(precision="fp16"))
    reasons += (reason(deterministic="on"),)
    for word, found in zip(("lora", "fsdp", "fused", "fp8", "fp16", "deterministic"), reasons, strict=True):
        assert word in found
    assert "pip install 'sojourn[hopper]'" in reason(device=replace(h200, packages=frozenset({"quack"})))
    assert "A100" in reason(device=replace(h200, name="A100", compute_capability=(8, 0)))


@needs_hopper
@pytest.mark.parametrize("size", [64, 128])
def test_the_real_ones_make_what_torch_makes(size):
    trial.try_kernels(_model("llama", 4 * size, size, num_hidden_layers=1).cuda())
    assert hopper.Kernels.products and hopper.Kernels.attention
