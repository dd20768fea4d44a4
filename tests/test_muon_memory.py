"""What Muon's update makes beside weights, gradients and moments: as much as a plan says."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sojourn.plan.memory import memory
from sojourn.plan.shape import new_shape
from sojourn.plan.work import Work
from sojourn.train.update.muon import Muon


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
    ("vocabulary", "feed_forward", "wider"), [(4000, 96, 1.0), (300, 400, 20 / 12)], ids=["embedding", "matrix"]
)
def test_the_update_makes_what_is_planned(vocabulary, feed_forward, wider):
    """`wider`: matrices are made orthogonal in 32 bits here, and in 16 on a GPU."""
    shape = new_shape(64, 1, 2, 2, feed_forward, vocabulary, True)
    table, matrix = torch.nn.Parameter(torch.ones(vocabulary, 64)), torch.nn.Parameter(torch.ones(feed_forward, 64))
    groups = [{"params": [table]}, {"params": [matrix], "matrices": True}]
    optimizer = Muon(groups, 0.01, (0.9, 0.95), 1e-8)
    for _ in range(2):  # moments are made in the first
        table.grad, matrix.grad = torch.ones_like(table), torch.ones_like(matrix)
        with Made() as made:
            optimizer.step()
    work = Work(shape, "pretrain", 1, 8, optimizer="muon", device="cpu", precision="fp32", evaluates=False)
    update = next(moment for moment in memory(work).moments if moment.name == "optimizer's step")
    planned = sum(term.bytes for term in update.terms if term.kind == "temporary")
    plain = next(m for m in memory(replace(work, optimizer="adamw")).moments if m.name == "optimizer's step")
    assert not sum(term.bytes for term in plain.terms if term.kind == "temporary")
    assert made.most == pytest.approx(wider * planned, rel=0.05)
