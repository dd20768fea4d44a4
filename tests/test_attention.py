"""Every attention backend against a dense mask in 64 bits, written here without any of the code under test."""

import numpy as np
import pytest
import torch

from sojourn.model import attention
from sojourn.model.attention import AttentionParams, attend
from sojourn.model.layout import compute_cu_seqlens, make_layout, pad_cu_seqlens

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
            for head in range(q.shape[2]):
                scores = (k[row, seen, head // share] @ q[row, t, head]) * scale
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                out[row, t, head] = scores.softmax(0) @ v[row, seen, head // share]
    return out


def _combinations():
    """What can be tried here: each backend, on each device, in each kind of numbers, in each case."""
    cuda = [("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)] if GPU else []
    for backend in ("math", "sdpa", "flex", "varlen", "flash_attention_2"):
        for device, dtype in (("cpu", torch.float32), *cuda):
            for case, chosen in CASES.items():
                half, softcap = dtype != torch.float32, "softcap" in chosen
                wrong = attention.fault(backend, device, half, SIZE, softcap, dropout=False)
                if wrong is None or (backend, device) == ("flex", "cpu"):  # which has a forward at least
                    yield backend, device, dtype, case


@pytest.fixture(scope="module")
def references():
    """Output and gradients of each case in 64 bits."""
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


def test_a_backend_that_fails_when_it_is_tried_is_passed_over(monkeypatch):
    assert attention.works("sdpa", "cpu", False, 64) and attention.works("math", "cpu", False, 64)
    assert not attention.works("varlen", "cpu", False, 64)  # it has no kernel here
    assert not attention.works("flash_attention_2", "cpu", False, 64)
    monkeypatch.setattr(attention, "works", lambda name, *given: name != "sdpa")
    assert attention.choose("cpu", False, 64, False, False) == "math"


def test_a_machine_without_a_gpu_uses_torchs_own_attention():
    assert attention.choose("cpu", False, 64, False, False) == "sdpa"
    assert attention.choose("cpu", False, 64, True, False) == "math"
