"""Passes from a recording: the same numbers as passes made one by one, whatever happens between them."""

import math
import random

import pytest
import torch

from sojourn.errors import UserError
from sojourn.train import recorded
from sojourn.train import step as step_module
from sojourn.train.careful import Careful
from sojourn.train.feed import Ahead
from sojourn.train.recorded import Recorder
from sojourn.train.update.optim import Optimizer
from tiny import events, losses, run_train, same_weights, stop_after, tiny_home

GRAPHS = "train.cuda_graphs=on"


class ByHand:
    """Does again what was recorded, into the same tensors, as a CUDA graph does. A recording computes nothing."""

    def __init__(self, parameters):
        self.parameters, self.made, self.played = parameters, [], []

    def __call__(self, work):
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        first = before[0] is None
        part, grads = work(), [p.grad for p in self.parameters]
        for grad, kept in zip(grads, before, strict=True):
            grad.fill_(math.nan) if kept is None else grad.copy_(kept)
        part.fill_(math.nan)
        self.made.append(first)

        def again():
            self.played.append(first)
            for parameter, grad in zip(self.parameters, grads, strict=True):
                parameter.grad = None if first else grad
            part.copy_(work())
            for parameter, grad in zip(self.parameters, grads, strict=True):
                grad.copy_(parameter.grad)

        return again, part


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with tiny_home(tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.fixture(scope="module")
def rows(tiny):
    """One long text: every row of it is whole."""
    draw, path = random.Random(0), tiny.home / "long.txt"
    path.write_text(" ".join(draw.choice(["red", "green", "blue", "house", "tree"]) for _ in range(30_000)))
    return (f"data.sources={path}", "data.eval_fraction=0.02")


@pytest.fixture
def by_hand(tiny, rows, monkeypatch):
    """Recordings of the run to come, which has a device that goes on without waiting."""
    tiny.whole(*rows)
    kept = []

    def make(loss, parameters):
        kept.append(ByHand(parameters))
        return Recorder(loss, parameters, kept[-1])

    monkeypatch.setattr(step_module, "Recorder", make)
    monkeypatch.setattr(Optimizer, "shortens", property(lambda self: bool(self.torch.defaults.get("fused"))))
    monkeypatch.setattr(Ahead, "has", lambda self, step: self._next is not None and self._next[0] == step)
    return kept


@pytest.mark.parametrize("extra", [(), ("train.micro_batch=2",), ("train.ahead=off",)], ids=["one", "four", "waiting"])
def test_the_numbers_are_those_of_passes_made_one_by_one(tiny, rows, by_hand, extra):
    run = run_train(tiny.words(*rows, GRAPHS, *extra))
    assert losses(run) == pytest.approx(losses(tiny.whole(*rows, *extra)), rel=1e-6)
    several = "train.micro_batch=2" in extra
    assert by_hand[0].made == ([False, True] if several else [True]) or by_hand[0].made == [True, False]
    assert len(by_hand[0].played) >= (40 if several else 8)
