"""What computes faster computes the same: in 8 bits, in 4, by kernels of our own, in 16 bits throughout."""

from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from sojourn.config.load import load_run
from sojourn.data.artefact import Batch
from sojourn.errors import UserError
from sojourn.model.kernels import fp8
from sojourn.model.kernels import fused_forwards as forwards
from sojourn.model.kernels.fused_forwards import _turned
from sojourn.model.kernels.triton_support import supports_triton
from sojourn.model.network import wrap_model
from sojourn.resolve.device_spec import DeviceSpec
from sojourn.resolve.kernels import fp8_unsupported_reason
from sojourn.train.batcher import Batcher
from sojourn.train.objective.supervised import Supervised

GPU = torch.cuda.is_available() and supports_triton()
needs_gpu = pytest.mark.skipif(not GPU, reason="the kernel is for GPUs")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, scope="module")
def _kernels_where_they_work():
    fp8.try_kernels(torch.device(DEVICE))
    assert fp8.Kernels.work == GPU
    yield
    fp8.try_kernels(torch.device("cpu"))


def _apart(one, other) -> float:
    return float((one.detach().double() - other.detach().double()).norm() / other.detach().double().norm())


both_ways = pytest.mark.parametrize("forward", [True, False], ids=["both ways", "backwards alone"])


@both_ways
@pytest.mark.parametrize("rows", [(2, 48), (3, 7)], ids=["whole", "rows that 8 bits cannot multiply"])
@pytest.mark.parametrize("bias", [True, False])
def test_8_bits_are_near_16_and_exactly_so_in_scale(rows, bias, forward):
    """Whatever the size of the numbers: each tensor is scaled to its own range."""
    torch.manual_seed(0)
    for size in (1e-6, 1.0, 1e4):
        x = (size * torch.randn(*rows, 64, device=DEVICE)).bfloat16().requires_grad_()
        weight = torch.randn(80, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        add = torch.randn(80, device=DEVICE, dtype=torch.bfloat16) if bias else None
        upstream = torch.randn(*rows, 80, device=DEVICE, dtype=torch.bfloat16) / size
        plain, ours = F.linear(x, weight, add), fp8.multiply(x, weight, add, forward)
        wanted = torch.autograd.grad(plain, (x, weight), upstream)
        found = torch.autograd.grad(ours, (x, weight), upstream)
        assert ours.dtype == plain.dtype and _apart(ours, plain) < (0.06 if forward else 0.005)
        assert all(_apart(a, b) < 0.1 and a.dtype == b.dtype for a, b in zip(found, wanted, strict=True))
        narrow = _apart(found[0], wanted[0]) > 0.01
        assert narrow == (rows == (2, 48))


@both_ways
def test_frozen_weights_in_8_bits_hand_gradients_on(forward):
    torch.manual_seed(0)
    x = torch.randn(2, 48, 64, device=DEVICE).bfloat16().requires_grad_()
    weight, upstream = (torch.randn(n, m, device=DEVICE).bfloat16() for n, m in ((80, 64), (96, 80)))
    plain, ours = F.linear(x, weight), fp8.multiply(x, weight, None, forward)
    wanted, found = (torch.autograd.grad(y, x, upstream.view_as(y))[0] for y in (plain, ours))
    assert _apart(ours, plain) < (0.06 if forward else 0.005) and 0.01 < _apart(found, wanted) < 0.1


@both_ways
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_a_feed_forward_in_8_bits_is_near_one_in_32(size, forward):
    torch.manual_seed(0)
    x = (size * torch.randn(3, 32, 64, device=DEVICE)).bfloat16().requires_grad_()
    joined = (torch.randn(2 * 96, 64, device=DEVICE) / 8).bfloat16().requires_grad_()
    down = (torch.randn(64, 96, device=DEVICE) / 9).bfloat16().requires_grad_()
    upstream = torch.randn(3, 32, 64, device=DEVICE, dtype=torch.bfloat16)
    gate, other = F.linear(x.float(), joined.float()).chunk(2, -1)
    plain, ours = F.linear(F.silu(gate) * other, down.float()), fp8.feed_forward(x, joined, down, forward)
    wanted = torch.autograd.grad(plain, (x, joined, down), upstream.float())
    found = torch.autograd.grad(ours, (x, joined, down), upstream)
    assert ours.dtype == torch.bfloat16 and _apart(ours, plain) < (0.1 if forward else 0.01)
    assert all(0.01 < _apart(a, b) < 0.15 and a.dtype == b.dtype for a, b in zip(found, wanted, strict=True))


@both_ways
def test_heads_in_8_bits_are_near_those_in_32(forward):
    torch.manual_seed(0)
    x = torch.randn(3, 32, 64, device=DEVICE).bfloat16().requires_grad_()
    joined = (torch.randn((4 + 2 * 2) * 16, 64, device=DEVICE) / 8).bfloat16().requires_grad_()
    angles = torch.rand(3, 32, 8, device=DEVICE).repeat(1, 1, 2)
    parts = F.linear(x.float(), joined.float()).unflatten(-1, (-1, 16)).split([4, 2, 2], 2)
    plain = (*_turned(parts[0], parts[1], angles.cos(), angles.sin()), parts[2])
    ours = fp8.heads(x, joined, angles.cos().bfloat16(), angles.sin().bfloat16(), (4, 2), forward)
    upstream = [torch.randn_like(one) for one in plain]
    wanted = torch.autograd.grad(plain, (x, joined), upstream)
    found = torch.autograd.grad(ours, (x, joined), [one.bfloat16() for one in upstream])
    most = 0.06 if forward else 0.01
    assert all(_apart(a, b) < most and a.dtype == torch.bfloat16 for a, b in zip(ours, plain, strict=True))
    assert all(0.01 < _apart(a, b) < 0.1 and a.dtype == b.dtype for a, b in zip(found, wanted, strict=True))
    assert fp8.heads(x[:1, :7], joined, angles, angles, (4, 2)) is None


def test_a_model_in_8_bits_has_nearly_the_loss_and_gradients_of_one_in_16():
    """On whole rows. The more is in 8 bits, the further off it is; of the backward alone, the loss is not."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=512, tie_word_embeddings=False)
    plain = LlamaForCausalLM(config).to(DEVICE)
    ids = np.random.default_rng(0).integers(0, 512, (2, 33))
    places = np.tile(np.arange(32), (2, 1))
    batch = Batch(ids[:, :-1], ids[:, 1:], places, np.zeros((2, 32), np.int32))
    found = []
    for narrow in ("off", "backward", "except_last_layer", "on"):
        model = deepcopy(plain)
        network = wrap_model(model, "sdpa", torch.bfloat16)
        forwards.apply_fused_forwards(model)
        if narrow != "off":
            forwards.apply_fp8(model, narrow)
        loss = Supervised().loss_sum(network, Batcher(2, 32, 0, DEVICE, "bf16").to_device(batch))
        loss.backward()
        found.append((float(loss.detach()), {name: weight.grad for name, weight in model.named_parameters()}))
    (wide, wanted), *narrowed = found
    assert narrowed[0][0] == pytest.approx(wide, rel=1e-6 if DEVICE == "cpu" else 1e-4)
    assert all(near != wide and near == pytest.approx(wide, rel=2e-3) for near, _ in narrowed[1:])
    assert all(_apart(grads[name], wanted[name]) < 0.15 for _, grads in narrowed for name in wanted)
    layers = [f"model.layers.{block}.{name}.weight" for block in (0, 1) for name in ("self_attn.o_proj", "mlp.up_proj")]
    back, inner, on = (
        [_apart(grads[name], wanted[name]) for name in (*layers, "lm_head.weight")] for _, grads in narrowed
    )
    assert 0 < sum(back) < 0.9 * sum(on) and back[-1] < 0.01 and 0 < inner[-1] < 0.8 * on[-1]


def test_kernels_for_8_bits_are_tried_before_they_are_used():
    """Where they fail or make other numbers, training goes on without them."""
    numbers = torch.tensor([1.0, 16.0, -448.0, 0.0]).repeat(100)
    once = numbers.clone()
    once[5] = 14.0
    assert fp8._alike(numbers, numbers) and fp8._alike(once, numbers)
    twice = numbers.clone()
    twice[5] = 8.0
    assert not fp8._alike(twice, numbers) and not fp8._alike(numbers * 1.125, numbers)


def test_8_bits_of_nothing_are_nothing():
    x = torch.zeros(16, 32, dtype=torch.bfloat16, device=DEVICE)
    assert not fp8.multiply(x, torch.zeros(16, 32, dtype=torch.bfloat16, device=DEVICE), None).any()
    assert fp8.feed_forward(x[:7], torch.zeros(64, 32), torch.zeros(32, 32)) is None


@needs_gpu
@pytest.mark.parametrize("shape", [(64, 128), (48, 80), (4096, 768), (1040, 11008)])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_narrowing_kernel_narrows_as_torch_does_and_turns(shape, kind):
    from sojourn.model.kernels.fp8_cast import narrowed_both, narrowed_turned

    torch.manual_seed(0)
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    scale = fp8._scale(fp8._largest(x), kind)
    wanted = fp8._narrowed(x, scale, kind)
    lying, turned = narrowed_both(x, scale, kind)
    assert torch.equal(turned.view(torch.uint8), lying.t().contiguous().view(torch.uint8))
    assert torch.equal(turned.view(torch.uint8), narrowed_turned(x, scale, kind).view(torch.uint8))
    assert fp8._alike(lying.float(), wanted.float())


@needs_gpu
@pytest.mark.parametrize("width", [96, 1024, 5504])
def test_the_gate_s_kernels_know_the_largest_numbers_and_narrow(width):
    from sojourn.model.kernels.swiglu import gated, gated_back_narrowed, gated_measured

    torch.manual_seed(0)
    joined = torch.randn(150, 2 * width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(150, width, device="cuda", dtype=torch.bfloat16)
    plain = gated(joined)
    made, most = gated_measured(joined.detach())
    torch.testing.assert_close(made, plain)
    for found, wanted in zip(most, (plain, joined), strict=True):
        assert float(found.amax()) == pytest.approx(float(wanted.detach().abs().amax()), rel=0.01)
    wide = joined.detach().float().requires_grad_()
    (wanted,) = torch.autograd.grad(gated(wide), wide, upstream.float())
    kind = torch.float8_e5m2
    scale = fp8._scale(300 * fp8._largest(wanted), kind)
    lying, turned = gated_back_narrowed(upstream, joined.detach(), scale)
    assert torch.equal(turned.view(torch.uint8), lying.t().contiguous().view(torch.uint8))
    assert fp8._alike(lying.float(), fp8._narrowed(wanted, scale, kind).float())


@pytest.mark.parametrize("seed", range(8))
def test_no_gradient_of_a_gate_is_beyond_its_bound(seed):
    """Also where single numbers are far larger than the rest."""
    torch.manual_seed(seed)
    grad, wide, down = (torch.randn(*shape) ** (1 + 2 * (seed % 3)) for shape in ((20, 32), (20, 96), (32, 48)))
    wide.requires_grad_()
    gate, other = wide.chunk(2, -1)
    (made,) = torch.autograd.grad((F.silu(gate) * other) @ down.t(), wide, grad)
    bound = fp8._bound(grad, down.abs().amax(), wide.detach().abs().amax())
    assert made.abs().amax() * 1.3 < bound < 1e5 * made.abs().amax()


@pytest.mark.parametrize("nested", [True, False])
def test_4_bits_multiply_as_bitsandbytes_does(nested):
    bnb = pytest.importorskip("bitsandbytes")
    from sojourn.model.kernels import nf4

    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    layer = bnb.nn.Linear4bit(128, 96, compute_dtype=dtype, quant_type="nf4", compress_statistics=nested).to(DEVICE)
    x = torch.randn(3, 40, 128, device=DEVICE, dtype=dtype, requires_grad=True)
    upstream = torch.randn(3, 40, 96, device=DEVICE, dtype=dtype)
    plain = layer(x)
    ours = nf4.multiply(x, layer.weight, layer.weight.quant_state, layer.bias)
    assert _apart(ours, plain) < (0.01 if DEVICE == "cuda" else 1e-6)
    wanted, found = (torch.autograd.grad(y, x, upstream)[0] for y in (plain, ours))
    assert _apart(found, wanted) < (0.01 if DEVICE == "cuda" else 1e-6)


def test_selective_recomputation_keeps_what_4_bits_made():
    """Else each block would be multiplied out twice, which is what `full` is for."""
    from torch.utils.checkpoint import CheckpointPolicy

    from sojourn.model.activation_checkpointing import _policy
    from sojourn.model.kernels import nf4  # noqa: F401  registers the operation

    assert _policy(None, torch.ops.sojourn.nf4_linear.default) is CheckpointPolicy.MUST_SAVE


@needs_gpu
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(12, 12, 64), (28, 4, 128), (6, 2, 96)])
def test_the_rotary_kernel_turns_as_torch_does(heads, kv_heads, size):
    from sojourn.model.kernels.rope import turned_apart

    torch.manual_seed(0)
    joined = torch.randn(3, 100, (heads + 2 * kv_heads) * size, device="cuda", requires_grad=True)
    angles = torch.rand(3, 100, size // 2, device="cuda").repeat(1, 1, 2)
    parts = joined.unflatten(-1, (-1, size)).split([heads, kv_heads, kv_heads], 2)
    wanted = (*_turned(parts[0], parts[1], angles.cos(), angles.sin()), parts[2])
    found = turned_apart(joined, angles.cos(), angles.sin(), heads, kv_heads)
    upstream = [torch.randn(3, n, 100, size, device="cuda").transpose(1, 2) for n in (heads, kv_heads, kv_heads)]
    for mine, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, reference)
    torch.testing.assert_close(*(torch.autograd.grad(made, joined, upstream)[0] for made in (found, wanted)))


@needs_gpu
def test_the_rotary_kernel_knows_the_largest_number_that_it_makes():
    from sojourn.model.kernels.rope import turned_together, turned_together_measured

    torch.manual_seed(0)
    parts = [torch.randn(3, 100, n, 96, device="cuda", dtype=torch.bfloat16) for n in (6, 2, 2)]
    angles = torch.rand(3, 100, 48, device="cuda").repeat(1, 1, 2)
    for part in parts:  # each has the largest number once
        part[1, 7, 1, 3] = 50.0
        made, most = turned_together_measured(*parts, angles.cos(), angles.sin())
        torch.testing.assert_close(made, turned_together(*parts, angles.cos(), angles.sin()))
        wanted = made.float().abs().amax(-1).flatten()
        torch.testing.assert_close(most, wanted, rtol=0.01, atol=0.0)
        part[1, 7, 1, 3] = 0.0


@needs_gpu
@pytest.mark.parametrize("width", [7, 1024, 5504])
def test_the_gate_s_kernel_computes_as_torch_does(width):
    from sojourn.model.kernels.swiglu import gated

    torch.manual_seed(0)
    joined = torch.randn(3, 50, 2 * width, device="cuda", requires_grad=True)
    gate, other = joined.chunk(2, -1)
    wanted, found = F.silu(gate) * other, gated(joined)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(wanted)
    torch.testing.assert_close(*(torch.autograd.grad(made, joined, upstream)[0] for made in (found, wanted)))


@needs_gpu
def test_the_optimizer_s_kernel_updates_as_torch_does():
    """Large and small tensors, decayed or not, gradients shortened on the way, and a step that turns out to be bad."""
    from sojourn.train.optim.adamw import LARGE, AdamW

    def run(kind):
        torch.manual_seed(0)
        weights = [torch.randn(size, device="cuda", requires_grad=True) for size in (LARGE + 77, 500, 2 * LARGE)]
        groups = [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:], "weight_decay": 0.0}]
        optimizer = kind(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
        for step in range(6):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.grad_scale = torch.tensor(1.0 + step, device="cuda") if step > 1 else None
            optimizer.found_inf = torch.tensor(float(step == 4), device="cuda") if step > 2 else None
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")  # nothing may wait for the GPU
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
            optimizer.zero_grad()
        return weights, [optimizer.state[weight] for weight in weights]

    (ours, mine), (theirs, wanted) = run(AdamW), run(torch.optim.AdamW)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for one, other in zip(mine, wanted, strict=True):
        assert one.keys() == other.keys() and float(one["step"]) == float(other["step"]) == 5
        torch.testing.assert_close(one["exp_avg_sq"], other["exp_avg_sq"], rtol=1e-5, atol=1e-8)


@needs_gpu
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 7), (300, 500), (257, 32_000), (9, 151_936)])
def test_the_loss_kernel_is_the_cross_entropy_and_its_gradient(tokens, vocabulary):
    from sojourn.model.kernels.cross_entropy import losses_and_gradients

    torch.manual_seed(0)
    logits = (5 * torch.randn(tokens, vocabulary, device="cuda")).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
    wanted = F.cross_entropy(logits, labels, reduction="none")
    (gradient,) = torch.autograd.grad(wanted.sum(), logits)
    used = logits.detach().clone()
    torch.testing.assert_close(losses_and_gradients(used, labels), wanted)
    torch.testing.assert_close(used, gradient, atol=1e-6, rtol=1e-4)


def test_8_bits_where_they_cannot_be_are_refused_in_one_line():
    cpu, h200 = DeviceSpec("cpu", "cpu", "bf16"), DeviceSpec("cuda", "H200", "bf16", compute_capability=(9, 0))
    assert "CUDA" in fp8_unsupported_reason(cpu, "bf16", True) and "fused" in fp8_unsupported_reason(
        h200, "bf16", False
    )
    assert fp8_unsupported_reason(h200, "bf16", True) is None and "bf16" in fp8_unsupported_reason(h200, "fp16", True)
    config = load_run(["small", "train.fp8=on", "train.device=cpu"]).config
    from sojourn.train.resolve import resolve_here

    with pytest.raises(UserError, match=r"train\.fp8: needs a CUDA GPU, but this run is on cpu; leave it off"):
        resolve_here(config)
