"""The chunked loss equals the whole one, in value, gradient and score, and never holds all logits."""

import pytest
import torch
import torch.nn.functional as F

from sojourn.model import loss
from sojourn.model.loss import loss_sum, score


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
    monkeypatch.setattr(loss, "_CHUNK_BYTES", {"cpu": 1})
    hidden = torch.randn(rows, 24, requires_grad=True)
    labels = torch.randint(0, 500, (rows,))
    trained = [p for p in head.parameters() if p.requires_grad]
    whole = F.cross_entropy(head(hidden), labels, reduction="sum")
    wanted = torch.autograd.grad(whole / 7, [hidden, *trained])
    chunked = loss_sum(head, hidden, labels)
    found = torch.autograd.grad(chunked / 7, [hidden, *trained])
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-4)
    for mine, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)
    lost, right = score(head, hidden, labels)
    torch.testing.assert_close(lost, whole.detach(), rtol=1e-5, atol=1e-4)
    assert int(right) == int((head(hidden).argmax(-1) == labels).sum())


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
        (65536 * loss_sum(head, hidden, labels)).backward()
    assert hidden.grad.dtype == torch.float16
    assert float((hidden.grad.double() / 65536 - wanted).norm() / wanted.norm()) < 0.005


def test_no_tensor_as_large_as_all_logits_is_ever_made(monkeypatch):
    monkeypatch.setattr(loss, "_CHUNK_BYTES", {"cpu": 1})
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
        loss_sum(head, hidden, labels).backward()
    assert max(largest) < 4096 * 500 / 8
