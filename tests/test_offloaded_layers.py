"""Offloaded layer inputs and MLPs in tiles (activation_checkpointing=offload) change neither loss nor gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sojourn.catalog.fused_families import FUSED_FAMILIES
from sojourn.catalog.gpus import find_gpu
from sojourn.catalog.models import find_model
from sojourn.config.load import load_run
from sojourn.config.schema import MethodConfig
from sojourn.errors import UserError
from sojourn.estimate.memory import memory
from sojourn.estimate.model_states import host_bytes
from sojourn.estimate.workload import Workload
from sojourn.model import offloaded_layers
from sojourn.model.activation_checkpointing import apply_activation_checkpointing
from sojourn.model.adapter import with_adapter
from sojourn.model.kernels.fused_forwards import apply_fused_forwards
from sojourn.model.layout import compute_cu_seqlens, make_layout, pad_cu_seqlens
from sojourn.model.loss import cross_entropy_sum
from sojourn.model.network import wrap_model
from sojourn.plan.offers import plan_device, resolve_for
from sojourn.train.faults.oom_fallback import next_fallback
from tiny import losses, run_train

SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
DOCUMENTS = np.array([[0] * 10 + [1] * 10, [0] * 15 + [1] * 5], np.int32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(offloaded_layers, "mlp_tile_tokens", lambda ffn: 7)


def _network(family, mode, method, device="cpu", dtype=torch.float32, dropout=0.0, fused=True):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES)).to(device, dtype)
    if method == "lora":
        model = with_adapter(model, MethodConfig(kind="lora", rank=4, dropout=dropout), 0)
        for name, weight in model.named_parameters():
            weight.data = weight.data.normal_(0, 0.2).to(dtype) if "lora_B" in name else weight.data.to(dtype)
    network = wrap_model(model, "sdpa")
    if fused:
        apply_fused_forwards(network.base_model)
    if mode != "off":
        apply_activation_checkpointing(network.base_model, mode, preserve_rng_state=dropout > 0)
    network.model.train()
    return network


def _loss(network, device="cpu"):
    hidden, labels = _hidden_states(network, device)
    return cross_entropy_sum(network.lm_head, hidden, labels)


def _hidden_states(network, device="cpu"):
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, 100, DOCUMENTS.shape)).to(device)
    positions = torch.tensor([[*range(10), *range(10)], [*range(15), *range(5)]], device=device)
    starts = torch.from_numpy(pad_cu_seqlens(compute_cu_seqlens(DOCUMENTS))).to(device)
    windows = network.sliding_windows
    layout = make_layout("sdpa", DOCUMENTS, torch.from_numpy(DOCUMENTS).to(device), starts, windows)
    torch.manual_seed(1)
    return network.hidden_states(ids, positions, layout).flatten(0, 1), ids.roll(-1, 1).flatten()


def _gradients(network, device="cpu", loss_of=None):
    loss = (_loss if loss_of is None else loss_of)(network, device)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in network.model.named_parameters() if p.requires_grad}


def _assert_same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-6) and found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-5)


def test_inputs_of_any_length_come_back_from_buffers_of_which_only_the_last_is_rounded_up(monkeypatch):
    monkeypatch.setattr(offloaded_layers, "_PIECE", 64)
    inputs = offloaded_layers.LayerInputs(3)
    for shape in ((2, 5, 7), (1, 3, 7), (2, 9, 7)):
        sent, back = torch.randn(shape), torch.empty(shape)
        for part, buffer in inputs._pieces(0, sent):
            buffer.copy_(sent.view(-1)[part])
        for part, buffer in inputs._pieces(0, back):
            back.view(-1)[part] = buffer
        assert torch.equal(sent, back)
    assert [buffer.numel() for buffer in inputs._host[0]] == [16] * 7 + [14]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=pytest.mark.slow if (number + (method == "lora")) % 2 else [])
        for number, family in enumerate([*FUSED_FAMILIES, "gpt2"])
        for method in ("full", "lora")
    ],
)
def test_loss_and_gradients_are_those_without_checkpointing(family, method, device):
    fused = family in FUSED_FAMILIES
    given = {"method": method, "device": device, "fused": fused}
    _assert_same(
        _gradients(_network(family, "offload", **given), device), _gradients(_network(family, "off", **given), device)
    )


def test_steps_one_after_the_other_use_their_own_inputs():
    network, plain = (_network("llama", mode, "lora") for mode in ("offload", "off"))
    _loss(network)  # a forward that is discarded
    for _ in range(2):
        _assert_same(_gradients(network), _gradients(plain))  # gradients add up


def test_dropout_draws_the_same_numbers_in_the_backward():
    """The gradient is the slope of the loss with the same random numbers."""
    network = _network("llama", "offload", "lora", dtype=torch.float64, dropout=0.3)

    def squares(network, device="cpu"):  # in fp64
        return _hidden_states(network)[0].square().sum()

    _, grads = _gradients(network, loss_of=squares)
    name = next(name for name in grads if "down_proj.lora_A" in name)
    weight = dict(network.model.named_parameters())[name]
    direction, step = torch.randn_like(weight), 1e-5
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(direction, alpha=sign * step)
        losses.append(squares(network).item())
        with torch.no_grad():
            weight.sub_(direction, alpha=sign * step)
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx((grads[name] * direction).sum().item(), rel=1e-4)


def test_a_parameters_hook_sees_its_gradient_once():
    network, seen = _network("llama", "offload", "full"), []
    for name, parameter in network.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    _loss(network).backward()
    assert len(seen) == len(set(seen)) == len(list(network.model.parameters()))


def test_no_tensor_of_length_times_intermediate_size_is_saved_or_computed(monkeypatch):
    widths = []
    wide = SIZES["intermediate_size"]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in [out] if isinstance(out, torch.Tensor) else []:
                if tensor.ndim > 1 and tensor.shape[-1] in (wide, 2 * wide):
                    widths.append(tensor.numel() // tensor.shape[-1])
            return out

    network = _network("llama", "offload", "lora")
    with Watch():
        _loss(network).backward()
    rank_and_weights = (4, 8, 32)
    assert max(n for n in widths if n not in rank_and_weights) <= 7


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["train.compile=on"], "train.compile is on"),
        (["train.fp8=on"], "train.fp8 is on"),
        (["parallel.engine=deepspeed"], "parallel.engine is deepspeed"),
    ],
)
def test_settings_against_it_are_refused_in_one_line(settings, says):
    words = ["lora-20k", "model.base=llama-3.1-8b", "train.activation_checkpointing=offload", *settings]
    with pytest.raises(UserError, match=f"offload .*{says}"):
        _resolved(words, "H100 SXM")


def _resolved(words, card):
    config = load_run(words).config
    return resolve_for(config, find_model(str(config.model.base)), plan_device(config, find_gpu(card), 1))


def test_auto_takes_it_where_nothing_else_fits_and_never_with_room():
    words = ["qlora-7b", "model.base=llama-3.1-8b", "train.global_batch=1", "data.max_length=49152", "data.packing=off"]
    found = _resolved(words, "RTX 4090")
    assert found.fits and found.config.train.activation_checkpointing == "offload"
    assert found.config.train.compile == "off" and "offload" in found.reasons["train.compile"]
    assert host_bytes(found.workload) == 31 * 49152 * 4096 * 2
    assert _resolved(words, "H200").config.train.activation_checkpointing != "offload"
    assert _resolved([*words, "train.compile=on"], "RTX 4090").config.train.activation_checkpointing != "offload"


def test_the_ladder_ends_with_it_on_a_gpu():
    config = _resolved(["qlora-7b", "model.base=llama-3.1-8b", "train.micro_batch=1"], "RTX 4090").config
    config = config.model_copy(update={"train": config.train.model_copy(update={"activation_checkpointing": "full"})})
    assert next_fallback(config) == {"train.activation_checkpointing": "offload"}
    on_cpu = config.model_copy(update={"train": config.train.model_copy(update={"device": "cpu"})})
    assert next_fallback(on_cpu) != {"train.activation_checkpointing": "offload"}


def test_memory_grows_with_the_length_by_a_few_states_of_one_layer_only():
    longer = [
        memory(
            Workload(find_model("llama-3.1-8b"), "qlora", 1, length, compiled=False, activation_checkpointing=mode)
        ).allocated
        for mode in ("offload", "full")
        for length in (65536, 131072)
    ]
    offloaded, full = longer[1] - longer[0], longer[3] - longer[2]
    assert offloaded < 65536 * 4096 * 2 * 20 < full / 2


def test_a_run_has_the_losses_of_one_without(tiny):
    found, wanted = (
        losses(run_train(tiny.words("train.steps=4", f"train.activation_checkpointing={mode}")))
        for mode in ("offload", "off")
    )
    assert found == pytest.approx(wanted, rel=1e-6)


def test_the_workload_without_a_gpu_keeps_inputs():
    workload = Workload(find_model("llama-3.1-8b"), activation_checkpointing="offload", device_type="cpu")
    assert host_bytes(workload) == 0 < host_bytes(replace(workload, device_type="cuda"))


@pytest.mark.parametrize(
    ("model", "method", "length", "rows", "document", "gib"),
    [
        ("qwen2.5-7b", "qlora", 4096, 2, 480, 7.20),
        ("qwen2.5-7b", "lora", 4096, 2, 480, 15.78),
        ("llama-3.1-8b", "qlora", 32_768, 1, None, 9.93),
        ("llama-3.1-8b", "qlora", 90_112, 1, None, 16.10),
    ],
)
def test_plans_are_what_an_h200_needed(model, method, length, rows, document, gib):
    """Measured by benchmarks/small_memory.py on 2026-11-18."""
    words = [f"model.base={model}", f"method.kind={method}", "method.rank=16", "data.sources=none", "train.steps=10",
             f"data.max_length={length}", f"train.global_batch={rows}", f"train.micro_batch={rows}",
             "train.activation_checkpointing=offload"]  # fmt: skip
    config = load_run(words).config
    resolved = resolve_for(config, find_model(model), plan_device(config, find_gpu("H200"))).workload
    planned = memory(replace(resolved, document_length=document, with_evaluation=False))
    assert planned.allocated / 2**30 == pytest.approx(gib, rel=0.01)
