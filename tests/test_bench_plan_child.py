"""What a measured case does before it is timed: compiling with little memory, and steps under a cap."""

from types import SimpleNamespace

import pytest
import torch

from sojourn.bench.plan import child
from sojourn.bench.plan.cases import NEW, Case
from sojourn.bench.plan.ground import lay, settings_of
from sojourn.plan.shape import Shape
from sojourn.run.folder import RunFolder


def test_two_blocks_compile_what_all_blocks_need(tmp_path, monkeypatch):
    from torch._dynamo.utils import counters
    from torch.nn import Module

    from sojourn.train.ranks import Ranks
    from sojourn.train.session import open_session

    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(NEW, "four blocks", Shape(32, 4, 2, 1, 96, 300, True))
    real = Module.compile
    monkeypatch.setattr(Module, "compile", lambda self: real(self, backend="aot_eager"))
    case = Case("x", "pretrain", "four blocks", 64, 2, True, document=20)
    config = settings_of(case, "cpu", tmp_path)
    lay(case, config, tmp_path)
    run = RunFolder(tmp_path / "home/runs/x")
    run.path.mkdir(parents=True)
    session = open_session(config, run, Ranks(device="cpu"))
    counters.clear()
    batches = [session.batches(step) for step in range(2)]
    child._compile(session, batches)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0 and session.stepper.network.body.config.num_hidden_layers == 4
    assert all(parameter.grad is None for parameter in session.stepper.network.model.parameters())
    child._two(session, batches)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("wrong shape")])
def test_only_memory_is_an_answer_under_a_cap_which_never_stays(monkeypatch, error):
    caps, thrown = [], []

    def step(batches):
        raise error

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", caps.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(child, "_begin_anew", lambda device: None)
    session = SimpleNamespace(stepper=SimpleNamespace(step=step, discard=lambda: thrown.append(1)))
    if isinstance(error, torch.OutOfMemoryError):
        found = child._capped(session, [[]], 50)
        assert found["cap"] == 50 and found["out_of_memory"] and thrown == [1]
    else:
        with pytest.raises(RuntimeError, match="wrong shape"):
            child._capped(session, [[]], 50)
    assert caps == [0.5, 1.0]
