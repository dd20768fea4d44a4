"""What Muon's update makes beside weights, gradients and optimizer states: as much as a plan estimates."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sojourn.estimate.memory import memory
from sojourn.estimate.workload import Workload
from sojourn.resolve.new_model import llama_spec
from sojourn.train.optim.muon import Muon


class Made(TorchDispatchMode):
    """Bytes of tensors that operations made and that are still there: now, and at most."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.there = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if torch.is_tensor(tensor) else None
            if storage is not None and storage._cdata not in given and storage._cdata not in self.there:
                self._count(storage)
        return out

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()

        def gone(_):
            self.now -= size
            del self.there[key]

        self.there[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


@pytest.mark.parametrize(
    ("vocabulary", "feed_forward", "wider"), [(9000, 96, 1.0), (300, 400, 9.28 / 8)], ids=["embedding", "matrices"]
)
def test_the_update_makes_what_is_planned(vocabulary, feed_forward, wider):
    """`wider`: matrices are made orthogonal in 32 bits here, and in 16 on a GPU."""
    shape = llama_spec(64, 2, 2, 2, feed_forward, vocabulary, True)
    table = torch.nn.Parameter(torch.ones(vocabulary, 64))
    sizes = [(64, 64)] * 4 + [(feed_forward, 64)] * 2 + [(64, feed_forward)]
    matrices = [torch.nn.Parameter(torch.ones(size)) for size in sizes * 2]
    groups = [{"params": [table]}, {"params": matrices, "matrices": True}]
    optimizer = Muon(groups, 0.01, (0.9, 0.95), 1e-8)
    for _ in range(2):  # optimizer states are made in the first
        for parameter in (table, *matrices):
            parameter.grad = torch.ones_like(parameter)
        with Made() as made:
            optimizer.step()
    work = Workload(
        shape, "pretrain", 1, 8, optimizer="muon", device_type="cpu", precision="fp32", with_evaluation=False
    )
    update = next(phase for phase in memory(work).phases if phase.name == "optimizer step")
    planned = sum(term.bytes for term in update.terms if term.kind == "temporary buffers")
    plain = next(m for m in memory(replace(work, optimizer="adamw")).phases if m.name == "optimizer step")
    assert not sum(term.bytes for term in plain.terms if term.kind == "temporary buffers")
    assert made.most == pytest.approx(wider * planned, rel=0.05)


def _updated(muon_groups, monkeypatch):
    monkeypatch.setattr("sojourn.train.optim.muon.MUON_GROUP_ELEMENTS", muon_groups)
    torch.manual_seed(0)
    sizes = [(64, 64), (64, 96), (96, 64), (64,)] * 12
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    optimizer = Muon([{"params": parameters, "matrices": True, "weight_decay": 0.1}], 0.01, (0.9, 0.95), 1e-8)
    for step in range(3):
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape) if step or i else None  # one comes later
        with Counted() as counted:
            optimizer.step()
    return parameters, counted.calls


class Counted(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_tensors_of_one_shape_are_updated_together_as_each_by_itself(monkeypatch):
    alone, many = _updated(1, monkeypatch)
    some, fewer = _updated(5 * 64 * 96, monkeypatch)
    all_of_them, few = _updated(2**25, monkeypatch)
    for others in (some, all_of_them):
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(alone, others, strict=True))
    assert many > 2.5 * fewer and fewer > 2 * few
