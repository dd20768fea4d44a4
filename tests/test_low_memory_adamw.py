"""AdamW with bf16 weights, 8-bit states and states in host memory: each against what it replaces."""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sojourn.config.schema import TrainConfig
from sojourn.estimate.memory import memory
from sojourn.estimate.model_states import (
    gradients,
    host_buffers,
    host_bytes,
    optimizer_states,
    state_bytes,
    weights,
)
from sojourn.estimate.workload import Workload
from sojourn.plan.run_time import checkpoint_bytes
from sojourn.resolve.config_json import spec_of_settings
from sojourn.resolve.model_spec import base_model_spec
from sojourn.train.optim import low_memory_adamw
from sojourn.train.optim.blockwise_8bit import code_values, dequantize, quantize
from sojourn.train.optim.low_memory_adamw import LowMemoryAdamW
from sojourn.train.optim.optimizers import Optimizer
from sojourn.train.optim.stochastic_rounding import rounding_seed, stochastic_round

SHAPES = ((40, 256), (70, 100), (256,), (3, 5))


def _optimizer(parameters, rounding="fp32", eight_bit=False, on_host=False, lr=1e-3):
    groups = [{"params": parameters, "weight_decay": 0.1}]
    names = ("state1", "state2") if eight_bit else ("exp_avg", "exp_avg_sq")
    return LowMemoryAdamW(groups, lr, (0.9, 0.95), 1e-8, rounding, eight_bit, on_host, names)


def _parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter((0.1 * torch.randn(shape)).bfloat16().to(dtype)) for shape in SHAPES]


def _steps(optimizer, parameters, count=20, order=1):
    torch.manual_seed(1)
    for _ in range(count):
        grads = [torch.randn(p.shape) * 0.01 for p in parameters]
        optimizer.start_step()
        for parameter, grad in list(zip(parameters, grads, strict=True))[::order]:
            parameter.grad = grad.bfloat16().to(parameter.dtype)
            optimizer.update(parameter, low_memory_adamw.grad_norm(parameter.grad))
    return [parameter.detach().float() for parameter in parameters]


def _distance(ones, others):
    return float(sum((a - b).square().sum() for a, b in zip(ones, others, strict=True)) ** 0.5)


def test_fp32_weights_are_torchs_own_to_the_last_bit():
    ours, theirs = _parameters(), _parameters()
    reference = torch.optim.AdamW(theirs, 1e-3, (0.9, 0.95), 1e-8, 0.1, fused=True)
    torch.manual_seed(1)
    for _ in range(5):
        for parameter in theirs:
            parameter.grad = (torch.randn(parameter.shape) * 0.01).bfloat16().float()
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(_steps(_optimizer(ours), ours, 5), theirs, strict=True))


def test_stochastic_rounding_is_unbiased_and_never_further_than_a_neighbour():
    values = torch.tensor([1.0, 1.001, -1.003, 3.14159, -1e-20, 2.0**-126, 7e37, 0.0]).repeat_interleave(40_000)
    mean = torch.zeros_like(values, dtype=torch.float64)
    for step in range(1, 6):
        rounded = stochastic_round(values, rounding_seed(step, 3)).double()
        spacing = 2.0 ** (torch.frexp(values)[1] - 8).double()
        assert ((rounded - values).abs() < spacing).all()
        mean += rounded / 5
    means, exact = mean.view(8, -1).mean(1), values.view(8, -1)[:, 0].double()
    spacing = 2.0 ** (torch.frexp(exact)[1] - 8).double()
    assert ((means - exact).abs() <= 4 * 0.5 * spacing / 200_000**0.5).all()  # four standard errors
    assert stochastic_round(torch.tensor([torch.nan, torch.inf, -torch.inf]), 5).tolist()[1:] == [torch.inf, -torch.inf]
    assert stochastic_round(torch.tensor([torch.nan]), 5).isnan()


def test_rounding_depends_on_step_parameter_and_position_alone():
    values = torch.randn(1000)
    whole = stochastic_round(values, rounding_seed(7, 2))
    parts = [stochastic_round(values[i : i + 300], rounding_seed(7, 2), i) for i in range(0, 1000, 300)]
    assert torch.equal(whole, torch.cat(parts))
    for other in (rounding_seed(8, 2), rounding_seed(7, 3)):
        assert 0.3 < (stochastic_round(values, other) != whole).float().mean() < 0.7


def test_small_updates_are_kept_where_rounding_to_nearest_loses_them():
    """100 steps that are each a hundredth of the weight's last bit."""
    ends = {}
    for rounding in ("fp32", "bf16", "bf16_kahan"):
        parameter = torch.nn.Parameter(torch.ones(4096, dtype=torch.float32 if rounding == "fp32" else torch.bfloat16))
        optimizer = _optimizer([parameter], rounding, lr=2.0**-7 / 100)
        for _ in range(100):
            parameter.grad = torch.full_like(parameter, -1.0)
            optimizer.step()
        state = optimizer.state[parameter]
        ends[rounding] = float((parameter.detach().float() + state.get("compensation", torch.zeros(()))).mean()) - 1
    nearest = torch.ones((), dtype=torch.bfloat16) + 2.0**-7 / 100
    assert nearest == 1 and ends["fp32"] == pytest.approx(0.9 * 2.0**-7, rel=0.01)  # a tenth is decay
    assert ends["bf16_kahan"] == pytest.approx(ends["fp32"], rel=0.01)
    assert ends["bf16"] == pytest.approx(ends["fp32"], rel=0.05)


@pytest.mark.parametrize("eight_bit", [False, True])
def test_bf16_weights_follow_fp32_weights(eight_bit):
    def trained(rounding):
        parameters = _parameters(torch.float32 if rounding == "fp32" else torch.bfloat16)
        optimizer = _optimizer(parameters, rounding, eight_bit)
        ends = _steps(optimizer, parameters)
        return [w + optimizer.state[p].get("compensation", 0) for w, p in zip(ends, parameters, strict=True)]

    start = [p.detach() for p in _parameters()]
    exact = trained("fp32")
    moved = _distance(exact, start)
    assert _distance(trained("bf16_kahan"), exact) < 0.02 * moved
    assert _distance(trained("bf16"), exact) < 0.25 * moved  # noise without a direction


def test_the_8bit_code_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    for signed in (True, False):
        assert torch.allclose(code_values(signed), functional.create_dynamic_map(signed), atol=1e-7, rtol=0)
    values = torch.randn(5000)
    numbers, absmax = quantize(values, code_values(True))
    expected, state = functional.quantize_blockwise(values, code=code_values(True), blocksize=256)
    assert (numbers != expected).float().mean() < 0.01 and torch.equal(absmax, state.absmax)
    assert (dequantize(numbers, absmax, code_values(True)) - values).abs().mean() < 0.02


def test_8bit_states_follow_fp32_states_as_those_of_bitsandbytes_do():
    optim = pytest.importorskip("bitsandbytes.optim")
    exact, ours, theirs = _parameters(), _parameters(), _parameters()
    start = [p.detach().clone() for p in exact]
    reference = optim.AdamW8bit(theirs, 1e-3, (0.9, 0.95), 1e-8, 0.1)
    torch.manual_seed(1)
    for _ in range(20):
        for parameter in theirs:
            parameter.grad = (torch.randn(parameter.shape) * 0.01).bfloat16().float()
        reference.step()
    optimizer = _optimizer(ours, eight_bit=True)
    found, wanted = _steps(optimizer, ours), _steps(_optimizer(exact), exact)
    moved = _distance(wanted, start)
    assert _distance(found, wanted) < 1.2 * _distance([p.detach() for p in theirs], wanted) < 0.1 * moved
    for mine, bnbs in zip(ours, theirs, strict=True):  # a checkpoint of one is a checkpoint of the other
        state, other = optimizer.state[mine], reference.state[bnbs]
        assert state.keys() == other.keys()
        for key in state.keys() - {"step"}:
            assert (state[key].shape, state[key].dtype) == (other[key].shape, other[key].dtype)


@pytest.mark.parametrize(
    ("eight_bit", "rounding", "order"),
    [
        pytest.param(eight_bit, rounding, order, marks=pytest.mark.slow if (number + (order < 0)) % 2 else [])
        for number, (eight_bit, rounding) in enumerate(product((False, True), ("fp32", "bf16", "bf16_kahan")))
        for order in (1, -1)
    ],
)
def test_states_in_host_memory_change_nothing(monkeypatch, rounding, eight_bit, order):
    dtype = torch.float32 if rounding == "fp32" else torch.bfloat16
    on_device = _parameters(dtype)
    expected = _steps(_optimizer(on_device, rounding, eight_bit), on_device, 6)
    monkeypatch.setattr(low_memory_adamw, "MIN_HOST_ELEMENTS", 5000)
    monkeypatch.setattr(low_memory_adamw, "host_buffers", lambda *given: (512, 4))
    on_host = _parameters(dtype)
    optimizer = _optimizer(on_host, rounding, eight_bit, on_host=True)
    half = _steps(optimizer, on_host, 6, order)
    assert all(torch.equal(a, b) for a, b in zip(expected, half, strict=True))
    # in another order than in the step before, and with what was fetched ahead
    optimizer.start_step()
    for parameter in (on_host[1], on_host[0]):
        parameter.grad = torch.ones_like(parameter)
        optimizer.update(parameter)
    assert len(optimizer._host._free) + len(optimizer._host._ahead) == 4


def test_a_gradient_that_is_not_finite_changes_nothing():
    parameters = _parameters(torch.bfloat16)
    optimizer = _optimizer(parameters, "bf16", eight_bit=True)
    _steps(optimizer, parameters, 2)
    parameter = parameters[0]
    before = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    weight = parameter.detach().clone()
    parameter.grad = torch.full_like(parameter, torch.inf)
    optimizer.update(parameter, low_memory_adamw.grad_norm(parameter.grad))
    optimizer.undo_step(parameter)
    assert torch.equal(parameter, weight)
    assert all(torch.equal(value, before[key]) for key, value in optimizer.state[parameter].items())


def test_clipping_is_a_part_of_the_update():
    clipped, given = _parameters(torch.bfloat16), _parameters(torch.bfloat16)
    one, other = _optimizer(clipped, "bf16_kahan"), _optimizer(given, "bf16_kahan")
    for parameter in clipped:
        parameter.grad = torch.full_like(parameter, 3.0)
    norm = one.grad_norm()
    assert float(norm) == pytest.approx(3.0 * sum(p.numel() for p in clipped) ** 0.5)
    one.grad_scale = norm
    one.step()
    for parameter in given:
        parameter.grad = torch.full_like(parameter, 3.0 / float(norm))
    other.step()
    assert _distance([p.detach().float() for p in clipped], [p.detach().float() for p in given]) < 1e-4


def test_buffers_hold_a_fixed_amount_however_large_a_parameter_is():
    for eight_bit in (True, False):
        each = state_bytes(eight_bit, kahan=False)
        chunk, count = host_buffers(128_256 * 4096, 8_030_261_248, each)
        assert 0.4 * 2**30 < chunk * count * each <= 0.55 * 2**30
    assert host_buffers(1000, 1300, 8) == (1024, 3)


_SIZES = {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 256,
          "tie_word_embeddings": False}  # fmt: skip


@pytest.mark.parametrize("masters", ["bf16", "bf16_kahan"])
@pytest.mark.parametrize("chosen", [{}, {"optimizer": "adamw_8bit"}, {"optimizer": "paged_adamw_8bit"},
                                    {"offload": "optimizer"}], ids=str)  # fmt: skip
def test_weights_and_states_take_the_bytes_that_are_planned(masters, chosen):
    """States in host memory are on a CPU here, too; so the optimizer's own word counts for where they are."""
    model = LlamaForCausalLM(LlamaConfig(**_SIZES)).to(torch.bfloat16)
    optimizer = Optimizer(model, TrainConfig(master_weights=masters, **chosen), "cpu")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    work = Workload(
        spec_of_settings({**_SIZES, "model_type": "llama"}, "test"), "full", master_weights=masters, **chosen
    )
    taken = sum(p.grad.nbytes for p in model.parameters())
    assert taken == sum(term.bytes for term in weights(work)) == gradients(work).bytes
    optimizer.torch.step()
    on_host = {p for p in model.parameters() if optimizer.torch._host and optimizer.torch._is_on_host(p)}
    bytes_ = {p: sum(t.nbytes for k, t in s.items() if "qmap" not in k) for p, s in optimizer.torch.state.items()}
    host = sum(size for p, size in bytes_.items() if p in on_host)
    assert host_bytes(work) == pytest.approx(host, rel=0.01)
    free = optimizer.torch._host._free if on_host else []
    buffers = sum(tensor.nbytes for buffer in free for tensor in buffer.tensors.values())
    device = sum(bytes_.values()) - host + buffers
    assert sum(term.bytes for term in optimizer_states(work)) == pytest.approx(device, rel=0.03)
    assert checkpoint_bytes(work) == pytest.approx(taken + sum(bytes_.values()), rel=0.01)


def test_a_model_of_8b_parameters_is_planned_into_22_gib():
    model = base_model_spec("llama-3.1-8b")
    fp32 = Workload(
        model, "full", 2, 4096, activation_checkpointing="full", optimizer="paged_adamw_8bit", compiled=False
    )
    apart = replace(fp32, master_weights="bf16")
    inside = replace(apart, optimizer_in_backward=True)
    assert gradients(apart).bytes == 2 * model.parameters and gradients(inside).bytes == 2 * inside.largest_parameter
    assert memory(fp32).allocated > memory(apart).allocated + 3.5 * model.parameters
    assert memory(apart).allocated > memory(inside).allocated + 1.5 * model.parameters
    assert memory(inside).allocated < 21 * 2**30 and 15 < host_bytes(inside) / 2**30 < 15.5


_needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@_needs_gpu
@pytest.mark.parametrize("rounding", ["fp32", "bf16", "bf16_kahan"])
@pytest.mark.parametrize("eight_bit", [False, True])
def test_a_gpu_passes_the_kernels_smoke_test(capsys, rounding, eight_bit):
    low_memory_adamw._kernel_or_torch.cache_clear()
    found = low_memory_adamw._kernel_or_torch(torch.device("cuda"), rounding, eight_bit)
    assert capsys.readouterr().out == "" and found is not low_memory_adamw.update_by_torch


@_needs_gpu
@pytest.mark.parametrize("rounding", ["fp32", "bf16", "bf16_kahan"])
@pytest.mark.parametrize("eight_bit", [False, True])
def test_on_a_gpu_states_in_host_memory_change_nothing(monkeypatch, rounding, eight_bit):
    """With chunks in flight in both directions, of parameters that need many of them."""
    monkeypatch.setattr(low_memory_adamw, "host_buffers", lambda *given: (2**16, 5))
    dtype, ends = torch.float32 if rounding == "fp32" else torch.bfloat16, []
    for on_host in (False, True):
        torch.manual_seed(0)
        parameters = [
            torch.nn.Parameter(torch.randn(size, device="cuda").to(dtype)) for size in (2**21 + 7, 10**6, 300)
        ]
        optimizer = _optimizer(parameters, rounding, eight_bit, on_host)
        for _ in range(5):
            optimizer.start_step()
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
                optimizer.update(parameter, low_memory_adamw.grad_norm(parameter.grad))
        optimizer.synchronize()
        states = [value.cpu() for p in parameters for key, value in optimizer.state[p].items() if "qmap" not in key]
        ends.append([*(p.detach().cpu() for p in parameters), *states])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@_needs_gpu
def test_on_a_gpu_a_gradient_that_is_not_finite_changes_nothing():
    parameter = torch.nn.Parameter(torch.ones(10_000, device="cuda", dtype=torch.bfloat16))
    optimizer = _optimizer([parameter], "bf16", eight_bit=True)
    parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.update(parameter, low_memory_adamw.grad_norm(parameter.grad))
    assert (parameter == 1).all() and not optimizer.state[parameter]["absmax1"].any()


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
def test_the_kernel_computes_what_torch_computes():
    program = Path(__file__).with_name("interpreted_adamw.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
