"""The chunked loss equals the loss of full logits in value, gradient and accuracy, and never materializes them all."""

import pytest
import torch
import torch.nn.functional as F

from sojourn.estimate import memory
from sojourn.model import loss
from sojourn.model.loss import _chunk_ranges, cross_entropy_sum, loss_and_correct


@pytest.fixture(params=["plain", "bias", "frozen", "own"])
def head(request):
    torch.manual_seed(0)
    made = torch.nn.Linear(24, 500, bias=request.param == "bias")
    if request.param == "own":

        class Own(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = made

            @property
            def weight(self):
                return self.inner.weight

            def forward(self, hidden):
                return 3 * torch.tanh(self.inner(hidden))

        return Own()
    return made.requires_grad_(request.param != "frozen")


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 1000])
def test_chunks_change_nothing_but_rounding(head, rows, monkeypatch):
    monkeypatch.setattr(memory, "LOGIT_CHUNK_BYTES", {"cpu": 1})
    hidden = torch.randn(rows, 24, requires_grad=True)
    labels = torch.randint(0, 500, (rows,))
    trained = [p for p in head.parameters() if p.requires_grad]
    whole = F.cross_entropy(head(hidden), labels, reduction="sum")
    wanted = torch.autograd.grad(whole / 7, [hidden, *trained])
    chunked = cross_entropy_sum(head, hidden, labels)
    found = torch.autograd.grad(chunked / 7, [hidden, *trained])
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-4)
    for mine, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)
    lost, right = loss_and_correct(head, hidden, labels)
    torch.testing.assert_close(lost, whole.detach(), rtol=1e-5, atol=1e-4)
    assert int(right) == int((head(hidden).argmax(-1) == labels).sum())


@pytest.mark.parametrize("chunked", [False, True], ids=["full logits", "chunked"])
def test_labels_below_0_are_ignored(head, chunked, monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(memory, "LOGIT_CHUNK_BYTES", dict.fromkeys(("cpu", "cuda", "triton"), 1))
    head, hidden = head.to(device), torch.randn(700, 24, device=device)
    labels = torch.randint(0, 500, (700,), device=device)
    trained = [p for p in head.parameters() if p.requires_grad]
    found = []
    for count in (300, 700):
        some = hidden[:count].clone().requires_grad_()
        counted = labels[:count].masked_fill(torch.arange(count, device=device) >= 300, -100)
        total = cross_entropy_sum(head, some, counted, chunked)
        found.append((total, *torch.autograd.grad(total, [some, *trained])))
    (total, mine, *weights), (again, theirs, *others) = found
    torch.testing.assert_close(again, total, rtol=1e-5, atol=1e-4)
    assert not theirs[300:].any()
    for one, other in zip((mine, *weights), (theirs[:300], *others), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_a_sure_models_small_gradient_survives_fp16():
    """Shares of a thousandth and far less, as a model has them that knows the answer."""
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 1000, bias=False)
    torch.nn.init.normal_(head.weight, 0.0, 0.125)
    labels = torch.arange(8)
    known = head.weight.detach()[labels]
    hidden = (16 * known / known.square().sum(-1, keepdim=True)).half()
    exact, weight = hidden.double().requires_grad_(), head.weight.detach().half().double()
    whole = F.cross_entropy(exact @ weight.T, labels, reduction="sum")
    assert whole < 8e-3
    (wanted,) = torch.autograd.grad(whole, exact)
    hidden.requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        (65536 * cross_entropy_sum(head, hidden, labels)).backward()
    assert hidden.grad.dtype == torch.float16
    assert float((hidden.grad.double() / 65536 - wanted).norm() / wanted.norm()) < 0.005


@pytest.mark.parametrize("tokens", [3, 64, 101])
def test_an_fp8_lm_head_is_near_a_bf16_one(tokens, monkeypatch):
    """Also where what is left over of the chunks is not a multiple of the alignment of FP8 matmuls."""
    monkeypatch.setattr(loss, "_chunk_size", lambda *_, **__: 40)
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 480, bias=False)
    hidden = torch.randn(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 480, (tokens,))
    found = []
    for use_fp8 in (False, True):
        head.fp8 = use_fp8
        total = cross_entropy_sum(head, hidden, labels)
        found.append((total.detach(), *torch.autograd.grad(total, (hidden, head.weight))))
    (wide, *wanted), (near, *grads) = found
    assert float(near) == pytest.approx(float(wide), rel=0.01) and (tokens < 16) == (float(near) == float(wide))
    for one, other in zip(grads, wanted, strict=True):
        assert one.dtype == other.dtype and (one - other).norm() < 0.1 * other.norm()


def test_chunks_are_aligned_and_the_remainder_comes_last():
    assert list(_chunk_ranges(10, 4, 1)) == [(0, 4), (4, 8), (8, 10)] and list(_chunk_ranges(0, 4, 16)) == []
    assert list(_chunk_ranges(101, 40, 16)) == [(0, 32), (32, 64), (64, 96), (96, 101)]
    assert list(_chunk_ranges(64, 7, 16)) == [(0, 16), (16, 32), (32, 48), (48, 64)]


def test_no_tensor_as_large_as_all_logits_is_ever_made(monkeypatch):
    monkeypatch.setattr(memory, "LOGIT_CHUNK_BYTES", {"cpu": 1})
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            largest.append(out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    head = torch.nn.Linear(24, 500, bias=False)
    hidden, labels = torch.randn(4096, 24, requires_grad=True), torch.randint(0, 500, (4096,))
    with Watch():
        cross_entropy_sum(head, hidden, labels).backward()
    assert max(largest) < 4096 * 500 / 8
