"""Fused forwards, FP8, NF4 and our Triton kernels compute what torch computes."""

from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shared import FUSED_CHANGES
from sojourn.catalog.fused_families import FUSED_FAMILIES
from sojourn.config.load import load_run
from sojourn.data.artefact import Batch
from sojourn.errors import UserError
from sojourn.model.kernels import fp8
from sojourn.model.kernels import fused_forwards as forwards
from sojourn.model.kernels.qkv_rope import apply_rope
from sojourn.model.kernels.triton_support import supports_triton
from sojourn.model.network import wrap_model
from sojourn.resolve.device_spec import DeviceSpec
from sojourn.resolve.kernels import fp8_unsupported_reason
from sojourn.train.batcher import Batcher
from sojourn.train.objective.supervised import Supervised

GPU = torch.cuda.is_available() and supports_triton()
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU with Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, scope="module")
def _smoke_tested_kernels():
    fp8.smoke_test(torch.device(DEVICE))
    assert fp8.TritonKernels.enabled == GPU
    yield
    fp8.smoke_test(torch.device("cpu"))


def _relative_error(one, other) -> float:
    return float((one.detach().double() - other.detach().double()).norm() / other.detach().double().norm())


both_ways = pytest.mark.parametrize("forward", [True, False], ids=["forward and backward", "backward only"])


@both_ways
@pytest.mark.parametrize("rows", [(2, 48), (3, 7)], ids=["whole", "rows that are not aligned"])
@pytest.mark.parametrize("bias", [True, False])
def test_fp8_linear_is_near_bf16_at_any_magnitude(rows, bias, forward):
    """Each tensor is scaled by its own amax."""
    torch.manual_seed(0)
    for size in (1e-6, 1.0, 1e4):
        x = (size * torch.randn(*rows, 64, device=DEVICE)).bfloat16().requires_grad_()
        weight = torch.randn(80, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        add = torch.randn(80, device=DEVICE, dtype=torch.bfloat16) if bias else None
        upstream = torch.randn(*rows, 80, device=DEVICE, dtype=torch.bfloat16) / size
        plain, ours = F.linear(x, weight, add), fp8.fp8_linear(x, weight, add, forward)
        wanted = torch.autograd.grad(plain, (x, weight), upstream)
        found = torch.autograd.grad(ours, (x, weight), upstream)
        assert ours.dtype == plain.dtype and _relative_error(ours, plain) < (0.06 if forward else 0.005)
        assert all(_relative_error(a, b) < 0.1 and a.dtype == b.dtype for a, b in zip(found, wanted, strict=True))
        used_fp8 = _relative_error(found[0], wanted[0]) > 0.01
        assert used_fp8 == (rows == (2, 48))


@both_ways
def test_frozen_fp8_weights_pass_gradients_to_their_input(forward):
    torch.manual_seed(0)
    x = torch.randn(2, 48, 64, device=DEVICE).bfloat16().requires_grad_()
    weight, upstream = (torch.randn(n, m, device=DEVICE).bfloat16() for n, m in ((80, 64), (96, 80)))
    plain, ours = F.linear(x, weight), fp8.fp8_linear(x, weight, None, forward)
    wanted, found = (torch.autograd.grad(y, x, upstream.view_as(y))[0] for y in (plain, ours))
    assert _relative_error(ours, plain) < (0.06 if forward else 0.005) and 0.01 < _relative_error(found, wanted) < 0.1


@both_ways
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_an_fp8_swiglu_mlp_is_near_an_fp32_one(size, forward):
    torch.manual_seed(0)
    x = (size * torch.randn(3, 32, 64, device=DEVICE)).bfloat16().requires_grad_()
    joined = (torch.randn(2 * 96, 64, device=DEVICE) / 8).bfloat16().requires_grad_()
    down = (torch.randn(64, 96, device=DEVICE) / 9).bfloat16().requires_grad_()
    upstream = torch.randn(3, 32, 64, device=DEVICE, dtype=torch.bfloat16)
    gate, other = F.linear(x.float(), joined.float()).chunk(2, -1)
    plain, ours = F.linear(F.silu(gate) * other, down.float()), fp8.swiglu_mlp(x, joined, down, forward)
    wanted = torch.autograd.grad(plain, (x, joined, down), upstream.float())
    found = torch.autograd.grad(ours, (x, joined, down), upstream)
    assert ours.dtype == torch.bfloat16 and _relative_error(ours, plain) < (0.1 if forward else 0.01)
    assert all(0.01 < _relative_error(a, b) < 0.15 and a.dtype == b.dtype for a, b in zip(found, wanted, strict=True))


@both_ways
def test_fp8_queries_keys_and_values_are_near_fp32(forward):
    torch.manual_seed(0)
    x = torch.randn(3, 32, 64, device=DEVICE).bfloat16().requires_grad_()
    joined = (torch.randn((4 + 2 * 2) * 16, 64, device=DEVICE) / 8).bfloat16().requires_grad_()
    angles = torch.rand(3, 32, 8, device=DEVICE).repeat(1, 1, 2)
    parts = F.linear(x.float(), joined.float()).unflatten(-1, (-1, 16)).split([4, 2, 2], 2)
    plain = (*apply_rope(parts[0], parts[1], angles.cos(), angles.sin()), parts[2])
    ours = fp8.qkv_rope(x, joined, angles.cos().bfloat16(), angles.sin().bfloat16(), (4, 2), forward)
    upstream = [torch.randn_like(one) for one in plain]
    wanted = torch.autograd.grad(plain, (x, joined), upstream)
    found = torch.autograd.grad(ours, (x, joined), [one.bfloat16() for one in upstream])
    most = 0.06 if forward else 0.01
    assert all(_relative_error(a, b) < most and a.dtype == torch.bfloat16 for a, b in zip(ours, plain, strict=True))
    assert all(0.01 < _relative_error(a, b) < 0.1 and a.dtype == b.dtype for a, b in zip(found, wanted, strict=True))
    assert fp8.qkv_rope(x[:1, :7], joined, angles, angles, (4, 2)) is None


# In `make test`; test_prune_last_layer.py compares all of them in fp32.
_IN_SHORT = {("gemma3_text", True), ("glm4", False), ("phi3", True)}


@pytest.mark.parametrize(
    ("family", "trained"),
    [
        pytest.param(family, trained, marks=[] if GPU or (family, trained) in _IN_SHORT else pytest.mark.slow)
        for family in FUSED_FAMILIES
        for trained in (True, False)
    ],
)
def test_bf16_forwards_of_every_family_are_near_transformers_in_fp32(family, trained):
    """On a GPU, by the kernels that it has for them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "pad_token_id": None}  # fmt: skip
    kind = AutoConfig.for_model(family, **sizes, **FUSED_CHANGES.get(family, {}))
    plain = AutoModelForCausalLM.from_config(kind).to(DEVICE)
    for name, weight in plain.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    ids = np.random.default_rng(0).integers(0, 128, (2, 33))
    documents = np.repeat([[0] * 20 + [1] * 12], 2, 0)
    batch = Batch(ids[:, :-1], ids[:, 1:], np.tile(np.r_[:20, :12], (2, 1)), documents)
    found = []
    for dtype in (None, torch.bfloat16):
        model = deepcopy(plain)
        network = wrap_model(model, "sdpa", dtype)
        if dtype is not None:
            forwards.apply_fused_forwards(model)
            for weight in model.model.layers.parameters():
                weight.requires_grad_(trained)
        batcher = Batcher(2, 32, 0, DEVICE, "fp32" if dtype is None else "bf16", windows=network.sliding_windows)
        loss = Supervised().loss_sum(network, batcher.to_device(batch))
        loss.backward()
        found.append((float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}))
    (wanted, gradients), (near, others) = found
    assert near == pytest.approx(wanted, rel=5e-3)
    errors = {name: _relative_error(others[name], gradients[name]) for name in others if others[name] is not None}
    assert len(errors) == len(gradients) if trained else "model.embed_tokens.weight" in errors
    assert max(errors.values()) < 0.08, errors


@pytest.mark.slow
def test_an_fp8_model_has_nearly_the_loss_and_gradients_of_a_bf16_one():
    """The more is in FP8, the larger the error; with FP8 in the backward only, the loss is that of bf16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=512, tie_word_embeddings=False)
    plain = LlamaForCausalLM(config).to(DEVICE)
    ids = np.random.default_rng(0).integers(0, 512, (2, 33))
    places = np.tile(np.arange(32), (2, 1))
    batch = Batch(ids[:, :-1], ids[:, 1:], places, np.zeros((2, 32), np.int32))
    found = []
    for mode in ("off", "backward", "except_last_layer", "on"):
        model = deepcopy(plain)
        network = wrap_model(model, "sdpa", torch.bfloat16)
        forwards.apply_fused_forwards(model)
        if mode != "off":
            forwards.apply_fp8(model, mode)
        loss = Supervised().loss_sum(network, Batcher(2, 32, 0, DEVICE, "bf16").to_device(batch))
        loss.backward()
        found.append((float(loss.detach()), {name: weight.grad for name, weight in model.named_parameters()}))
    (wide, wanted), *in_fp8 = found
    assert in_fp8[0][0] == pytest.approx(wide, rel=1e-6 if DEVICE == "cpu" else 1e-4)
    assert all(near != wide and near == pytest.approx(wide, rel=2e-3) for near, _ in in_fp8[1:])
    assert all(_relative_error(grads[name], wanted[name]) < 0.15 for _, grads in in_fp8 for name in wanted)
    layers = [f"model.layers.{block}.{name}.weight" for block in (0, 1) for name in ("self_attn.o_proj", "mlp.up_proj")]
    back, inner, on = (
        [_relative_error(grads[name], wanted[name]) for name in (*layers, "lm_head.weight")] for _, grads in in_fp8
    )
    assert 0 < sum(back) < 0.9 * sum(on) and back[-1] < 0.01 and 0 < inner[-1] < 0.8 * on[-1]


def test_the_smoke_test_tolerates_rounding_and_nothing_else():
    """Where it fails, training uses torch instead of our kernels."""
    numbers = torch.tensor([1.0, 16.0, -448.0, 0.0]).repeat(100)
    once = numbers.clone()
    once[5] = 14.0
    assert fp8._is_close(numbers, numbers) and fp8._is_close(once, numbers)
    twice = numbers.clone()
    twice[5] = 8.0
    assert not fp8._is_close(twice, numbers) and not fp8._is_close(numbers * 1.125, numbers)


def test_fp8_of_zeros_is_zero():
    x = torch.zeros(16, 32, dtype=torch.bfloat16, device=DEVICE)
    assert not fp8.fp8_linear(x, torch.zeros(16, 32, dtype=torch.bfloat16, device=DEVICE), None).any()
    assert fp8.swiglu_mlp(x[:7], torch.zeros(64, 32), torch.zeros(32, 32)) is None


@needs_gpu
@pytest.mark.parametrize("shape", [(64, 128), (48, 80), (4096, 768), (1040, 11008)])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_fp8_cast_kernel_casts_as_torch_does_and_transposes(shape, kind):
    from sojourn.model.kernels.fp8_cast import cast_and_transpose, cast_transposed

    torch.manual_seed(0)
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    scale = fp8._scale(fp8._amax(x), kind)
    wanted = fp8._cast(x, scale, kind)
    row_major, transposed = cast_and_transpose(x, scale, kind)
    assert torch.equal(transposed.view(torch.uint8), row_major.t().contiguous().view(torch.uint8))
    assert torch.equal(transposed.view(torch.uint8), cast_transposed(x, scale, kind).view(torch.uint8))
    assert fp8._is_close(row_major.float(), wanted.float())


@needs_gpu
@pytest.mark.parametrize("width", [96, 1024, 5504])
def test_the_swiglu_kernels_return_the_amax_and_cast_to_fp8(width):
    from sojourn.model.kernels.swiglu import swiglu, swiglu_amax, swiglu_backward_fp8

    torch.manual_seed(0)
    joined = torch.randn(150, 2 * width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(150, width, device="cuda", dtype=torch.bfloat16)
    plain = swiglu(joined)
    made, most = swiglu_amax(joined.detach())
    torch.testing.assert_close(made, plain)
    for found, wanted in zip(most, (plain, joined), strict=True):
        assert float(found.amax()) == pytest.approx(float(wanted.detach().abs().amax()), rel=0.01)
    wide = joined.detach().float().requires_grad_()
    (wanted,) = torch.autograd.grad(swiglu(wide), wide, upstream.float())
    kind = torch.float8_e5m2
    scale = fp8._scale(300 * fp8._amax(wanted), kind)
    row_major, transposed = swiglu_backward_fp8(upstream, joined.detach(), scale)
    assert torch.equal(transposed.view(torch.uint8), row_major.t().contiguous().view(torch.uint8))
    assert fp8._is_close(row_major.float(), fp8._cast(wanted, scale, kind).float())


@pytest.mark.parametrize("seed", range(8))
def test_no_swiglu_gradient_exceeds_its_bound(seed):
    """With outliers too."""
    torch.manual_seed(seed)
    grad, wide, down = (torch.randn(*shape) ** (1 + 2 * (seed % 3)) for shape in ((20, 32), (20, 96), (32, 48)))
    wide.requires_grad_()
    gate, other = wide.chunk(2, -1)
    (made,) = torch.autograd.grad((F.silu(gate) * other) @ down.t(), wide, grad)
    bound = fp8._swiglu_grad_bound(grad, down.abs().amax(), wide.detach().abs().amax())
    assert made.abs().amax() * 1.3 < bound < 1e5 * made.abs().amax()


@pytest.mark.parametrize("nested", [True, False])
def test_nf4_linear_is_that_of_bitsandbytes(nested):
    bnb = pytest.importorskip("bitsandbytes")
    from sojourn.model.kernels import nf4

    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    layer = bnb.nn.Linear4bit(128, 96, compute_dtype=dtype, quant_type="nf4", compress_statistics=nested).to(DEVICE)
    x = torch.randn(3, 40, 128, device=DEVICE, dtype=dtype, requires_grad=True)
    upstream = torch.randn(3, 40, 96, device=DEVICE, dtype=dtype)
    plain = layer(x)
    ours = nf4.nf4_linear(x, layer.weight, layer.weight.quant_state, layer.bias)
    assert _relative_error(ours, plain) < (0.01 if DEVICE == "cuda" else 1e-6)
    wanted, found = (torch.autograd.grad(y, x, upstream)[0] for y in (plain, ours))
    assert _relative_error(found, wanted) < (0.01 if DEVICE == "cuda" else 1e-6)


def test_selective_activation_checkpointing_stores_nf4_outputs():
    """Otherwise each matmul would run twice, as with `full`."""
    from torch.utils.checkpoint import CheckpointPolicy

    from sojourn.model.activation_checkpointing import _policy
    from sojourn.model.kernels import nf4  # noqa: F401  registers the op

    assert _policy(None, torch.ops.sojourn.nf4_linear.default) is CheckpointPolicy.MUST_SAVE


@needs_gpu
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(12, 12, 64), (28, 4, 128), (6, 2, 96)])
def test_the_rope_kernel_rotates_as_torch_does(heads, kv_heads, size):
    from sojourn.model.kernels.rope import split_qkv_rope

    torch.manual_seed(0)
    joined = torch.randn(3, 100, (heads + 2 * kv_heads) * size, device="cuda", requires_grad=True)
    angles = torch.rand(3, 100, size // 2, device="cuda").repeat(1, 1, 2)
    parts = joined.unflatten(-1, (-1, size)).split([heads, kv_heads, kv_heads], 2)
    wanted = (*apply_rope(parts[0], parts[1], angles.cos(), angles.sin()), parts[2])
    found = split_qkv_rope(joined, angles.cos(), angles.sin(), heads, kv_heads)
    upstream = [torch.randn(3, n, 100, size, device="cuda").transpose(1, 2) for n in (heads, kv_heads, kv_heads)]
    for mine, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, reference)
    torch.testing.assert_close(*(torch.autograd.grad(made, joined, upstream)[0] for made in (found, wanted)))


@needs_gpu
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(28, 4, 128), (6, 2, 96)])
def test_queries_and_keys_of_their_own_are_rotated_as_torch_does(heads, kv_heads, size):
    from sojourn.model.kernels.rope import rope

    torch.manual_seed(0)
    parts = [torch.randn(3, 100, n, size, device="cuda", requires_grad=True) for n in (heads, kv_heads)]
    angles = torch.rand(3, 100, size // 2, device="cuda").repeat(1, 1, 2)
    cos_sin = angles.cos(), angles.sin()
    found, wanted = rope(*parts, *cos_sin, 1), apply_rope(*parts, *cos_sin)
    upstream = [torch.randn(3, n, 100, size, device="cuda").transpose(1, 2) for n in (heads, kv_heads)]
    gradients = [torch.autograd.grad(made, parts, upstream) for made in (found, wanted)]
    for mine, reference in zip((*found, *gradients[0]), (*wanted, *gradients[1]), strict=True):
        torch.testing.assert_close(mine, reference)


@needs_gpu
def test_the_rope_backward_kernel_returns_the_amax():
    from sojourn.model.kernels.rope import split_qkv_rope_backward, split_qkv_rope_backward_amax

    torch.manual_seed(0)
    parts = [torch.randn(3, 100, n, 96, device="cuda", dtype=torch.bfloat16) for n in (6, 2, 2)]
    angles = torch.rand(3, 100, 48, device="cuda").repeat(1, 1, 2)
    for part in parts:  # each has the amax once
        part[1, 7, 1, 3] = 50.0
        made, most = split_qkv_rope_backward_amax(*parts, angles.cos(), angles.sin())
        torch.testing.assert_close(made, split_qkv_rope_backward(*parts, angles.cos(), angles.sin()))
        wanted = made.float().abs().amax(-1).flatten()
        torch.testing.assert_close(most, wanted, rtol=0.01, atol=0.0)
        part[1, 7, 1, 3] = 0.0


@needs_gpu
@pytest.mark.parametrize("width", [7, 1024, 5504])
def test_the_swiglu_kernel_computes_as_torch_does(width):
    from sojourn.model.kernels.swiglu import swiglu

    torch.manual_seed(0)
    joined = torch.randn(3, 50, 2 * width, device="cuda", requires_grad=True)
    gate, other = joined.chunk(2, -1)
    wanted, found = F.silu(gate) * other, swiglu(joined)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(wanted)
    torch.testing.assert_close(*(torch.autograd.grad(made, joined, upstream)[0] for made in (found, wanted)))


@needs_gpu
def test_the_adamw_kernel_updates_as_torch_does():
    """Large and small tensors, decayed or not, clipped gradients, and a step that is skipped."""
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
    from sojourn.model.kernels.cross_entropy import cross_entropy_with_grad

    torch.manual_seed(0)
    logits = (5 * torch.randn(tokens, vocabulary, device="cuda")).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
    wanted = F.cross_entropy(logits, labels, reduction="none")
    (gradient,) = torch.autograd.grad(wanted.sum(), logits)
    used = logits.detach().clone()
    torch.testing.assert_close(cross_entropy_with_grad(used, labels), wanted)
    torch.testing.assert_close(used, gradient, atol=1e-6, rtol=1e-4)


def test_fp8_where_it_is_unsupported_is_refused_in_one_line():
    cpu, h200 = DeviceSpec("cpu", "cpu", "bf16"), DeviceSpec("cuda", "H200", "bf16", compute_capability=(9, 0))
    assert "CUDA" in fp8_unsupported_reason(cpu, "bf16", True) and "fused" in fp8_unsupported_reason(
        h200, "bf16", False
    )
    assert fp8_unsupported_reason(h200, "bf16", True) is None and "bf16" in fp8_unsupported_reason(h200, "fp16", True)
    config = load_run(["small", "train.fp8=on", "train.device=cpu"]).config
    from sojourn.train.resolve import resolve_here

    with pytest.raises(UserError, match=r"train\.fp8: needs a CUDA GPU, but this run is on cpu; leave it off"):
        resolve_here(config)
