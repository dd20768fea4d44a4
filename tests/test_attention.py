"""Every attention backend against a dense reference in fp64, written here without any of the code under test."""

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

from sojourn.config.attention_backends import ATTENTION_BACKENDS, AttentionBackend
from sojourn.config.schema import Attention
from sojourn.machine.probe_software import importable
from sojourn.model import attention
from sojourn.model.attention import AttentionParams, attend, uses_flash_attention_4
from sojourn.model.kernels.hopper import HopperKernels
from sojourn.model.layout import Layout, compute_cu_seqlens, make_layout, pad_cu_seqlens
from sojourn.resolve.attention import attention_unsupported_reason, choose_attention
from sojourn.resolve.device_spec import PACKAGES, DeviceSpec

GPU = torch.cuda.is_available()
ROWS, WIDTH, HEADS, SIZE = 2, 96, 4, 32
CASES = {
    "plain": {},
    "window": {"window": 7},
    "window beyond every document": {"window": 1000},
    "softcap": {"softcap": 2.0},
    "shared keys": {"keys": 2},
    "one key": {"keys": 1, "window": 5},
    "one document a row": {"lengths": [[96], [96]]},
    "one document and padding": {"lengths": [[50], [81]]},
    "documents of one token": {"lengths": [[1] * 96, [95, 1]]},
}


def _documents(lengths) -> np.ndarray:
    """Which document each token is of; what is left of a row is padding."""
    found = np.full((ROWS, WIDTH), -1, np.int32)
    for row, sizes in enumerate(lengths):
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        found[row, : len(numbers)] = numbers
    return found


def _dense(q, k, v, documents, scale, window=None, softcap=None):
    """softmax(QKᵀ) over the allowed pairs alone, one query at a time."""
    out = torch.zeros_like(q)
    share = q.shape[2] // k.shape[2]
    for row in range(ROWS):
        for t in range(WIDTH):
            seen = [s for s in range(t + 1) if documents[row, s] == documents[row, t]]
            seen = seen if window is None else seen[-window:]
            keys, values = (x[row, seen].repeat_interleave(share, 1) for x in (k, v))
            scores = torch.einsum("shd,hd->sh", keys, q[row, t]) * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            out[row, t] = torch.einsum("sh,shd->hd", scores.softmax(0), values)
    return out


def _combinations():
    """Every backend on every device of this machine in every dtype that it supports."""
    cuda = [("cuda", precision) for precision in ("fp32", "bf16", "fp16")] if GPU else []
    for backend in ATTENTION_BACKENDS.values():
        for device, precision in (("cpu", "fp32"), *cuda):
            for case, chosen in CASES.items():
                reason = attention_unsupported_reason(backend, _model("softcap" in chosen), precision, _device(device))
                if reason is None or (backend.name, device) == ("flex", "cpu"):  # has no backward there
                    yield backend.name, device, attention.DTYPES[precision], case


def _model(softcap=False, window=None):
    return SimpleNamespace(head_dim=SIZE, softcap=softcap, sliding_window=window, attention_dropout=False)


def _device(device_type, **changes):
    facts = {"torch_version": tuple(int(n) for n in torch.__version__.split(".")[:2])}
    facts["packages"] = frozenset(filter(importable, PACKAGES))
    facts["compute_capability"] = torch.cuda.get_device_capability() if device_type == "cuda" else None
    return DeviceSpec(device_type, device_type, "fp32", **{**facts, **changes})


@pytest.fixture(scope="module")
def references():
    """Output and gradients of each case in fp64."""
    found = {}
    for name, case in CASES.items():
        torch.manual_seed(0)
        documents = _documents(case.get("lengths", [[20, 33, 7, 36], [60, 1, 30]]))
        keys = case.get("keys", HEADS)
        q, k, v = (torch.randn(ROWS, WIDTH, heads, SIZE, dtype=torch.float64) for heads in (HEADS, keys, keys))
        upstream = torch.randn(ROWS, WIDTH, HEADS, SIZE, dtype=torch.float64)
        upstream[torch.from_numpy(documents) < 0] = 0  # nothing is learnt from padding
        tensors = [x.requires_grad_() for x in (q, k, v)]
        out = _dense(*tensors, documents, 0.2, case.get("window"), case.get("softcap"))
        found[name] = (documents, tensors, upstream, out.detach(), torch.autograd.grad(out, tensors, upstream))
    return found


@pytest.mark.parametrize(("backend", "device", "dtype", "case"), _combinations(), ids=str)
def test_attention_equals_the_dense_reference(references, backend, device, dtype, case):
    chosen, forward_only = CASES[case], (backend, device) == ("flex", "cpu")
    documents, tensors, upstream, expected, gradients = references[case]
    q, k, v = (x.detach().to(device, dtype).requires_grad_(not forward_only) for x in tensors)
    starts = torch.from_numpy(pad_cu_seqlens(compute_cu_seqlens(documents))).to(device)
    window = chosen.get("window")
    layout = make_layout(
        backend, documents, torch.from_numpy(documents).to(device), starts, (window,) if window else ()
    )
    out = attend(q, k, v, layout, AttentionParams(0.2, window, chosen.get("softcap")))
    real = torch.from_numpy(documents) >= 0
    close = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    if backend in ("sdpa", "flex") and device == "cuda" and dtype == torch.float32:
        close = 2e-3  # tensor cores round to TF32 in some kernels
    assert _distance(out.cpu().double()[real], expected[real]) < close
    if not forward_only:
        found = torch.autograd.grad(out, (q, k, v), upstream.to(device, dtype))
        for mine, reference in zip(found, gradients, strict=True):
            assert _distance(mine.cpu().double(), reference) < close


def _distance(one, other) -> float:
    return float((one - other).norm() / other.norm())


def test_a_backend_that_fails_its_smoke_test_is_passed_over():
    assert attention.smoke_test("sdpa", "cpu", "fp32", 64) and attention.smoke_test("math", "cpu", "fp32", 64)
    assert not attention.smoke_test("varlen", "cpu", "fp32", 64)  # it has no kernel here
    assert not attention.smoke_test("flash_attention_2", "cpu", "fp32", 64)
    failed = _device("cpu", failed_attention=frozenset({"sdpa"}))
    assert choose_attention(_model(), "fp32", failed) == "math"


def test_a_machine_without_a_gpu_uses_torchs_own_attention():
    assert choose_attention(_model(), "fp32", _device("cpu")) == "sdpa"
    assert choose_attention(_model(softcap=True), "fp32", _device("cpu")) == "math"


def test_a_backend_without_sliding_windows_is_refused_where_the_model_has_them():
    backend = AttentionBackend("made_up", "", devices=("cpu",), sliding_window=False)
    assert attention_unsupported_reason(backend, _model(), "fp32", _device("cpu")) is None
    reason = attention_unsupported_reason(backend, _model(window=7), "fp32", _device("cpu"))
    assert reason == "has no sliding windows, which this model's attention has"


def test_a_backend_names_the_devices_that_it_needs():
    cuda, apple = ATTENTION_BACKENDS["varlen"], AttentionBackend("made_up", "", devices=("mps", "cpu"))
    reason = attention_unsupported_reason(cuda, _model(), "bf16", _device("cpu"))
    assert reason == "needs a CUDA GPU, but this run is on cpu"
    reason = attention_unsupported_reason(apple, _model(), "bf16", DeviceSpec("cuda", "L4", "bf16"))
    assert reason == "needs an Apple GPU or a CPU, but this run is on cuda"


def test_every_record_names_an_implementation_and_every_name_can_be_configured():
    for backend in ATTENTION_BACKENDS.values():
        assert callable(attention._load(backend.implementation))
    selectable = {name for name, backend in ATTENTION_BACKENDS.items() if not backend.fused_qkv}
    assert selectable == attention._IMPLEMENTATIONS.keys() == set(get_args(Attention)) - {"auto"}


def test_flash_attention_4_is_used_only_where_its_record_allows(monkeypatch):
    x, params = torch.zeros(1, dtype=torch.bfloat16), AttentionParams(1.0)
    whole = Layout("varlen", None, None, 96, one_document_per_row=True)
    assert not uses_flash_attention_4(x, whole, params)
    monkeypatch.setattr(HopperKernels, "attention", True)
    assert uses_flash_attention_4(x, whole, params) and uses_flash_attention_4(x, whole, replace(params, window=96))
    for refused in ({"window": 7}, {"softcap": 2.0}, {"dropout": 0.1}):
        assert not uses_flash_attention_4(x, whole, replace(params, **refused))
    assert not uses_flash_attention_4(x.half(), whole, params)
    assert not uses_flash_attention_4(x, replace(whole, one_document_per_row=False), params)
    assert not uses_flash_attention_4(x, replace(whole, backend="math"), params)
    reason = attention_unsupported_reason(ATTENTION_BACKENDS["flash_attention_4"], _model(), "bf16", _device("cpu"))
    assert reason == "takes rows of one document only"
