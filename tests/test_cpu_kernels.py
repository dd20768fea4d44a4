"""The CPU kernels compute what torch computes, on any number of threads, and are used where they can be."""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from sojourn.config.load import load_run, with_settings
from sojourn.errors import UserError
from sojourn.machine.probe_software import find_gcc
from sojourn.model import loss
from sojourn.model.activation_checkpointing import apply_activation_checkpointing
from sojourn.model.attention import AttentionParams, attend
from sojourn.model.kernels import fused_forwards
from sojourn.model.kernels.cpu import compile_c, library
from sojourn.model.kernels.cpu.blocked_layer import fits_blocked_layer
from sojourn.model.kernels.cpu.decoder import decoder_on_cpu
from sojourn.model.kernels.cpu.decoder_layer import layer_on_cpu
from sojourn.model.kernels.cpu.smoke_test import decoder_by_torch, enable_cpu_kernels, failure, layer_by_torch
from sojourn.model.kernels.fused_forwards import apply_fused_forwards
from sojourn.model.layout import Layout, compute_cu_seqlens, make_layout, pad_cu_seqlens
from sojourn.model.network import wrap_model
from sojourn.model.prune_last_layer import prune_last_layer
from sojourn.resolve.device_spec import DeviceSpec
from sojourn.resolve.kernels import cpu_kernels_unsupported_reason
from sojourn.train.batcher import Batcher
from sojourn.train.optim.adamw_cpu import AdamW
from sojourn.train.resolve import resolve_here
from test_prune_last_layer import PACKED, UNPACKED, WIDTH, _batch, _compare, _model

_NARROW = {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
needs_gcc = pytest.mark.skipif(find_gcc() is None, reason="no gcc, or not Linux")


def _twins(family: str, checkpointing: str):
    """transformers' own network, and ours with the kernels."""
    model = _model(family)
    ours = wrap_model(copy.deepcopy(model), "sdpa")
    apply_fused_forwards(ours.base_model)
    assert enable_cpu_kernels(ours.base_model)
    ours = prune_last_layer(ours)
    if checkpointing != "off":
        apply_activation_checkpointing(ours.base_model, checkpointing)
    for network, unpad in ((wrap_model(model, "sdpa"), False), (ours, True)):
        yield network, Batcher(8, WIDTH, 0, "cpu", windows=network.sliding_windows, unpad=unpad)


@needs_gcc
@pytest.mark.parametrize("checkpointing", ["off", "selective", "full"])
@pytest.mark.parametrize("lengths", [PACKED, UNPACKED, ([WIDTH], [WIDTH])], ids=["packed", "unpacked", "whole"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_loss_and_gradients_are_those_of_transformers(family, lengths, checkpointing, monkeypatch):
    calls = _count_calls(monkeypatch)
    _compare(_twins(family, checkpointing), _batch(lengths, 1.0))
    is_whole = family == "llama" and checkpointing == "off"
    by_layer = not is_whole and family != "qwen3" and checkpointing != "selective"
    assert (bool(calls["decoder_on_cpu"]), bool(calls["layer_on_cpu"])) == (is_whole, by_layer)  # else torch's


def _count_calls(monkeypatch) -> Counter[str]:
    """Of the two functions that fused forwards call on a CPU."""
    calls = Counter()
    for name in ("decoder_on_cpu", "layer_on_cpu"):
        function = getattr(fused_forwards, name)
        monkeypatch.setattr(
            fused_forwards, name, lambda *args, name=name, of=function: calls.update([name]) or of(*args)
        )
    return calls


@needs_gcc
def test_a_decoder_with_few_targets_goes_layer_by_layer_so_that_the_last_one_is_pruned(monkeypatch):
    calls = _count_calls(monkeypatch)
    _compare(_twins("llama", "off"), _batch(PACKED, 0.3))
    assert calls["layer_on_cpu"] and not calls["decoder_on_cpu"]


@needs_gcc
def test_a_wide_decoder_and_one_with_other_positions_go_layer_by_layer():
    def whole(**settings) -> bool:
        model = LlamaForCausalLM(LlamaConfig(**_NARROW | settings))
        apply_fused_forwards(model)
        return bool(fused_forwards.CpuDecoder.of(model.model))

    assert whole()
    assert not whole(hidden_size=160, num_attention_heads=5, num_key_value_heads=5)
    assert not whole(attention_bias=True)
    assert not whole(attention_dropout=0.1)
    assert not whole(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})


@needs_gcc
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("lengths", [[1], [64] * 4, [150, 3, 1, 95, 33]], ids=str)
def test_a_decoder_is_that_of_torch_on_any_number_of_threads(layers, lengths):
    torch.manual_seed(0)
    tokens, head_dim = sum(lengths), 16
    ids, angles = torch.randint(11, (1, tokens)), torch.randn(1, tokens, head_dim // 2).repeat(1, 1, 2)
    targets = torch.arange(tokens)[torch.arange(tokens) % 5 != 1]
    given = library.DecoderInputs(ids, targets, angles.cos(), angles.sin(), _layout(lengths))
    settings = library.DecoderSettings(head_dim**-0.5, head_dim, (1e-5,) * (2 * layers + 1), padding=4)
    weights = [torch.randn(11, 48), torch.rand(48) + 0.5]
    for _ in range(layers):
        weights += _layer_weights(48, 4, 2, head_dim, 100)
    grad, exact = torch.randn(len(targets), 48), [weight.double().requires_grad_() for weight in weights]
    expected = decoder_by_torch(
        replace(given, cos=given.cos.double(), sin=given.sin.double()), settings, exact
    )  # fmt: skip
    wanted, made = [expected, *torch.autograd.grad(expected, exact, grad.double())], []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            leaves = [weight.clone().requires_grad_() for weight in weights]
            out = decoder_on_cpu(given, settings, leaves)
            with torch.no_grad():
                assert torch.equal(decoder_on_cpu(given, settings, leaves), out)
            made.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    finally:
        torch.set_num_threads(before)
    for results in made:
        for ours, theirs in zip(results, wanted, strict=True):
            assert (ours - theirs).norm() <= 1e-5 * (1e-3 + theirs.norm())
        assert all(map(torch.equal, results, made[0]))
    assert not made[0][1][4].any()  # the embedding of padding


@needs_gcc
@pytest.mark.parametrize("tokens, size, vocabulary", [(1, 8, 3), (200, 128, 65), (333, 50, 512)])
def test_a_small_lm_head_and_its_loss_are_those_of_torch(tokens, size, vocabulary, monkeypatch):
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(size, vocabulary, bias=False), torch.randn(tokens, size)
    labels = torch.randint(vocabulary, (tokens,)).masked_fill(torch.arange(tokens) % 7 == 3, -100)
    calls, function = [], loss.linear_cross_entropy
    monkeypatch.setattr(loss, "linear_cross_entropy", lambda *args: calls.append(1) or function(*args))
    made, before = [], torch.get_num_threads()
    try:
        for threads, head.cpu_kernels in ((1, False), (1, True), (3, True)):
            torch.set_num_threads(threads)
            leaf = hidden.clone().requires_grad_()
            total = loss.cross_entropy_sum(head, leaf, labels) / 3
            made.append([total.detach(), *torch.autograd.grad(total, (leaf, head.weight))])
    finally:
        torch.set_num_threads(before)
    assert len(calls) == 2
    torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, made[1], made[2]))


def _layout(lengths: list[int]) -> Layout:
    """Of documents end to end in one row."""
    documents = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    starts = torch.from_numpy(pad_cu_seqlens(compute_cu_seqlens(documents)))
    return make_layout("sdpa", documents, torch.from_numpy(documents), starts, ())


@needs_gcc
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(1, 1, 8), (4, 2, 46), (3, 3, 128)])
@pytest.mark.parametrize("lengths", [[1], [32], [33], [64, 1, 31], [150, 3]], ids=str)
def test_attention_is_that_of_torch(lengths, heads, kv_heads, head_dim):
    torch.manual_seed(0)
    layout, scale = _layout(lengths), head_dim**-0.5
    shapes = [(1, sum(lengths), count, head_dim) for count in (heads, kv_heads, kv_heads)]
    query, key, value, grad = (5 * torch.randn(shape) for shape in (*shapes, shapes[0]))
    exact = [one.double().requires_grad_() for one in (query, key, value)]
    expected = attend(*exact, layout, AttentionParams(scale))
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    out, lse = library.attention_forward(query, key, value, layout, scale)
    grads = library.attention_backward(grad, query, key, value, lse, layout, scale)
    for made, wanted in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (made - wanted).norm() <= 1e-5 * (1 + wanted.norm())


@needs_gcc
def test_a_nan_in_attention_stays_within_its_document():
    query, key, value = torch.randn(3, 1, 40, 2, 16)
    key[0, 5, 0, 3] = float("nan")
    out, _ = library.attention_forward(query, key, value, _layout([20, 20]), 0.25)
    assert out[0, 5:20, 0].isnan().all() and out[0, :5].isfinite().all()
    assert out[0, 20:].isfinite().all() and out[0, :, 1].isfinite().all()


@needs_gcc
def test_results_do_not_depend_on_the_number_of_threads():
    torch.manual_seed(0)
    x, weight, grad = torch.randn(300, 128), torch.randn(128), torch.randn(300, 128)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            logits = torch.cat((x, grad), 1)
            out, scale = library.rms_norm_forward(x, weight, 1e-6)
            made = [out, *library.rms_norm_backward(grad, x, weight, scale, out), library.swiglu_forward(x, grad)]
            qkv, layout = [one.view(6, 50, -1, 16) for one in (x, grad, out)], _layout([50] * 6)
            attended, lse = library.attention_forward(*qkv, layout, 0.25)
            made += [attended, *library.attention_backward(attended, *qkv, lse, layout, 0.25)]
            results.append([*made, library.cross_entropy_with_grad(logits, torch.arange(300) % 256), logits])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


@needs_gcc
def test_extreme_values_are_those_of_torch():
    gate = torch.tensor([-1e30, -200.0, -88.5, -1e-30, 0.0, 1e-30, 88.5, 200.0, 1e30, float("nan")])
    torch.testing.assert_close(library.swiglu_forward(gate, torch.ones(10)), F.silu(gate), equal_nan=True)
    logits = torch.tensor([[0.0, -float("inf"), 300.0], [float("nan"), 0.0, 0.0], [0.0, 0.0, float("nan")]])
    labels = torch.tensor([0, 1, 1])
    expected = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(library.cross_entropy_with_grad(logits, labels), expected, equal_nan=True)


@pytest.fixture
def tested_anew():
    """The smoke test is made once per process."""
    caches = (library.load_library, failure)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_without_a_compiler_the_run_goes_on_with_torch_and_says_so(monkeypatch, capsys, tested_anew):
    monkeypatch.setattr(compile_c, "find_gcc", lambda: None)
    enabled = enable_cpu_kernels(_model("llama"))
    assert not enabled and "using torch's, slower" in capsys.readouterr().out


@needs_gcc
def test_a_wrong_kernel_is_not_used(monkeypatch, capsys, tested_anew):
    monkeypatch.setattr(library, "swiglu_forward", lambda gate, up: gate * up)
    assert not enable_cpu_kernels(_model("llama"))
    assert "failed their smoke test (swiglu)" in capsys.readouterr().out


@needs_gcc
def test_another_environment_finds_what_one_has_compiled(tmp_path, monkeypatch):
    def run(*_, **__):
        raise subprocess.SubprocessError("gcc was started")

    library.load_library()  # compiled, by now
    other = shutil.copytree(Path(compile_c.__file__).parent, tmp_path / "cpu")
    monkeypatch.setattr(compile_c, "_SHARED", other)
    monkeypatch.setattr(subprocess, "run", run)
    assert compile_c.compile_library(other, {})
    (other / "kernels.c").write_text("int changed;\n")
    with pytest.raises(subprocess.SubprocessError, match="gcc was started"):
        compile_c.compile_library(other, {})


def test_where_they_are_unsupported_they_are_refused_with_the_reason():
    def settings(*words):
        return resolve_here(load_run(["tiny", "train.device=cpu", "train.precision=fp32", *words]).config).config

    assert settings().advanced.cpu_kernels == ("off" if find_gcc() is None else "on")
    assert settings("train.compile=on").advanced.cpu_kernels == "off"
    with pytest.raises(UserError, match=r"advanced\.cpu_kernels: train\.compile=on makes kernels of its own; use auto"):
        settings("train.compile=on", "advanced.cpu_kernels=on")
    cpu, config = DeviceSpec("cpu", "cpu", "fp32", has_gcc=True), settings()
    assert cpu_kernels_unsupported_reason(config, cpu) is None
    assert "fsdp" in cpu_kernels_unsupported_reason(with_settings(config, {"parallel.engine": "fsdp"}), cpu)
    assert "gcc" in cpu_kernels_unsupported_reason(config, replace(cpu, has_gcc=False))
    assert "on cuda" in cpu_kernels_unsupported_reason(config, replace(cpu, device_type="cuda"))


@needs_gcc
def test_adamw_is_that_of_torch_over_many_steps_and_after_a_resume():
    torch.manual_seed(0)
    weights = [torch.randn(shape) for shape in ((300, 70), (5000,), (1,))]
    ours, theirs = ([torch.nn.Parameter(weight.clone()) for weight in weights] for _ in range(2))
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = [AdamW(ours, **settings), torch.optim.AdamW(theirs, **settings)]
    for step in range(20):
        if step == 10:  # states of torch's own are taken up, as from a checkpoint
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        grads = [torch.randn_like(weight) * (step % 3) for weight in weights]
        for parameters in (ours, theirs):
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = None if step == 5 and len(grad) == 1 else grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        torch.testing.assert_close(optimizers[0].grad_norm(), norm)
        optimizers[0].grad_scale = ((norm + 1e-6) / 1.0).clamp(min=1.0)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _layer_weights(size: int, heads: int, kv_heads: int, head_dim: int, ffn: int) -> list[torch.Tensor]:
    """In the order of layer_on_cpu."""
    shapes = [(heads * head_dim, size), *[(kv_heads * head_dim, size)] * 2, (size, heads * head_dim)]
    matrices = [torch.randn(shape) / shape[1] ** 0.5 for shape in (*shapes, (ffn, size), (ffn, size), (size, ffn))]
    norms = [torch.rand(size) + 0.5 for _ in range(2)]
    return [norms[0], *matrices[:4], norms[1], *matrices[4:]]


@needs_gcc
@pytest.mark.parametrize("lengths", [[1], [64] * 4, [150, 3, 1, 95, 33]], ids=str)
@pytest.mark.parametrize(
    "size, heads, kv_heads, head_dim, ffn",
    [(128, 4, 4, 32, 384), (50, 3, 1, 22, 77), (96, 6, 2, 24, 500), (16, 1, 1, 8, 3), (160, 4, 2, 40, 300)],
)
def test_a_layer_is_that_of_torch_and_a_blocked_one_on_any_number_of_threads(
    size, heads, kv_heads, head_dim, ffn, lengths
):
    torch.manual_seed(0)
    layout, weights = _layout(lengths), _layer_weights(size, heads, kv_heads, head_dim, ffn)
    is_blocked = fits_blocked_layer(weights)
    assert is_blocked == (size <= 128)
    x, grad = torch.randn(2, 1, sum(lengths), size)
    angles = torch.randn(1, sum(lengths), head_dim // 2).repeat(1, 1, 2)
    rotation, scale, made = (angles.cos(), angles.sin()), head_dim**-0.5, []
    exact = [one.double().requires_grad_() for one in (x, *weights)]
    expected = layer_by_torch(exact[0], *(one.double() for one in rotation), layout, scale, head_dim, exact[1:])
    wanted = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            leaves = [one.clone().requires_grad_() for one in (x, *weights)]
            params, eps = AttentionParams(scale), (1e-5, 1e-5)
            out = layer_on_cpu(leaves[0], rotation, layout, params, head_dim, eps, tuple(leaves[1:]))
            assert ("BlockedLayer" in type(out.grad_fn).__name__) == is_blocked
            made.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    finally:
        torch.set_num_threads(before)
    for results in made:
        for ours, theirs in zip(results, wanted, strict=True):
            assert (ours - theirs).norm() <= 1e-5 * (1e-3 + theirs.norm())
    assert not is_blocked or all(
        torch.equal(*pair) for others in made[1:] for pair in zip(made[0], others, strict=True)
    )
