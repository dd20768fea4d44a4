"""Every attention backend against a dense reference in fp64, written here without any of the code under test."""

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

from sojourn.config.attention_backends import ATTENTION_BACKENDS, LONG_ROW, AttentionBackend
from sojourn.config.schema import Attention
from sojourn.data.artefact import Batch
from sojourn.estimate.activations import attended_key_size
from sojourn.estimate.workload import Workload
from sojourn.machine.probe_software import importable
from sojourn.model import attention
from sojourn.model.attention import AttentionParams, attend, uses_flash_attention_4
from sojourn.model.kernels.cpu.decoder_layer import fits_attention_kernel
from sojourn.model.kernels.hopper import HopperKernels
from sojourn.model.layout import Layout, compute_cu_seqlens, make_layout, pad_cu_seqlens
from sojourn.resolve.attention import attention_unsupported_reason, choose_attention
from sojourn.resolve.device_spec import PACKAGES, DeviceSpec
from sojourn.train.batcher import Batcher

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
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
    "longer than a block": {"lengths": [[300], [30, 270]], "width": 300, "keys": 2},  # of kernels that have blocks
}


def _documents(lengths, width=WIDTH) -> np.ndarray:
    """Which document each token is of; what is left of a row is padding."""
    found = np.full((ROWS, width), -1, np.int32)
    for row, sizes in enumerate(lengths):
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        found[row, : len(numbers)] = numbers
    return found


def _dense(q, k, v, documents, scale, window=None, softcap=None):
    """softmax(QKᵀ) over the allowed pairs alone, one query at a time."""
    out = torch.zeros_like(q)
    share = q.shape[2] // k.shape[2]
    for row in range(ROWS):
        for t in range(q.shape[1]):
            seen = [s for s in range(t + 1) if documents[row, s] == documents[row, t]]
            seen = seen if window is None else seen[-window:]
            keys, values = (x[row, seen].repeat_interleave(share, 1) for x in (k, v))
            scores = torch.einsum("shd,hd->sh", keys, q[row, t]) * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            out[row, t] = torch.einsum("sh,shd->hd", scores.softmax(0), values)
    return out


def _combinations(devices=DEVICES, **facts):
    """Every backend on these devices, in the dtypes and cases that it supports. `facts`: of the devices."""
    for device_type in devices:
        device = _device(device_type, **facts)
        for backend in ATTENTION_BACKENDS.values():
            for precision in _precisions(backend, device_type):
                for case, chosen in CASES.items():
                    model = _model("softcap" in chosen, chosen.get("window"))
                    reason = attention_unsupported_reason(backend, model, precision, device)
                    if reason is None or (backend.name, device_type) == ("flex", "cpu"):  # has no backward there
                        yield backend.name, device_type, attention.DTYPES[precision], case


def _precisions(backend, device_type):
    """On a CPU one, to save time: fp32, else bf16; runs in fp16 need a GPU."""
    if device_type == "cuda":
        return backend.dtypes
    return [precision for precision in ("fp32", "bf16") if precision in backend.dtypes][:1]


def _model(softcap=False, window=None):
    return SimpleNamespace(head_dim=SIZE, softcap=softcap, sliding_window=window, attention_dropout=False)


def _device(device_type, **changes):
    facts = {"torch_version": tuple(int(n) for n in torch.__version__.split(".")[:2])}
    facts["packages"] = frozenset(filter(importable, PACKAGES))
    if device_type == "cuda" and "compute_capability" not in changes:
        facts["compute_capability"] = torch.cuda.get_device_capability()
    return DeviceSpec(device_type, device_type, "fp32", **{**facts, **changes})


@pytest.fixture(scope="module")
def references():
    """Output and gradients of each case in fp64."""
    found = {}
    for name, case in CASES.items():
        torch.manual_seed(0)
        width, keys = case.get("width", WIDTH), case.get("keys", HEADS)
        documents = _documents(case.get("lengths", [[20, 33, 7, 36], [60, 1, 30]]), width)
        q, k, v = (torch.randn(ROWS, width, heads, SIZE, dtype=torch.float64) for heads in (HEADS, keys, keys))
        upstream = torch.randn(ROWS, width, HEADS, SIZE, dtype=torch.float64)
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
    if backend != "math" and device == "cuda" and dtype == torch.float32:
        close = 2e-3  # tensor cores round to TF32 in some kernels
    assert _distance(out.cpu().double()[real], expected[real]) < close
    if not forward_only:
        found = torch.autograd.grad(out, (q, k, v), upstream.to(device, dtype))
        for mine, reference in zip(found, gradients, strict=True):
            assert _distance(mine.cpu().double(), reference) < close


def _distance(one, other) -> float:
    return float((one - other).norm() / other.norm())


def _compared():
    """Each backend and device with a comparison, if a CUDA GPU and all packages were here."""
    newest = {"torch_version": (99, 0), "packages": PACKAGES, "compute_capability": (99, 0)}
    return {combination[:2] for combination in _combinations(("cpu", "cuda"), **newest)}


def test_every_backend_is_compared_on_each_of_its_devices():
    names = attention._IMPLEMENTATIONS
    supported = {(name, device_type) for name in names for device_type in ATTENTION_BACKENDS[name].devices}
    without = supported - _compared() - {(name, "mps") for name in names}
    assert not without, f"no precision and case of SIZE {SIZE} suits {without}"


def test_a_backend_is_compared_in_what_its_record_supports_and_in_nothing_else(monkeypatch):
    backend = AttentionBackend("made_up", "", devices=("cpu",), dtypes=("bf16",), sliding_window=False)
    monkeypatch.setitem(ATTENTION_BACKENDS, "made_up", backend)
    made_up = [combination[1:] for combination in _combinations(("cpu",)) if combination[0] == "made_up"]
    supported = [case for case, chosen in CASES.items() if not chosen.keys() & {"window", "softcap"}]
    assert made_up == [("cpu", torch.bfloat16, case) for case in supported]
    monkeypatch.setitem(ATTENTION_BACKENDS, "made_up", replace(backend, dtypes=("fp16",)))
    assert ("made_up", "cpu") not in _compared()


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


@pytest.mark.parametrize(
    ("limits", "size", "said"),
    [
        ({"max_head_dim": 64}, 65, "takes head sizes up to 64, but this model's is 65"),
        ({"head_dim_multiple": 16}, 40, "takes multiples of 16 as head sizes, but this model's is 40"),
        ({"max_head_dim": 64, "head_dim_multiple": 16}, 80, "takes head sizes up to 64, but this model's is 80"),
    ],
)
def test_a_backend_names_the_head_sizes_that_it_takes(limits, size, said):
    model, backend = _model(), AttentionBackend("made_up", "", devices=("cpu",), **limits)
    for model.head_dim, reason in ((64, None), (size, said)):
        assert attention_unsupported_reason(backend, model, "fp32", _device("cpu")) == reason


def test_a_compute_capability_is_asked_of_cuda_gpus_only():
    backend = AttentionBackend("made_up", "", devices=("cuda", "cpu"), min_capability=(8, 0))
    assert attention_unsupported_reason(backend, _model(), "fp32", _device("cpu")) is None
    for capability, reason in (((7, 5), "needs a GPU of compute capability 8.0 or newer"), ((8, 0), None)):
        gpu = _device("cuda", compute_capability=capability)
        assert attention_unsupported_reason(backend, _model(), "fp32", gpu) == reason


def test_what_a_backend_does_besides_is_asked_of_its_record(monkeypatch):
    backend = AttentionBackend("made_up", "", devices=("cpu",), mask="dense")
    fuller = replace(backend, long_row_gqa=True, length_buckets=True, replaced_by=("hopper_kernels", "cpu_kernels"))
    model = SimpleNamespace(heads=4, kv_heads=2, head_dim=SIZE)
    monkeypatch.setattr(HopperKernels, "attention", True)
    x, params = torch.zeros(1, dtype=torch.bfloat16), AttentionParams(1.0)
    ids, documents = np.zeros((2, 4), np.int64), np.array([[0, 0, 0, -1], [0, 0, 0, 0]], np.int32)
    for record, has in ((backend, False), (fuller, True)):
        monkeypatch.setitem(ATTENTION_BACKENDS, "made_up", record)
        whole = Layout("made_up", None, None, 96, one_document_per_row=True)
        assert uses_flash_attention_4(x, whole, params) is has
        assert fits_attention_kernel(whole, params) is has
        batch = Batcher(2, 4, 0, "cpu", backend="made_up", unpad=True).to_device(Batch(ids, ids, ids, documents))
        assert (batch.layout.length_buckets is not None) is has
        for length in (LONG_ROW, LONG_ROW - 1):
            heads = model.kv_heads if has and length == LONG_ROW else model.heads
            workload = Workload(model, sequence_length=length, attention="made_up")
            assert attended_key_size(workload) == heads * model.head_dim


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
